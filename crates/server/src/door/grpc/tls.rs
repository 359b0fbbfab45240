//! TLS in front of the door: its certificate, and whose clients are let in.
//!
//! The files are looked at as the rules file is, and read again when they have changed: whoever renews a certificate
//! writes it in place, and no connection notices but those that are made after that. A certificate and its key
//! are two files, which nobody changes at one instant; so what has just changed is read only once it stays as it is.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    config::TlsFiles,
    metrics::Text,
    reload::{Mark, mark},
};

/// Why TLS cannot be had. Each names the setting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read, or has nothing in it that it should have.
    #[error("grpc.tls.{setting}: cannot use {path}: {problem}")]
    File {
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The key is not that of the certificate, or neither can be used.
    #[error("grpc.tls: {0}")]
    Unusable(#[from] rustls::Error),
}

/// What connections are accepted with, and the files that it comes from.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    in_force: ArcSwap<ServerConfig>,
    seen: Mutex<Seen>,
    /// What was wrong with the files when they were last read.
    problem: Mutex<Option<String>>,
    loads: [AtomicU64; 2],
}

/// What the files look like from outside.
type Marks = Vec<Option<Mark>>;

#[derive(Debug)]
struct Seen {
    /// When they were last read.
    read: Marks,
    /// When they were last looked at.
    looked: Marks,
}

impl Tls {
    /// TLS 1.2 and 1.3 with the certificate and key of `files`; if there is a client authority, only for clients that
    /// show a certificate of it.
    ///
    /// # Errors
    ///
    /// [`TlsError`]: a file that cannot be read, has nothing of its kind in it, or does not fit the others.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let marks = marks(files);
        Ok(Self {
            in_force: ArcSwap::from_pointee(server_config(files)?),
            files: files.clone(),
            seen: Mutex::new(Seen {
                read: marks.clone(),
                looked: marks,
            }),
            problem: Mutex::default(),
            loads: Default::default(),
        })
    }

    /// Reads the files and puts them in force for the connections that are made from now on.
    ///
    /// # Errors
    ///
    /// What [`Self::load`] refuses. What was in force stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let mut seen = lock(&self.seen);
        seen.read = marks(&self.files);
        let loaded = server_config(&self.files).map(|config| self.in_force.store(Arc::new(config)));
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        *lock(&self.problem) = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(()) => tracing::info!("reloaded the certificate of the gRPC door"),
            Err(error) => tracing::error!("kept the old certificate of the gRPC door: {error}"),
        }
        loaded
    }

    /// Whether the files have changed since they were last read, and not since they were last looked at.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        let (mut seen, now) = (lock(&self.seen), marks(&self.files));
        let is_settled = seen.looked == now;
        // A file that is gone for the moment is being replaced: wait for what comes.
        let is_whole = now.iter().all(Option::is_some);
        let has_changed = is_settled && is_whole && seen.read != now;
        seen.looked = now;
        has_changed
    }

    /// What was wrong with the files when they were last read; `None` if they are in force.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// Appends what was counted to `text`.
    pub(crate) fn write(&self, text: &mut Text) {
        let name = "tidegate_certificate_loads_total";
        let help = "Loads of the gRPC door's certificate after the start.";
        text.family(name, "counter", help);
        let [succeeded, failed] = &self.loads;
        for (result, count) in [("ok", succeeded), ("failed", failed)] {
            text.sample(name, &[("result", result)], count.load(Ordering::Relaxed));
        }
        let help = "1 unless the last load of the gRPC door's certificate failed.";
        let is_in_force = u64::from(self.problem().is_none());
        text.single(
            "tidegate_last_certificate_load_success",
            "gauge",
            help,
            is_in_force,
        );
    }

    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.in_force.load_full())
            .accept(stream)
            .await
    }
}

fn marks(files: &TlsFiles) -> Marks {
    let paths = [&files.certificate, &files.key]
        .into_iter()
        .chain(&files.client_ca);
    paths.map(|path| mark(path)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(default_provider());
    let certificates = certificates("certificate", &files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| unusable("key", &files.key, error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = certificates_as_roots(path)?;
            let verifier: Arc<dyn ClientCertVerifier> =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .build()
                    .map_err(|error| unusable("client_ca", path, error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(certificates, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let certificates: Vec<_> = read.map_err(|error| unusable(setting, path, error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable(
            setting,
            path,
            "there is no certificate in it".into(),
        ));
    }
    Ok(certificates)
}

fn certificates_as_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("client_ca", path)? {
        roots
            .add(certificate)
            .map_err(|error| unusable("client_ca", path, error.to_string()))?;
    }
    Ok(roots)
}

fn unusable(setting: &'static str, path: &Path, problem: String) -> TlsError {
    TlsError::File {
        setting,
        path: path.to_owned(),
        problem,
    }
}
