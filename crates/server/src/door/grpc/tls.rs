//! TLS in front of the door: its certificate, and whose clients are let in.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::config::TlsFiles;

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

/// What a connection is accepted with. Cloning is cheap.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// TLS 1.2 and 1.3 with the certificate and key of `files`; if there is a client authority, only for clients that
    /// show a certificate of it.
    ///
    /// # Errors
    ///
    /// [`TlsError`]: a file that cannot be read, has nothing of its kind in it, or does not fit the others.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
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
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.0.accept(stream).await
    }
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
