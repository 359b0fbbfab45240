//! TLS for a listener: the server certificate, and client authentication.
//!
//! Like the rules file, the TLS files are checked for changes, and are reloaded after a change.
//! Only new connections use a new certificate. A certificate and its key are in two files, which
//! cannot be replaced atomically together. Therefore, changed files are reloaded only after two
//! consecutive checks have found the same modification stamps.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::{
    InconsistentKeys, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring::default_provider},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    Connection, Stage,
    file_watch::{FileStamp, stamp},
    prometheus::{Metric, Page},
};

/// The maximum size of a certificate file, in bytes.
const MAX_PEM_BYTES: u64 = 16 << 20;

const LOADS: Metric<2> = Metric::counter(
    "tidegate_certificate_loads_total",
    ["listener", "result"],
    "TLS certificate reloads since startup.",
);
const LAST_LOAD_SUCCESS: Metric<1> = Metric::gauge(
    "tidegate_last_certificate_load_success",
    ["listener"],
    "0 if the last load of the listener's certificate failed, otherwise 1.",
);

/// TLS files in PEM format. Paths are relative to the working directory of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `certificate`: the listener's certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// `key`: the certificate's private key.
    pub key: PathBuf,
    /// `client_ca`: the CAs that sign client certificates. If set, clients must present a
    /// certificate signed by one of these CAs (mutual TLS).
    pub client_ca: Option<PathBuf>,
}

/// A listener that can use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsListener {
    /// The gRPC listener, which uses HTTP/2.
    Grpc,
    /// The reverse proxy, which offers HTTP/2 and HTTP/1.1.
    Proxy,
    /// The HTTP listener, which uses HTTP/1.1.
    Http,
    /// The Redis protocol listener.
    Resp,
    /// The SPOP listener, for HAProxy.
    Spop,
    /// The admin listener, which uses HTTP/1.1.
    Admin,
}

impl TlsListener {
    /// Returns the name of the listener's section in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Proxy => "proxy",
            Self::Http => "listen.http",
            Self::Resp => "listen.resp",
            Self::Spop => "listen.spop",
            Self::Admin => "listen.admin",
        }
    }

    /// Returns the name in logs and metrics.
    #[must_use]
    pub const fn listener(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Proxy => "proxy",
            Self::Http => "http",
            Self::Resp => "resp",
            Self::Spop => "spop",
            Self::Admin => "admin",
        }
    }

    fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Grpc => vec![b"h2".to_vec()],
            Self::Proxy => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Self::Http | Self::Admin => vec![b"http/1.1".to_vec()],
            Self::Resp | Self::Spop => Vec::new(),
        }
    }
}

/// The reason why TLS cannot be used. The error message names the setting that is at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read, or does not have the expected content.
    #[error("{}.tls.{setting}: cannot use {path}: {problem}", listener.as_str())]
    File {
        /// The listener.
        listener: TlsListener,
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// The problem with the file.
        problem: String,
    },
    /// The key does not match the certificate, or one of them cannot be used.
    #[error("{}.tls: cannot use {certificate} with the key {key}: {}", listener.as_str(), misfit(source))]
    Unusable {
        /// The listener.
        listener: TlsListener,
        /// The certificate file.
        certificate: PathBuf,
        /// The key file.
        key: PathBuf,
        /// The error from rustls.
        source: rustls::Error,
    },
}

/// The TLS configuration of a listener, and the files from which it was loaded.
#[derive(Debug)]
pub struct Tls {
    listener: TlsListener,
    files: TlsFiles,
    in_force: ArcSwap<ServerConfig>,
    seen: Mutex<SeenStamps>,
    /// The error from the last load; `None` if the last load succeeded.
    problem: Mutex<Option<String>>,
    loads: [AtomicU64; 2],
}

/// The modification stamps of the files.
type FileStamps = Vec<Option<FileStamp>>;

#[derive(Debug)]
struct SeenStamps {
    /// The stamps at the last load.
    read: FileStamps,
    /// The stamps at the last check.
    checked: FileStamps,
}

impl Tls {
    /// Loads the certificate and key in `files`, for TLS 1.2 and 1.3. If a client CA is configured,
    /// clients must present a certificate issued by that CA.
    ///
    /// # Errors
    ///
    /// Returns a [`TlsError`] if a file cannot be read, does not have the expected content or does
    /// not match the other files.
    pub fn load(listener: TlsListener, files: &TlsFiles) -> Result<Self, TlsError> {
        let stamps = stamps(files);
        Ok(Self {
            listener,
            in_force: ArcSwap::from_pointee(server_config(listener, files)?),
            files: files.clone(),
            seen: Mutex::new(SeenStamps {
                read: stamps.clone(),
                checked: stamps,
            }),
            problem: Mutex::default(),
            loads: Default::default(),
        })
    }

