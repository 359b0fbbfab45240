//! Tests of Tidegate as a replacement for Envoy Gateway's rate limit server. Tidegate is started as
//! `ratelimit` with the same environment variables, and gets its configuration from a control plane
//! in Python. The client is a real Envoy. All connections use mutual TLS.

use std::{fs, net::SocketAddr, os::unix::fs::symlink, path::Path, process::Command};

use serde_json::{Value, json};

use super::BOOTSTRAP;
use crate::{
    servers::{RedisServer, reserve_port},
    support::{
        Ask, EVERY_LISTENER, Envoy, Process, Scratch, Server, authority, repository, signed,
    },
};

/// The environment variables of the rate limit container that Envoy Gateway deploys.
const ENVIRONMENT: &str = include_str!("../../../../envoy/tests/envoy/envoy_gateway.env");

/// Creates the folder `certs` in `scratch`, with files named as in the Kubernetes secret that Envoy
/// Gateway mounts.
fn certificates(scratch: &Scratch) {
    let certs = scratch.join("certs");
    fs::create_dir(&certs).unwrap();
    authority(&certs, "ca");
    signed(&certs, "ca", "tls");
    fs::rename(certs.join("ca.pem"), certs.join("ca.crt")).unwrap();
    fs::rename(certs.join("tls.pem"), certs.join("tls.crt")).unwrap();
}

/// Starts the control plane on `port`, or on any free port if `port` is 0. Returns the control
/// plane and its port.
fn control_plane(scratch: &Scratch, port: u16) -> (Process, u16) {
    let python = repository().join("target/test-python/bin/python3");
    assert!(python.exists(), "{python:?} is missing; run scripts/setup");
    let mut command = Command::new(python);
    command
        .arg(repository().join("crates/envoy/tests/control_plane/serve_file.py"))
        .arg("--protos")
        .arg(repository().join("crates/envoy/proto"))
        .args(["--generated", "generated", "--resources", "resources.json"])
        .args(["--certs", "certs", "--port", &port.to_string()])
        .current_dir(scratch.path());
    let mut process = Process::start(&mut command);
    let line = process.wait_for(&["listening port="]);
    let port = line.rsplit('=').next().unwrap().parse().unwrap();
    (process, port)
}

/// Starts Tidegate as `ratelimit`, with Envoy Gateway's environment variables. There are two
/// differences. Paths and addresses differ, because the test runs without a container. Reconnection
/// delays are shorter.
fn ratelimit(scratch: &Scratch, control_plane: u16, redis: &str) -> Process {
    ratelimit_with(scratch, control_plane, redis, &[])
}

/// Works like [`ratelimit`], with further `variables`.
fn ratelimit_with(
    scratch: &Scratch,
    control_plane: u16,
    redis: &str,
    variables: &[(&str, &str)],
) -> Process {
    let program = scratch.join("ratelimit");
    symlink(env!("CARGO_BIN_EXE_tidegate"), &program).unwrap();
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("NO_COLOR", "1")
        .current_dir(scratch.path());
    let lines = ENVIRONMENT.lines();
    for line in lines.filter(|line| !line.starts_with('#')) {
        let (name, value) = line.split_once('=').unwrap();
        command.env(name, value.replace("/certs/", "certs/"));
    }
    let server = format!("localhost:{control_plane}");
    let redis = redis.replace("redis://", "");
    for (name, value) in [
        ("CONFIG_GRPC_XDS_SERVER_URL", server.as_str()),
        ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "50ms"),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "50ms"),
        ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "200ms"),
        // Tidegate requires a client certificate from every Envoy. The Envoys that Envoy Gateway
        // deploys present one.
        ("GRPC_CLIENT_TLS_CACERT", "certs/ca.crt"),
        ("REDIS_URL", &redis),
        ("PROMETHEUS_ADDR", "127.0.0.1:0"),
        ("HOST", "127.0.0.1"),
        ("PORT", "0"),
        ("GRPC_HOST", "127.0.0.1"),
        ("GRPC_PORT", "0"),
        ("DEBUG_PORT", "0"),
    ] {
        command.env(name, value);
    }
    // There is no OpenTelemetry collector in this test.
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command.envs(variables.iter().copied());
    Process::start(&mut command)
}

