//! TLS in front of a door: its certificate, and whose clients are let in.
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
    InconsistentKeys, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring::default_provider},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::Connection;
use crate::{
    config::TlsFiles,
    metrics::Text,
    reload::{Mark, mark},
};

/// The door that speaks behind TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// The gRPC door, which speaks HTTP/2.
    Grpc,
    /// The reverse proxy, which speaks HTTP/2 or HTTP/1.1, as the client likes.
    Proxy,
    /// The HTTP listener, which speaks HTTP/1.1.
    Http,
    /// The listener of the Redis protocol.
    Resp,
}

impl Behind {
    /// What the door's section is called in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Proxy => "proxy",
            Self::Http => "listen.http",
            Self::Resp => "listen.resp",
        }
    }

    /// What it is called in logs and metrics.
    #[must_use]
    pub const fn door(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Proxy => "proxy",
            Self::Http => "http",
            Self::Resp => "resp",
        }
    }

    fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Grpc => vec![b"h2".to_vec()],
            Self::Proxy => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Self::Http => vec![b"http/1.1".to_vec()],
            Self::Resp => Vec::new(),
        }
    }
}

/// Why TLS cannot be had. Each names the setting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read, or has nothing in it that it should have.
    #[error("{}.tls.{setting}: cannot use {path}: {problem}", behind.as_str())]
    File {
        /// The door whose file it is.
        behind: Behind,
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The key is not that of the certificate, or neither can be used.
    #[error("{}.tls: cannot use {certificate} with the key {key}: {}", behind.as_str(), misfit(source))]
    Unusable {
        /// The door whose key it is.
        behind: Behind,
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// What is wrong with them.
        source: rustls::Error,
    },
}

/// What connections are accepted with, and the files that it comes from.
#[derive(Debug)]
pub struct Tls {
    behind: Behind,
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
    pub fn load(behind: Behind, files: &TlsFiles) -> Result<Self, TlsError> {
        let marks = marks(files);
        Ok(Self {
            behind,
            in_force: ArcSwap::from_pointee(server_config(behind, files)?),
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
        let loaded = server_config(self.behind, &self.files)
            .map(|config| self.in_force.store(Arc::new(config)));
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        *lock(&self.problem) = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(()) => tracing::info!(door = self.behind.door(), "reloaded the certificate"),
            Err(error) => tracing::error!("kept the old certificate: {error}"),
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

    /// The door that speaks behind it.
    #[must_use]
    pub const fn behind(&self) -> Behind {
        self.behind
    }

    /// Appends what was counted of `certificates` to `text`.
    pub(crate) fn write(certificates: &[Arc<Self>], text: &mut Text) {
        let name = "tidegate_certificate_loads_total";
        let help = "Loads of a door's certificate after the start.";
        text.family(name, "counter", help);
        for tls in certificates {
            let [succeeded, failed] = &tls.loads;
            for (result, count) in [("ok", succeeded), ("failed", failed)] {
                let labels = [("door", tls.behind.door()), ("result", result)];
                text.sample(name, &labels, count.load(Ordering::Relaxed));
            }
        }
        let name = "tidegate_last_certificate_load_success";
        let help = "1 unless the last load of the door's certificate failed.";
        text.family(name, "gauge", help);
        for tls in certificates {
            let is_in_force = u64::from(tls.problem().is_none());
            text.sample(name, &[("door", tls.behind.door())], is_in_force);
        }
    }

    /// Accepts on the stream of `connection`, in the time that a request may take to arrive.
    pub(crate) async fn accept_in_time(
        &self,
        stream: TcpStream,
        connection: &Connection,
    ) -> Option<TlsStream<TcpStream>> {
        let peer = connection.peer;
        match tokio::time::timeout(connection.bounds.request, self.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => tracing::debug!(%peer, "TLS handshake failed: {error}"),
            Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
        }
        None
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
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

fn server_config(behind: Behind, files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(default_provider());
    let certificates = certificates(&files.certificate)
        .map_err(|problem| unusable(behind, "certificate", &files.certificate, problem))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| unusable(behind, "key", &files.key, error.to_string()))?;
    let misfit = |source| TlsError::Unusable {
        behind,
        certificate: files.certificate.clone(),
        key: files.key.clone(),
        source,
    };
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(misfit)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = client_verifier(path, provider);
            let wrong = |problem| unusable(behind, "client_ca", path, problem);
            builder.with_client_cert_verifier(verifier.map_err(wrong)?)
        }
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .map_err(misfit)?;
    config.alpn_protocols = behind.protocols();
    Ok(config)
}

fn misfit(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            "it is not that of the certificate".to_owned()
        }
        error => error.to_string(),
    }
}

fn client_verifier(
    path: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let roots = Arc::new(roots(path)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
    let verifier = verifier.map_err(|error| error.to_string())?;
    Ok(verifier)
}

/// The authorities in the file at `path`, or what is wrong with it.
pub(crate) fn roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let certificates: Vec<_> = read.map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("there is no certificate in it".into());
    }
    Ok(certificates)
}

fn unusable(behind: Behind, setting: &'static str, path: &Path, problem: String) -> TlsError {
    TlsError::File {
        behind,
        setting,
        path: path.to_owned(),
        problem,
    }
}
