//! The address of an endpoint, and how to connect to it.

use std::sync::Arc;

use rustls::ClientConfig;
use tidegate_config::{Scheme, UpstreamConfig, Url};

use super::tls::UpstreamTls;

/// The address of an endpoint, with its protocol. A reload never changes the address.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EndpointAddress {
    pub(crate) url: Url,
    /// Whether requests use HTTP/2.
    pub(crate) http2: bool,
    /// The TLS settings, if the endpoint is an `https` URL.
    tls: Option<UpstreamTls>,
}

impl EndpointAddress {
    /// Creates the address of `upstream`'s endpoint at `url`. `tls` is used only for an `https`
    /// URL.
    pub(crate) fn new(url: Url, upstream: &UpstreamConfig, tls: Option<&UpstreamTls>) -> Self {
        Self {
            tls: tls.filter(|_| url.scheme == Scheme::Https).cloned(),
            url,
            http2: upstream.http2,
        }
    }

    /// Returns the TLS settings, if the endpoint is an `https` URL.
    pub(crate) fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref().map(|tls| &tls.config)
    }
}