fn address(process: &mut Process, listener: &str) -> SocketAddr {
    let line = process.wait_for(&["listening", &format!("listener=\"{listener}\"")]);
    let line = line.replace('"', "");
    let mut words = line.split_whitespace();
    let address = words.find_map(|word| word.strip_prefix("address="));
    address.unwrap().parse().unwrap()
}

/// Returns the bootstrap of an Envoy that speaks mutual TLS with Tidegate.
fn bootstrap(scratch: &Scratch) -> String {
    let path = |name: &str| scratch.join("certs").join(name).display().to_string();
    let tls = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "localhost",
            "common_tls_context": {
                "tls_certificates": [{
                    "certificate_chain": {"filename": path("tls.crt")},
                    "private_key": {"filename": path("tls.key")},
                }],
                "validation_context": {"trusted_ca": {"filename": path("ca.crt")}},
            },
        },
    });
    let cluster = "    - name: tidegate\n";
    assert!(BOOTSTRAP.contains(cluster));
    let with_tls = format!("{cluster}      transport_socket: {tls}\n");
    BOOTSTRAP.replacen(cluster, &with_tls, 1)
}

/// Atomically replaces the control plane's resources.
fn publish(folder: &Path, resources: &Value) {
    let draft = folder.join("resources.draft");
    fs::write(&draft, resources.to_string()).unwrap();
    fs::rename(draft, folder.join("resources.json")).unwrap();
}

/// Returns resources with a limit for each API key. The limit's window is a year long, so that it
/// does not end during the test.
fn per_key(requests: u32) -> Value {
    let limit = json!({"unit": "YEAR", "requests_per_unit": requests});
    let descriptors = json!([{"key": "api_key", "rate_limit": limit}]);
    json!([{"name": "shop", "domain": "shop", "descriptors": descriptors}])
}

#[test]
fn the_deployment_of_envoy_gateway_works_unchanged() {
    let scratch = Scratch::new();
    certificates(&scratch);
    let redis = RedisServer::start();
    let (mut plane, port) = control_plane(&scratch, 0);
    let mut tidegate = ratelimit(&scratch, port, &redis.url());
    let http = address(&mut tidegate, "http");
    let grpc = address(&mut tidegate, "grpc");
    let metrics = address(&mut tidegate, "metrics");
    let envoy = Envoy::start(&bootstrap(&scratch), grpc);
    let ask = |listener: &str| {
        let front = envoy.listener(listener);
        let request = Ask::get(front, "/").header("x-api-key", "alice");
        request.send().status
    };
    plane.wait_for(&["SUBSCRIBE", "envoy-ratelimit", "version="]);

    // With `FORCE_START_WITHOUT_INITIAL_CONFIG`, the server is ready before it has a configuration.
    // Until the configuration arrives, the server responds to every request with an error.
    assert_eq!(Ask::get(http, "/healthcheck").send().status, 200);
    assert_eq!((ask("open"), ask("closed")), (200, 500));

    publish(scratch.path(), &per_key(3));
    plane.wait_for(&["ACK", "python-1"]);
    assert_eq!([(); 4].map(|()| ask("closed")), [200, 200, 200, 429]);

    let mut wrong = per_key(9);
    wrong[0]["descriptors"][0]["rate_limit"]["unit"] = json!("UNKNOWN");
    publish(scratch.path(), &wrong);
    let nack = "shop: descriptors[0].rate_limit.unit: invalid rate limit unit 'UNKNOWN'";
    plane.wait_for(&["NACK", "python-1", nack]);
    assert_eq!(ask("closed"), 429, "the last good set stays active");

    drop(plane);
    tidegate.wait_for(&[
        "no connection to the control plane; keeping the active rules",
        "retry_in_ms=",
    ]);
    assert_eq!(ask("closed"), 429);
    publish(scratch.path(), &per_key(6));
    let (mut plane, _) = control_plane(&scratch, port);
    plane.wait_for(&["SUBSCRIBE", "version=python-1"]);
    plane.wait_for(&["ACK", "python-1"]);
    // Six requests were counted: three admitted and three denied requests.
    let message = "a raised limit keeps what was counted";
    assert_eq!(ask("closed"), 429, "{message}");
    publish(scratch.path(), &json!([]));
    plane.wait_for(&["ACK", "python-2"]);
    let message = "a removed resource limits nothing";
    assert_eq!(ask("closed"), 200, "{message}");

    let page = Ask::get(metrics, "/metrics").send().body;
    for line in [
        "ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"api_key\",key2=\"\"} 7",
        "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"api_key\",key2=\"\"} 4",
        "ratelimit_service_config_load_error 1",
        "tidegate_envoy_xds_connected 1",
        "tidegate_envoy_xds_responses_total{result=\"rejected\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}:\n{page}");
    }
    let documentation = fs::read_to_string(repository().join("docs/envoy.md")).unwrap();
    let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for name in names.filter_map(|line| line.split(' ').next()) {
        let name = name.strip_prefix("ratelimit_service_").unwrap_or(name);
        let is_of_envoy = name.starts_with("tidegate_envoy_") || !name.starts_with("tidegate_");
        let is_documented = documentation.contains(&format!("`{name}`"));
        assert!(
            is_documented || !is_of_envoy,
            "{name} is not in docs/envoy.md"
        );
    }
    tidegate.signal("TERM");
    let (status, log) = tidegate.wait();
    assert!(status.success(), "{status}:\n{}", log.join("\n"));
}

