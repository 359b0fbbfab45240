//! Tests with real Redis clients, which `scripts/setup` installs.

use std::process::{Command, Output};

use crate::listener::TestListener;

/// Runs a program from the Debian package redis-tools against the listener.
fn run(program: &str, listener: &TestListener, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command
        .args(["-p", &listener.address().port().to_string()])
        .args(arguments);
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; run scripts/setup to install it"));
    assert!(
        status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&stderr)
    );
    String::from_utf8(stdout).unwrap()
}

#[test]
fn redis_cli_in_both_protocols() {
    let listener = TestListener::open();
    let throttle = ["CL.THROTTLE", "user123", "15", "30", "60"];
    assert_eq!(run("redis-cli", &listener, &throttle), "0\n16\n15\n-1\n2\n");
    assert_eq!(
        run("redis-cli", &listener, &[&["-3"], &throttle[..]].concat()),
        "0\n16\n14\n-1\n4\n"
    );
    assert_eq!(
        run(
            "redis-cli",
            &listener,
            &["-2", "THROTTLE", "key", "3", "1", "10"]
        ),
        "1\n3\n2\n10\n0\n"
    );
    assert_eq!(
        run(
            "redis-cli",
            &listener,
            &["-3", "TIDEGATE.CHECK", "ip", "::1"]
        ),
        "1\n\n-1\n-1\n0\n0\n"
    );
    assert_eq!(run("redis-cli", &listener, &["-n", "0", "PING"]), "PONG\n");
    assert!(run("redis-cli", &listener, &["INFO"]).contains("redis_version:7."));
}

#[test]
fn redis_benchmark_with_and_without_a_pipeline() {
    let listener = TestListener::open();
    for pipeline in ["1", "16", "64"] {
        let arguments = [
            "-q", "-c", "10", "-n", "2000", "-P", pipeline, "-r", "100", "-e",
        ];
        let throttle = ["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"];
        let report = run(
            "redis-benchmark",
            &listener,
            &[&arguments[..], &throttle].concat(),
        );
        assert!(report.contains("requests per second"), "{report}");
    }
    assert!(listener.limiter.local_store().stats().keys > 50);
}
