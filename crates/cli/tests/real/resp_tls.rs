//! Tests of TLS on the Redis protocol listener, with Redis's own client programs.

use std::process::{Command, Output};

use crate::support::{Scratch, Server, authority, run, signed, tool};

/// Starts a server whose RESP listener has a certificate issued by the CA `ours`. `more` contains
/// additional TLS settings.
fn start(more: &str) -> Server {
    let scratch = Scratch::new();
    for name in ["ours", "other"] {
        authority(scratch.path(), name);
    }
    signed(scratch.path(), "ours", "server");
    signed(scratch.path(), "ours", "client");
    signed(scratch.path(), "other", "stranger");
    let tls = format!("{{certificate: server.pem, key: server.key{more}}}");
    let resp = format!("{{address: '127.0.0.1:0', password: secret, tls: {tls}}}");
    let others = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'";
    Server::start_in(scratch, &format!("listen: {{{others}, resp: {resp}}}\n"))
}

/// Runs one of Redis's programs with these arguments.
fn client(server: &Server, program: &str, args: &str) -> Output {
    let port = server.resp.port().to_string();
    let mut command = Command::new(tool(program));
    command.args(["-p", &port]).args(args.split_whitespace());
    command.env("REDISCLI_AUTH", "secret");
    run(command.current_dir(server.directory()))
}

/// Returns the reply that redis-cli prints. The reply is empty if the connection is rejected.
fn answer(server: &Server, args: &str) -> String {
    let output = client(server, "redis-cli", args);
    let message = String::from_utf8(output.stdout).unwrap();
    // With TLS 1.3, a client notices a rejected handshake only at its first read.
    let is_refused = !output.status.success() || message.starts_with("Error: ");
    if is_refused { String::new() } else { message }
}

#[test]
fn redis_cli_is_answered_over_tls() {
    let server = start("");
    let tls = "--tls --cacert ours.pem";
    let throttle = format!("{tls} CL.THROTTLE user123 15 30 60");
    assert_eq!(answer(&server, &throttle), "0\n16\n15\n-1\n2\n");
    // Neither a plaintext client nor a client that trusts a different CA gets a reply.
    assert_eq!(answer(&server, "PING"), "");
    assert_eq!(answer(&server, "--tls --cacert other.pem PING"), "");
    assert_eq!(answer(&server, &format!("{tls} PING")), "PONG\n");
    server.stop();
}

/// Tests long command pipelines. The commands and replies of a long pipeline are split across many
/// TLS records.
#[test]
fn redis_benchmark_is_answered_over_tls() {
    let server = start("");
    let load = "-a secret --tls --cacert ours.pem -q -c 10 -n 5000 -P 100 -e";
    let output = client(
        &server,
        "redis-benchmark",
        &format!("{load} CL.THROTTLE one 15 30 60"),
    );
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(message.contains("requests per second"), "{message}");
    let counted = r#"tidegate_decisions_total{listener="resp","#;
    let metrics = server.metrics();
    let lines = metrics
        .lines()
        .filter_map(|line| line.strip_prefix(counted));
    let counts = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    assert_eq!(counts.sum::<u64>(), 5_000, "{metrics}");
    server.stop();
}

#[test]
fn a_client_ca_requires_a_certificate() {
    let server = start(", client_ca: ours.pem");
    let tls = "--tls --cacert ours.pem";
    let shown = |name: &str| format!("{tls} --cert {name}.pem --key {name}.key PING");
    assert_eq!(answer(&server, &shown("client")), "PONG\n");
    assert_eq!(answer(&server, &shown("stranger")), "");
    assert_eq!(answer(&server, &format!("{tls} PING")), "");
    assert_eq!(answer(&server, "PING"), "");
    assert_eq!(answer(&server, &shown("client")), "PONG\n");
    server.stop();
}