    /// Reloads the files. New connections use the new configuration.
    ///
    /// # Errors
    ///
    /// Returns an error if [`Self::load`] would reject the files. The previous configuration stays
    /// in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let mut seen = lock(&self.seen);
        seen.read = stamps(&self.files);
        let loaded = server_config(self.listener, &self.files)
            .map(|config| self.in_force.store(Arc::new(config)));
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        *lock(&self.problem) = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(()) => tracing::info!(
                listener = self.listener.listener(),
                "reloaded the certificate"
            ),
            Err(error) => tracing::error!("kept the old certificate: {error}"),
        }
        loaded
    }

    /// Returns whether the files should be reloaded: they have changed since the last load, but not
    /// since the last check.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        let (mut seen, now) = (lock(&self.seen), stamps(&self.files));
        let is_settled = seen.checked == now;
        // A missing file is probably being replaced, so the reload waits until the new file exists.
        let is_whole = now.iter().all(Option::is_some);
        let has_changed = is_settled && is_whole && seen.read != now;
        seen.checked = now;
        has_changed
    }

    /// Returns the error from the last load; `None` if it succeeded.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// Returns the listener that uses this configuration.
    #[must_use]
    pub const fn listener(&self) -> TlsListener {
        self.listener
    }

    /// Adds the metrics of `certificates` to `page`.
    pub fn collect(certificates: &[Arc<Self>], page: &mut Page<'_>) {
        let loads = certificates.iter().flat_map(|tls| {
            let [succeeded, failed] = &tls.loads;
            [("ok", succeeded), ("failed", failed)].map(|(result, count)| {
                let labels = [tls.listener.listener(), result];
                (labels, count.load(Ordering::Relaxed))
            })
        });
        page.family(&LOADS, loads);
        let successes = certificates.iter().map(|tls| {
            let is_in_force = u64::from(tls.problem().is_none());
            ([tls.listener.listener()], is_in_force)
        });
        page.family(&LAST_LOAD_SUCCESS, successes);
    }

    /// Performs the TLS handshake for `connection`, within the time that its bounds allow for one
    /// request. See [`Self::accept_within`].
    pub async fn accept_in_time(
        &self,
        stream: TcpStream,
        connection: &Connection,
    ) -> Option<TlsStream<TcpStream>> {
        let limit = connection.bounds.request;
        self.accept_within(limit, stream, connection).await
    }

    /// Performs the TLS handshake for `connection`, within `limit`. Returns `None` if the handshake
    /// has failed (which is logged), if the server shuts down, or if the connection was handed over
    /// to another process.
    ///
    /// An upgrade to another process does not interrupt the handshake, because a handshake cannot
    /// continue in another process.
    pub async fn accept_within(
        &self,
        limit: Duration,
        stream: TcpStream,
        connection: &Connection,
    ) -> Option<TlsStream<TcpStream>> {
        let Connection {
            peer,
            shutdown,
            handover,
            ..
        } = connection;
        let handshaking = handover.handshaking();
        let accepted = tokio::select! {
            biased;
            accepted = timeout(limit, self.accept(stream)) => accepted,
            _ = shutdown.reached(|stage| stage == Stage::Ending) => return None,
        };
        // The connection must not count as handshaking and as movable at the same time.
        drop(handshaking);
        let stream = match accepted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                tracing::debug!(%peer, "TLS handshake failed: {error}");
                return None;
            }
            Err(_) => {
                tracing::debug!(%peer, "TLS handshake timed out");
                return None;
            }
        };
        if !shutdown.stage().is_handing_over() {
            return Some(stream);
        }
        match handover.movable::<TlsStream<TcpStream>>(shutdown) {
            Some(movable) => {
                movable.hand_over(stream, Vec::new());
                None
            }
            None => Some(stream),
        }
    }

    /// Performs the TLS handshake, without a timeout.
    ///
    /// # Errors
    ///
    /// Returns an error if the handshake or the stream fails.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.in_force.load_full())
            .accept(stream)
            .await
    }
}

fn stamps(files: &TlsFiles) -> FileStamps {
    let paths = [&files.certificate, &files.key]
        .into_iter()
        .chain(&files.client_ca);
    paths.map(|path| stamp(path)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn server_config(listener: TlsListener, files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(default_provider());
    let certificates = certificates(&files.certificate)
        .map_err(|problem| unusable(listener, "certificate", &files.certificate, problem))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| unusable(listener, "key", &files.key, error.to_string()))?;
    let misfit = |source| TlsError::Unusable {
        listener,
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
            let wrong = |problem| unusable(listener, "client_ca", path, problem);
            builder.with_client_cert_verifier(verifier.map_err(wrong)?)
        }
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .map_err(misfit)?;
    config.alpn_protocols = listener.protocols();
    Ok(config)
}

fn misfit(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            "the key does not match the certificate".to_owned()
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

/// Reads the trust anchors from the file at `path`.
///
/// # Errors
///
/// Returns a message that says what is wrong with the file.
pub fn roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read_pem(path).map_err(|error| error.to_string())?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = read.map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("the file contains no certificate".into());
    }
    Ok(certificates)
}

/// Reads a certificate file. Rejects devices and pipes, because reading them might never end.
fn read_pem(path: &Path) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("this is not a regular file"));
    }
    if metadata.len() > MAX_PEM_BYTES {
        let problem = format!("the file exceeds the maximum of {MAX_PEM_BYTES} bytes");
        return Err(io::Error::other(problem));
    }
    fs::read(path)
}

fn unusable(
    listener: TlsListener,
    setting: &'static str,
    path: &Path,
    problem: String,
) -> TlsError {
    TlsError::File {
        listener,
        setting,
        path: path.to_owned(),
        problem,
    }
}

// This method is here because the module of `Connection` is below this one.
impl Connection {
    /// Returns `tls` unless another process relays the connection and has already performed the
    /// handshake.
    #[must_use]
    pub fn tls_to_accept<'t>(&self, tls: Option<&'t Arc<Tls>>) -> Option<&'t Tls> {
        let tls = tls.filter(|_| self.handover.relayed.is_none());
        tls.map(|tls| &**tls)
    }
}
