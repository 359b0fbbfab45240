//! TLS settings for connections to the admin listener.

use std::{fs, path::Path, sync::Arc};

use rustls::crypto::ring::default_provider;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::args::Admin;

/// Returns the TLS configuration for connecting to the admin listener; `None` means plaintext.
pub(crate) fn config(admin: &Admin) -> Result<Option<TlsConfig>, String> {
    let Some(authorities) = &admin.admin_ca else {
        return Ok(None);
    };
    let shown = admin.admin_cert.as_ref().zip(admin.admin_key.as_ref());
    let shown = shown.map(|(certificate, key)| client_certificate(certificate, key));
    let config = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
        .root_certs(RootCerts::new_with_certs(&certificates(
            "--admin-ca",
            authorities,
        )?))
        .client_cert(shown.transpose()?)
        .build();
    Ok(Some(config))
}

fn client_certificate(certificate: &Path, key: &Path) -> Result<ClientCert, String> {
    let parsed = PrivateKey::from_pem(&read("--admin-key", key)?);
    let key = parsed.map_err(|error| {
        let key = key.display();
        format!("--admin-key: cannot use {key}: {error}; pass a PEM file with a private key")
    })?;
    let certificates = certificates("--admin-cert", certificate)?;
    Ok(ClientCert::new_with_certs(&certificates, key))
}

/// Reads the certificates in the file `path`, which was given with the command line option
/// `option`.
fn certificates(option: &str, path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let text = read(option, path)?;
    let unusable = |error| {
        let path = path.display();
        format!("{option}: cannot use {path}: {error}; pass a PEM file with certificates")
    };
    let found = parse_pem(&text).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
        Ok(_) => None,
        Err(error) => Some(Err(unusable(error))),
    });
    let found: Vec<_> = found.collect::<Result<_, _>>()?;
    if found.is_empty() {
        return Err(format!(
            "{option}: there is no certificate in {}; pass a PEM file with a certificate",
            path.display()
        ));
    }
    Ok(found)
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| {
        let path = path.display();
        format!("{option}: cannot read {path}: {error}; check the path and its permissions")
    })
}
