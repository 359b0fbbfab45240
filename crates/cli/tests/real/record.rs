//! Tests that `simulate` can replay requests that a server has recorded.

use std::process::Output;

use serde_json::{Value, json};

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server, run, tidegate};

/// One rule for each algorithm, except for algorithms whose decisions depend on responses.
const RULES: &str = "
rules:
  - {name: gcra, key: [user], limits: [{algorithm: gcra, rate: 60/min, burst: 30}]}
  - {name: bucket, when: {path: /a}, key: [user], limits: [{algorithm: token_bucket, capacity: 20, refill: 9/s}]}
  - {name: leaky, when: {path: /b}, key: [user], limits: [{algorithm: leaky_bucket, capacity: 22, leak: 8/s}]}
  - {name: fixed, key: [path], limits: [{algorithm: fixed_window, limit: 60, window: 1h}]}
  - {name: log, key: [user, path], limits: [{algorithm: sliding_window_log, limit: 18, window: 2s}]}
  - {name: counter, key: [ip], limits: [{algorithm: sliding_window_counter, limit: 140, window: 1min}]}
  - {name: trial, key: [ip], limits: [9/min], mode: shadow}
";

fn start(record: &str) -> (Server, std::path::PathBuf) {
    let scratch = Scratch::new();
    let file = scratch.join("requests.jsonl");
    let record = record.replace("FILE", &file.display().to_string());
    (
        Server::start_in(scratch, &format!("{EVERY_LISTENER}{record}{RULES}")),
        file,
    )
}

/// Sends 200 requests to `/v1/check`, and returns the number of denied requests.
fn send(server: &Server) -> u64 {
    let mut denied = 0;
    for at in 0..200_u64 {
        let user = ["ada", "bob", "eve"][(at % 3) as usize];
        let path = ["/a", "/b", "/c", "/d"][(at / 3 % 4) as usize];
        let entries = json!({"user": user, "path": path, "ip": "203.0.113.9"});
        let body = json!({"entries": entries, "cost": at % 2 + 1});
        let answer = Ask::new("POST", server.http, "/v1/check")
            .body(&body)
            .send();
        denied += u64::from(answer.status == 429);
    }
    denied
}

fn simulate(rules: &std::path::Path, log: &std::path::Path) -> Value {
    let output: Output = run(tidegate(&["simulate"])
        .arg(rules)
        .arg("--json")
        .arg("--log")
        .arg(log));
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_simulation_of_recorded_requests_decides_as_the_server_did() {
    let (server, file) = start("record: {to: FILE}");
    let denied = send(&server);
    assert!((20..180).contains(&denied), "{denied}");
    let rules = server.rules_file();
    let _scratch = server.stop();
    let report = simulate(&rules, &file);
    assert_eq!(report["lines"]["formats"], json!(["record"]));
    assert_eq!(report["requests"]["decided"], 200);
    assert_eq!(report["requests"]["denied"], denied);
    let text = std::fs::read_to_string(&file).unwrap();
    let recorded = text
        .lines()
        .filter(|line| line.contains("\"allowed\":false"))
        .count();
    assert_eq!(recorded as u64, denied);
}

#[test]
fn hashed_entries_have_the_same_counts() {
    let (server, file) = start("record: {to: FILE, hash: [user, ip]}");
    let denied = send(&server);
    let rules = server.rules_file();
    let _scratch = server.stop();
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(
        !text.contains("\"ada\"") && !text.contains("203.0.113.9"),
        "{text}"
    );
    assert_eq!(simulate(&rules, &file)["requests"]["denied"], denied);
}

#[test]
fn a_file_that_cannot_be_opened_prevents_the_start() {
    let scratch = Scratch::new();
    let rules = scratch.write(
        "rules.yaml",
        &format!("{EVERY_LISTENER}record: {{to: /nowhere/requests.jsonl}}\nrules: []\n"),
    );
    let output = run(tidegate(&["serve", "--config"]).arg(rules));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("record.to: cannot open /nowhere/requests.jsonl"),
        "{message}"
    );
    assert!(!output.status.success());
}
