//! Tests that counters and overrides survive restarts.

use std::fs;

use serde_json::json;

use crate::{
    servers::eventually,
    support::{Ask, EVERY_LISTENER, Scratch, Server},
};

const RULES: &str = "\
store: {memory: {snapshot: {path: counters.snapshot}}}
rules: [{name: api, key: [user], limits: [5/h], algorithm: fixed_window}]
";

fn start(scratch: Scratch) -> Server {
    Server::start_in(scratch, &format!("{EVERY_LISTENER}{RULES}"))
}

fn spend(server: &Server, user: &str) -> serde_json::Value {
    server.check(&json!({ "user": user })).json()["remaining"].clone()
}

#[test]
fn an_unwritable_snapshot_is_named_in_the_log() {
    let rules =
        "store: {memory: {snapshot: {path: nowhere/counters.snapshot, every: 1s}}}\nrules: []\n";
    let mut server = Server::start(rules);
    let at_the_start = [
        "a restart will lose the counters",
        "or fix `store.memory.snapshot`",
    ];
    assert!(server.has_logged(&at_the_start));
    server.wait_for(&["cannot write the snapshot nowhere/counters.snapshot: No such file"]);
}

/// A repeated failure is logged only once. While the failure persists, the readiness response and
/// the metrics report it.
#[test]
fn a_failing_snapshot_is_logged_once_and_shown_on_readyz() {
    let rules =
        "store: {memory: {snapshot: {path: later/counters.snapshot, every: 1s}}}\nrules: []\n";
    let mut server = Server::start(rules);
    server.wait_for(&["ERROR", "cannot write the snapshot"]);
    eventually("a third attempt has failed", || {
        let failed = "tidegate_snapshots_total{result=\"failed\"} 3";
        server.metrics().contains(failed).then_some(())
    });
    let ready = Ask::get(server.admin, "/readyz").send();
    assert_eq!(
        (ready.status, &ready.json()["state"]),
        (200, &json!("degraded"))
    );
    assert!(
        ready.json()["degraded"][0]
            .as_str()
            .unwrap()
            .contains("cannot write the snapshot")
    );
    fs::create_dir(server.directory().join("later")).unwrap();
    server.wait_for(&[
        "the snapshot was written after earlier attempts had failed",
        "failures=",
    ]);
    let log = server.log_text();
    assert_eq!(log.matches("cannot write the snapshot").count(), 1, "{log}");
    assert_eq!(
        Ask::get(server.admin, "/readyz").send().json()["state"],
        "ready"
    );
}

/// Regression test: before the first snapshot interval has elapsed, the server must not report that
/// counters survive a restart.
#[test]
fn an_unwritable_snapshot_is_reported_before_the_first_write() {
    let rules = "\
store: {memory: {snapshot: {path: nowhere/counters.snapshot, every: 1h}}}
rules: [{name: api, key: [user], limits: [5/h], algorithm: fixed_window}]
";
    let server = Server::start(rules);
    let ready = Ask::get(server.admin, "/readyz").send();
    assert_eq!(
        (ready.status, &ready.json()["state"]),
        (200, &json!("degraded"))
    );
    let degraded = ready.json()["degraded"][0].to_string();
    assert!(degraded.contains("cannot write the snapshot"), "{degraded}");
    assert!(
        server
            .metrics()
            .contains("tidegate_last_snapshot_success 0")
    );
    let block = Ask::new("PUT", server.admin, "/v1/blocks/api/u2").body(&json!({"for": "1h"}));
    assert_eq!(block.send().json()["persistent"], false);
}

#[test]
fn an_unwritable_snapshot_is_logged_at_the_start() {
    let scratch = Scratch::new();
    // Create a directory in place of the file: even root cannot write to a directory.
    let trial = scratch.join("counters.snapshot.trial");
    fs::create_dir_all(&trial).unwrap();
    let server = start(scratch);
    assert!(server.has_logged(&["a restart will lose the counters", "Is a directory"]));
    fs::remove_dir(trial).unwrap();
    let server = start(server.stop());
    assert!(!server.has_logged(&["a restart will lose the counters"]));
}

