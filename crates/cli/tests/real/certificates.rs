//! Tests that the gRPC listener presents its new certificate after a hot reload.

use std::{net::SocketAddr, process::Command};

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server, run, tool};

/// Replaces the server's certificate and key with a new self-signed certificate for `name` and its
/// key.
fn issue(scratch: &std::path::Path, name: &str) {
    let output = run(Command::new(tool("openssl"))
        .args(["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:prime256v1", "-days", "2", "-subj"])
        .args([
            &format!("/CN={name}"),
            "-keyout",
            "key.new",
            "-out",
            "certificate.new",
        ])
        .current_dir(scratch));
    assert!(output.status.success(), "{output:?}");
    for file in ["key", "certificate"] {
        std::fs::rename(scratch.join(format!("{file}.new")), scratch.join(file)).unwrap();
    }
}

/// Returns the name in the certificate that the server at `address` presents.
fn shown(address: SocketAddr) -> String {
    let output = run(Command::new(tool("openssl")).args([
        "s_client",
        "-connect",
        &address.to_string(),
        "-alpn",
        "h2",
    ]));
    let message = String::from_utf8_lossy(&output.stdout).into_owned();
    let subject = message
        .lines()
        .find_map(|line| line.strip_prefix("subject=CN = "));
    subject
        .unwrap_or_else(|| panic!("no subject in:\n{message}"))
        .to_owned()
}

#[test]
fn a_renewed_certificate_is_served_and_an_unusable_one_is_rejected() {
    let scratch = Scratch::new();
    issue(scratch.path(), "first");
    let config = format!("{EVERY_LISTENER}grpc: {{tls: {{certificate: certificate, key: key}}}}\n");
    let mut server = Server::start_in(scratch, &config);
    assert_eq!(shown(server.grpc), "first");

    issue(server.directory(), "second");
    server.wait_for(&["reloaded the certificate", "grpc"]);
    assert_eq!(shown(server.grpc), "second");

    std::fs::write(server.directory().join("key"), "no key").unwrap();
    server.wait_for(&["kept the old certificate", "grpc.tls.key: cannot use key"]);
    assert_eq!(shown(server.grpc), "second");
    let ready = Ask::get(server.admin, "/readyz").send().json();
    assert_eq!(
        ready["last_reload"],
        "failed; the old certificate stays active"
    );
    assert!(
        server
            .metrics()
            .contains("tidegate_last_certificate_load_success{listener=\"grpc\"} 0\n")
    );
    let refused = Ask::new("POST", server.admin, "/v1/reload").send();
    assert_eq!(refused.status, 422, "{}", refused.body);

    issue(server.directory(), "third");
    server.signal("HUP");
    server.wait_for(&["reloaded the certificate", "grpc"]);
    assert_eq!(shown(server.grpc), "third");
    assert!(
        server
            .metrics()
            .contains("tidegate_last_certificate_load_success{listener=\"grpc\"} 1\n")
    );
    server.stop();
}
