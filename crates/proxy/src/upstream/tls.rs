//! TLS to upstreams: loads the trust anchors (root certificates) that verify upstream certificates.

use std::{path::PathBuf, sync::Arc};

use rustls::{ClientConfig, RootCertStore, crypto::ring::default_provider};
use tidegate_net::roots;

/// The reason why TLS to an upstream cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustAnchorError {
    /// The trust anchor file cannot be used.
    #[error("proxy.upstreams: `ca` of {upstream}: cannot use {path}: {problem}")]
    File {
        /// The upstream's name.
        upstream: Box<str>,
        /// The file's path.
        path: PathBuf,
        /// The problem with the file.
        problem: String,
    },
    /// The system has no trust anchors.
    #[error(
        "proxy.upstreams: this system has no root CA certificates to verify {upstream} with; install ca-certificates, or set `ca` to a file"
    )]
    None {
        /// The upstream's name.
        upstream: Box<str>,
    },
    /// The TLS library cannot be used.
    #[error("proxy.upstreams: {0}")]
    Unusable(#[from] rustls::Error),
}

/// The TLS client settings of an upstream. Two settings are equal if they have the same trust
/// anchors.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamTls {
    pub(crate) config: Arc<ClientConfig>,
    roots: Arc<RootCertStore>,
}

impl PartialEq for UpstreamTls {
    fn eq(&self, other: &Self) -> bool {
        self.roots.roots == other.roots.roots
    }
}

/// Checks that the trust anchors of an upstream can be loaded.
///
/// # Errors
///
/// Returns the reason why the trust anchors cannot be loaded.
pub fn check_trust_anchors(
    upstream: &tidegate_config::UpstreamConfig,
) -> Result<(), TrustAnchorError> {
    connector(upstream).map(drop)
}

/// Loads the trust anchors of an upstream, and returns the settings for TLS to the upstream.
/// Returns `None` if no URL of the upstream uses `https`.
pub(crate) fn connector(
    upstream: &tidegate_config::UpstreamConfig,
) -> Result<Option<UpstreamTls>, TrustAnchorError> {
    let mut urls = upstream.urls.iter();
    if urls.all(|url| url.scheme == tidegate_config::Scheme::Http) {
        return Ok(None);
    }
    let roots = match &upstream.ca {
        Some(path) => roots(path).map_err(|problem| TrustAnchorError::File {
            upstream: upstream.name.clone(),
            path: path.clone(),
            problem,
        })?,
        None => of_the_system(upstream)?,
    };
    let roots = Arc::new(roots);
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let mut connector = builder
        .with_safe_default_protocol_versions()?
        .with_root_certificates(Arc::clone(&roots))
        .with_no_client_auth();
    let protocol: &[u8] = if upstream.http2 { b"h2" } else { b"http/1.1" };
    connector.alpn_protocols = vec![protocol.to_vec()];
    Ok(Some(UpstreamTls {
        config: Arc::new(connector),
        roots,
    }))
}

fn of_the_system(
    upstream: &tidegate_config::UpstreamConfig,
) -> Result<RootCertStore, TrustAnchorError> {
    let mut roots = RootCertStore::empty();
    // Certificates that do not parse are skipped. Most TLS clients also skip such certificates.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(TrustAnchorError::None {
            upstream: upstream.name.clone(),
        });
    }
    Ok(roots)
}