#[test]
fn a_restart_keeps_counters_and_blocks() {
    let server = start(Scratch::new());
    spend(&server, "u1");
    spend(&server, "u1");
    let block = Ask::new("PUT", server.admin, "/v1/blocks/api/u2")
        .body(&json!({"for": "1h", "reason": "abuse"}));
    assert!((200..300).contains(&block.send().status));

    let scratch = server.stop();
    assert!(scratch.join("counters.snapshot").exists());
    let server = start(scratch);
    assert_eq!(spend(&server, "u1"), 2);
    let denied = server.check(&json!({"user": "u2"}));
    assert_eq!(
        (denied.status, &denied.json()["reason"]),
        (429, &json!("blocked"))
    );
}

#[test]
fn a_restart_keeps_reservations() {
    let reservations = "reservations: {secret: the-secret-of-this-server}\n";
    let config = format!("{EVERY_LISTENER}{reservations}{RULES}");
    let server = Server::start_in(Scratch::new(), &config);
    let body = json!({"entries": {"user": "u"}, "cost": 4});
    let reserved = Ask::new("POST", server.http, "/v1/reserve")
        .body(&body)
        .send();
    let token = reserved.json()["reservation"].clone();
    let server = Server::start_in(server.stop(), &config);
    assert!(server.has_logged(&["restored the outstanding reservations", "restored=1"]));
    let body = json!({"reservation": token, "cost": 1});
    let settled = Ask::new("POST", server.http, "/v1/settle")
        .body(&body)
        .send();
    assert_eq!(
        (settled.status, &settled.json()["released"]),
        (200, &json!(3))
    );
    assert_eq!(spend(&server, "u"), 3);
}

#[test]
fn a_snapshot_cut_in_half_is_set_aside() {
    let server = start(Scratch::new());
    for user in 0..50 {
        spend(&server, &format!("user-{user}"));
    }
    let scratch = server.stop();
    let path = scratch.join("counters.snapshot");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert_set_aside(scratch);
}

#[test]
fn a_snapshot_with_one_bit_changed_is_set_aside() {
    let server = start(Scratch::new());
    spend(&server, "user-1");
    let scratch = server.stop();
    let path = scratch.join("counters.snapshot");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_set_aside(scratch);
}

#[test]
fn a_snapshot_of_something_else_is_set_aside() {
    let scratch = Scratch::new();
    scratch.write("counters.snapshot", "not a snapshot at all");
    assert_set_aside(scratch);
}

fn assert_set_aside(scratch: Scratch) {
    let server = start(scratch);
    assert_eq!(spend(&server, "user-1"), 4, "starts with empty counters");
    let aside = fs::read_dir(server.directory()).unwrap().filter(|entry| {
        entry
            .as_ref()
            .unwrap()
            .file_name()
            .to_string_lossy()
            .contains(".damaged-")
    });
    assert_eq!(aside.count(), 1, "the damaged file is kept");
}

/// The server confirms a change to an override only after it has been written to disk, so it
/// survives even if the server is killed.
#[test]
fn overrides_survive_a_killed_server() {
    let server = start(Scratch::new());
    let command = |server: &Server, arguments: &[&str]| {
        let output = server.operate(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let set = command(
        &server,
        &[
            "override", "api", "u1", "--limit", "2x", "--reason", "launch",
        ],
    );
    assert_eq!(set, "overrode api u1: 2x, until removed (launch)\n");
    command(
        &server,
        &["override", "api", "vip-*", "--limit", "7/h", "--for", "2h"],
    );
    command(&server, &["override", "api", "u2", "--limit", "9/h"]);
    command(&server, &["override", "api", "u2", "--remove"]);
    for left in (0..10).rev() {
        assert_eq!(spend(&server, "u1"), left);
    }
    server.signal("KILL");
    let (_, _, scratch) = server.wait();
    let server = start(scratch);
    let list = command(&server, &["overrides"]);
    let lines: Vec<Vec<&str>> = list
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines.len(), 3, "{list}");
    assert_eq!(
        lines[1],
        ["api", "u1", "2x", "until", "removed", "-", "launch"]
    );
    assert_eq!(lines[2][..3], ["api", "vip-*", "7/h"]);
    assert_eq!(spend(&server, "vip-3"), 6);
    assert_eq!(spend(&server, "u2"), 4, "the override was removed");
    let explained = command(&server, &["explain", "user=vip-3"]);
    assert!(explained.contains("7/h"), "{explained}");
}
