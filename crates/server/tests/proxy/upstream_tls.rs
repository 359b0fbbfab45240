//! Tests of TLS to upstreams. The upstream is another proxy that has a server certificate.

use std::path::Path;

use crate::{listener::TestListener, upstream::Upstream};

pub(crate) fn issue(folder: &Path, name: &str) {
    let issued = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    std::fs::write(folder.join("server.pem"), issued.cert.pem()).unwrap();
    std::fs::write(
        folder.join("server.key"),
        issued.signing_key.serialize_pem(),
    )
    .unwrap();
}

/// Opens a proxy in front of `upstream` that serves TLS with a certificate for `name`.
pub(crate) fn secured(folder: &Path, name: &str, upstream: &Upstream) -> TestListener {
    issue(folder, name);
    let path = |name: &str| folder.join(name).display().to_string();
    let (certificate, key) = (path("server.pem"), path("server.key"));
    let tls = format!("tls: {{certificate: '{certificate}', key: '{key}'}}");
    TestListener::with(upstream.url(), &tls)
}

/// Opens a proxy in front of the proxy at `port`, with the trust anchors in `folder`.
fn in_front_of(folder: &Path, port: u16, settings: &str) -> TestListener {
    TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'https://localhost:{port}', ca: '{}'{settings}}}]}}\n",
        folder.join("server.pem").display()
    ))
}

#[test]
fn an_upstream_is_reached_over_tls_in_both_http_versions() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let behind = secured(folder.path(), "localhost", &upstream);
    let port = behind.listener.local_addr().port();
    for settings in ["", ", http2: true"] {
        let listener = in_front_of(folder.path(), port, settings);
        for _ in 0..3 {
            assert_eq!(listener.get("/").body, "ok", "{settings}");
        }
    }
    for head in upstream.heads() {
        assert!(head.contains("host: localhost"), "{head}");
        assert!(head.contains("x-forwarded-proto: https"), "{head}");
    }
    assert_eq!(behind.listener.accepted(), 2, "each connection is reused");
}

#[test]
fn an_upstream_with_an_untrusted_certificate_is_rejected() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let upstream = Upstream::ok();
    let behind = secured(folder.path(), "localhost", &upstream);
    issue(other.path(), "localhost");
    let port = behind.listener.local_addr().port();
    assert_eq!(in_front_of(other.path(), port, "").get("/").status, 502);
    let misnamed = secured(folder.path(), "elsewhere.example", &upstream);
    let port = misnamed.listener.local_addr().port();
    assert_eq!(in_front_of(folder.path(), port, "").get("/").status, 502);
    assert_eq!(upstream.connections(), 0);
}
