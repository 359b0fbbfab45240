//! The HTTP client for webhooks and for telemetry.

use std::{sync::Arc, time::Duration};

use ureq::{
    Agent,
    tls::{Certificate, RootCerts, TlsConfig},
};

/// Returns a client that trusts the system's certificate authorities, and whose requests take at
/// most `timeout`. The client does not follow redirects.
#[must_use]
pub fn agent(timeout: Duration) -> Agent {
    let certificates = rustls_native_certs::load_native_certs().certs;
    let certificates: Vec<Certificate<'static>> = certificates
        .iter()
        .map(|certificate| Certificate::from_der(certificate).to_owned())
        .collect();
    let tls = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&certificates))
        .build();
    Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        // A redirect could send data to an endpoint that the operator has not chosen.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .tls_config(tls)
        .build()
        .into()
}
