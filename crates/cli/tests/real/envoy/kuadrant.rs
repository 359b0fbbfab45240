//! Tests Tidegate's implementation of Kuadrant's rate limit service with a Python client.

use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Scratch, Server, repository, run};

const LIMITS: &str = "\
domain: llm
descriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 100}}]
";

/// An equivalent limit in Limitador's format, but per day.
const LIMITADOR: &str = "\
- {namespace: llm, max_value: 100, seconds: 86400, variables: [\"descriptors[0].user\"]}
";

/// Starts a server with these limits, and runs the client against this server. Returns the client's
/// results.
fn results(key: &str, limits: &str) -> Value {
    let scratch = Scratch::new();
    let file = scratch.write("limits.yaml", limits);
    let server = Server::start(&format!("envoy: {{{key}: {}}}\n", file.display()));
    let python = repository().join("target/test-python/bin/python3");
    assert!(python.exists(), "{python:?} is missing; run scripts/setup");
    let mut client = Command::new(python);
    client
        .arg(repository().join("crates/cli/tests/real/envoy/kuadrant_client.py"))
        .arg("--protos")
        .arg(repository().join("crates/envoy/proto"))
        .arg("--generated")
        .arg(scratch.join("generated"))
        .args(["--address", &server.grpc.to_string()]);
    let output = run(&mut client);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_python_client_reserves_and_commits() {
    let expected = json!({
        "held": 10,
        "denied": 40,
        "full": "OVER_LIMIT",
        "released": 10,
        "again": 0,
        "unknown": false,
        "check": "OK",
        "report": "OK",
        "last": "OK",
        "over": "OVER_LIMIT",
    });
    assert_eq!(results("config", LIMITS), expected);
    assert_eq!(results("limitador", LIMITADOR), expected);
}
