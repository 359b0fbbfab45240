//! Tests the rate limit on log records that clients can cause.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::json;

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Returns an HTTP/2 frame on stream 0.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, 0];
    frame.extend_from_slice(payload);
    frame
}

#[test]
fn unsolicited_ping_acknowledgements_are_not_logged() {
    let mut server = Server::start("");
    let mut client = TcpStream::connect(server.grpc).unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut sent = PREFACE.to_vec();
    sent.extend(frame(4, 0, &[]));
    for _ in 0..100 {
        sent.extend(frame(6, 1, b"sentinel"));
    }
    // The server reads frames in order, so its reply to this ping means that it has read all
    // earlier frames.
    sent.extend(frame(6, 0, b"the last"));
    client.write_all(&sent).unwrap();
    let mut read = Vec::new();
    while !read.windows(8).any(|bytes| bytes == b"the last") {
        let mut buffer = [0; 4_096];
        let count = client.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "closed before the answer");
        read.extend_from_slice(&buffer[..count]);
    }
    server.signal("TERM");
    server.wait_for(&["shutting down"]);
    assert!(!server.has_logged(&["h2"]), "{}", server.log_text());
    assert!(!server.has_logged(&["PING"]), "{}", server.log_text());
}

#[test]
fn wrong_admin_tokens_are_logged() {
    let scratch = Scratch::new();
    let config = format!("{EVERY_LISTENER}admin: {{token: the-right-token}}\n");
    let mut server = Server::start_in(scratch, &config);
    for (token, status) in [("guess-1", 401), ("the-right-token", 200), ("guess-2", 401)] {
        let answer = Ask::get(server.admin, "/v1/rules")
            .header("authorization", &format!("Bearer {token}"))
            .send();
        assert_eq!(answer.status, status, "{token}");
    }
    server.signal("TERM");
    server.wait_for(&["shutting down"]);
    let log = server.log_text();
    let records = log
        .lines()
        .filter(|line| line.contains("authentication failed: invalid secret"))
        .collect::<Vec<_>>();
    assert_eq!(records.len(), 2, "{log}");
    for record in records {
        let names_the_client =
            record.contains("listener=\"admin\"") && record.contains("peer=127.0.0.1");
        assert!(names_the_client, "{record}");
    }
    assert!(!log.contains("guess"), "{log}");
}

#[test]
fn all_warnings_of_the_rules_file_are_logged() {
    // The rules cause warnings of several kinds, and the log reports up to 20 warnings of each
    // kind. In total, the warnings exceed the burst that the rate limit on log records allows.
    let rule = |number: usize| {
        format!("  - {{name: r{number}, key: header.x, limits: [1/s], when: {{method: get}}}}\n")
    };
    let rules: String = (0..25).map(rule).collect();
    let config = format!("{EVERY_LISTENER}rules:\n{rules}");
    let mut server = Server::start_in(Scratch::new(), &config);
    assert_eq!(server.check(&json!({"user": "u"})).status, 200);
    assert_eq!(Ask::get(server.admin, "/healthz").send().status, 200);
    server.signal("TERM");
    server.wait_for(&["shutting down"]);
    let log = server.log_text();
    let warnings = log
        .lines()
        .filter(|line| line.contains("WARN tidegate_server::serve: rules["))
        .count();
    assert!(warnings > 30, "{warnings}:\n{log}");
}

#[test]
fn all_warnings_of_envoys_configuration_are_logged() {
    // `shadow_mode` is a setting of a descriptor. As a setting of a limit, `shadow_mode` has no
    // effect.
    let descriptor = |number: usize| {
        format!(
            "  - {{key: k{number}, rate_limit: {{unit: second, requests_per_unit: 1, shadow_mode: true}}}}\n"
        )
    };
    let descriptors: String = (0..40).map(descriptor).collect();
    let scratch = Scratch::new();
    scratch.write(
        "envoy.yaml",
        &format!("domain: shop\ndescriptors:\n{descriptors}"),
    );
    let config = format!("{EVERY_LISTENER}envoy: {{config: envoy.yaml}}\n");
    let mut server = Server::start_in(scratch, &config);
    assert_eq!(Ask::get(server.admin, "/healthz").send().status, 200);
    server.signal("TERM");
    server.wait_for(&["shutting down"]);
    let log = server.log_text();
    let warnings = log
        .lines()
        .filter(|line| line.contains("WARN tidegate_envoy::config_watcher: "))
        .count();
    assert!(warnings >= 40, "{warnings}:\n{log}");
}
