//! TLS for outgoing connections, with a client certificate if the peer requests one.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring::default_provider,
    pki_types::{PrivateKeyDer, pem::PemObject},
};

use super::tls::{certificates, roots};

/// The TLS files of a client in PEM format. Paths are relative to the working directory of the
/// server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTlsFiles {
    /// The CAs that may have signed the peer's certificate; if `None`, the system's CAs.
    pub ca: Option<PathBuf>,
    /// The client certificate and its private key, for mutual TLS.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

/// The reason why a client's TLS files cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientTlsError {
    /// A file cannot be used.
    #[error("cannot use {path}: {problem}; fix the file, its path or its permissions")]
    File {
        /// The file's path.
        path: PathBuf,
        /// The problem with the file.
        problem: String,
    },
    /// The system has no CAs.
    #[error("this system has no root CA certificates; install ca-certificates, or name a CA file")]
    NoRoots,
    /// The certificate does not match the key, or the TLS library rejects one of them.
    #[error("cannot use the client certificate: {0}")]
    Unusable(#[from] rustls::Error),
}

/// Loads `files`, and returns the TLS settings for connections that offer the application protocol
/// `protocol`, such as `h2`.
///
/// # Errors
///
/// Returns a [`ClientTlsError`] if a file cannot be read or does not have the expected content.
pub fn client_config(
    files: &ClientTlsFiles,
    protocol: &[u8],
) -> Result<ClientConfig, ClientTlsError> {
    let roots = match &files.ca {
        Some(path) => roots(path).map_err(|problem| unusable(path, problem))?,
        None => of_the_system()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match &files.certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate).map_err(|error| unusable(certificate, error))?;
            let key = PrivateKeyDer::from_pem_file(key)
                .map_err(|error| unusable(key, error.to_string()))?;
            builder.with_client_auth_cert(chain, key)?
        }
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(config)
}

fn of_the_system() -> Result<RootCertStore, ClientTlsError> {
    let mut roots = RootCertStore::empty();
    // Certificates that do not parse are skipped, as most TLS clients do.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(ClientTlsError::NoRoots);
    }
    Ok(roots)
}

fn unusable(path: &Path, problem: String) -> ClientTlsError {
    ClientTlsError::File {
        path: path.to_owned(),
        problem,
    }
}
