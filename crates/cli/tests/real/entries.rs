//! Tests of log records about entries that no rule uses.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
};

use serde_json::json;

use crate::support::Server;

const RULES: &str = "rules:\n  - {name: api, when: {path: /api/**}, key: [customer], limits: [5/h]}\n  - {name: login, when: {path: /login}, key: [ip], limits: [5/h]}\n";

#[test]
fn a_misspelt_entry_is_logged_with_the_intended_one() {
    let mut server = Server::start(RULES);
    let misspelt =
        json!({"path": "/api/x", "custmer": "acme", "IP": "203.0.113.9", "plan": "free"});
    assert_eq!(server.check(&misspelt).status, 200);
    let unmatched = server.wait_for(&["WARN", "requests matched no rule"]);
    assert!(unmatched.contains("requests=1"), "{unmatched}");
    assert!(
        unmatched.contains(r#"entries="IP, custmer, path, plan""#),
        "{unmatched}"
    );
    let line = server.wait_for(&["WARN", "entries that no rule uses"]);
    let named = "IP (did you mean ip?), custmer (did you mean customer?), plan";
    assert!(
        line.contains(named) && line.contains("which are case-sensitive"),
        "{line}"
    );
    assert!(!line.contains("acme"), "{line}");
    // Within a minute, further requests with this entry are counted but not logged.
    for _ in 0..20 {
        assert_eq!(server.check(&misspelt).status, 200);
    }
    server.signal("HUP");
    server.wait_for(&["reload"]);
    let lines = server.log_text();
    assert_eq!(lines.matches("matched no rule").count(), 1, "{lines}");
    assert_eq!(lines.matches("entries that no rule").count(), 1, "{lines}");
    assert!(
        server
            .metrics()
            .contains("tidegate_unknown_entries_total{listener=\"http\"} 63")
    );
}

/// Regression test: the log record from the first listener must not suppress the record about the
/// second misspelling.
#[test]
fn misspelt_entries_are_logged_with_their_listener() {
    let mut server = Server::start(RULES);
    assert_eq!(server.check(&json!({"custmer": "acme"})).status, 200);
    let line = server.wait_for(&["WARN", "entries that no rule uses"]);
    assert!(line.contains("listener=\"http\""), "{line}");
    let mut client = TcpStream::connect(server.resp).unwrap();
    let commands = "TIDEGATE.CHECK pth /login\r\nTIDEGATE.CHECK IP 203.0.113.9\r\n";
    client.write_all(commands.as_bytes()).unwrap();
    for name in ["pth", "IP"] {
        let line = server.wait_for(&["WARN", "entries that no rule uses", name]);
        assert!(line.contains("listener=\"resp\""), "{line}");
        assert!(!line.contains("custmer"), "{line}");
    }
}

#[test]
fn a_key_entry_that_never_arrives_is_reported_after_a_thousand_requests() {
    let mut server = Server::start(RULES);
    let mut client = TcpStream::connect(server.resp).unwrap();
    let command = "TIDEGATE.CHECK path /api/x ip 203.0.113.9\r\n";
    client.write_all(command.repeat(1_000).as_bytes()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    client.read_to_end(&mut Vec::new()).unwrap();
    let line = server.wait_for(&["WARN", "no request has had these entries"]);
    assert!(
        line.contains("entries=\"customer\" rules=\"api\""),
        "{line}"
    );
}