/// Envoy Gateway sets these variables if its settings contain `redis.tls` with a `certificateRef`.
/// Envoy Gateway configures no certificate authority, so the system must trust the authority of the
/// Redis server.
#[test]
fn a_redis_with_tls_is_used_as_configured_by_envoy_gateway() {
    let scratch = Scratch::new();
    certificates(&scratch);
    let port = reserve_port().to_string();
    let path = |name: &str| scratch.join("certs").join(name).display().to_string();
    let redis_server = RedisServer::start_with(&[
        "--tls-port",
        &port,
        "--tls-ca-cert-file",
        &path("ca.crt"),
        "--tls-cert-file",
        &path("tls.crt"),
        "--tls-key-file",
        &path("tls.key"),
    ]);
    publish(scratch.path(), &per_key(3));
    let (mut plane, control_plane) = control_plane(&scratch, 0);
    let variables = [
        ("REDIS_TLS", "true"),
        ("REDIS_TLS_CLIENT_CERT", "certs/tls.crt"),
        ("REDIS_TLS_CLIENT_KEY", "certs/tls.key"),
        ("SSL_CERT_FILE", "certs/ca.crt"),
    ];
    let redis = format!("127.0.0.1:{port}");
    let mut tidegate = ratelimit_with(&scratch, control_plane, &redis, &variables);
    let http = address(&mut tidegate, "http");
    plane.wait_for(&["ACK", "python-1"]);
    let entries = json!([{"entries": [{"key": "api_key", "value": "alice"}]}]);
    let request = json!({"domain": "shop", "descriptors": entries});
    let decide = || Ask::new("POST", http, "/json").body(&request).send().status;
    assert_eq!([(); 4].map(|()| decide()), [200, 200, 200, 429]);
    // The test itself uses the port without TLS.
    let keys = redis_server.ask(&["DBSIZE"]);
    assert_ne!(keys.trim(), ":0", "Redis decides");
}

/// Without `start_without_config`, a server is not ready before its first configuration arrives,
/// even if the rules file is reloaded.
#[test]
fn a_server_without_its_first_configuration_is_not_ready() {
    let scratch = Scratch::new();
    certificates(&scratch);
    let (mut plane, port) = control_plane(&scratch, 0);
    let tls = "{ca: certs/ca.crt, certificate: certs/tls.crt, key: certs/tls.key}";
    let config = format!(
        "{EVERY_LISTENER}envoy: {{config: {{xds: {{server: 'localhost:{port}', tls: {tls}}}}}}}\n"
    );
    let mut server = Server::start_in(scratch, &config);
    let health = |server: &Server| {
        let ready = Ask::get(server.admin, "/readyz").send();
        let state = ready.json()["state"].as_str().unwrap().to_owned();
        let healthy = Ask::get(server.http, "/healthcheck").send().status;
        (ready.status, state, healthy)
    };
    let waiting = "waiting for the first configuration".to_owned();
    assert_eq!(health(&server), (503, waiting, 500));
    plane.wait_for(&["SUBSCRIBE", "default", "version="]);
    publish(server.directory(), &per_key(3));
    plane.wait_for(&["ACK", "python-1"]);
    assert_eq!(health(&server), (200, "ready".to_owned(), 200));
    let reloaded = server.operate(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    server.signal("HUP");
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(health(&server), (200, "ready".to_owned(), 200));
    publish(server.directory(), &per_key(0));
    plane.wait_for(&["ACK", "python-2", "nonce-2"]);
    server.stop();
}
