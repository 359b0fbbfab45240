//! Tests Envoy's rate limit service from the operator's view: `check`, `serve`, reloads, and
//! starting with envoyproxy/ratelimit's environment variables.

use std::{net::SocketAddr, process::Output};

use serde_json::{Value, json};

use crate::support::{Answer, Ask, EVERY_LISTENER, Process, Scratch, Server, run, tidegate};

const SHOP: &str = "\
domain: shop
descriptors:
  - key: api_key
    rate_limit: {unit: hour, requests_per_unit: 2}
";

/// Creates a folder with one valid file.
fn shop() -> Scratch {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("config")).unwrap();
    scratch.write("config/shop.yaml", SHOP);
    scratch
}

fn check(scratch: &Scratch, args: &[&str]) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = run(tidegate(args).current_dir(scratch.path()));
    (
        status.code(),
        String::from_utf8([stdout, stderr].concat()).unwrap(),
    )
}

fn ask(address: SocketAddr) -> Answer {
    let body =
        json!({"domain": "shop", "descriptors": [{"entries": [{"key": "api_key", "value": "a"}]}]});
    Ask::new("POST", address, "/json").body(&body).send()
}

fn remaining(answer: &Answer) -> Value {
    answer.json()["statuses"][0]["limitRemaining"].clone()
}

#[test]
fn an_envoy_folder_is_checked() {
    let scratch = shop();
    let good = "config: 1 domain, no errors\n";
    assert_eq!(
        check(&scratch, &["check", "--envoy", "config"]),
        (Some(0), good.into())
    );
    scratch.write(
        "config/b.yaml",
        "domain: shop\ndescriptors: [{key: a, rate_limit: {unit: moon}}, {value: v}]",
    );
    let (code, message) = check(&scratch, &["check", "--envoy", "config"]);
    assert_eq!(code, Some(1));
    for mistake in [
        "config has 3 errors:",
        "  b.yaml: descriptors[0].rate_limit.unit (line 2): invalid rate limit unit 'moon'",
        "  b.yaml: descriptors[1] (line 2): descriptor has empty key",
        "  shop.yaml: domain (line 1): duplicate domain 'shop' in config file; b.yaml already defines it",
    ] {
        assert!(message.contains(mistake), "no {mistake:?} in:\n{message}");
    }
    let (code, message) = check(&scratch, &["check", "--envoy", "nowhere"]);
    assert_eq!(code, Some(2));
    assert!(
        message.starts_with("tidegate: cannot read nowhere: "),
        "{message}"
    );
}

#[test]
fn checking_a_rules_file_includes_its_envoy_folder() {
    let scratch = shop();
    scratch.write(
        "rules.yaml",
        &format!("{EVERY_LISTENER}envoy: {{config: config}}\n"),
    );
    let good = "rules.yaml: 0 rules, no errors\nconfig: 1 domain, no errors\n";
    assert_eq!(
        check(&scratch, &["check", "rules.yaml"]),
        (Some(0), good.into())
    );
    scratch.write("config/shop.yaml", "descriptors: []");
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(1));
    assert!(
        message.contains("config file cannot have empty domain"),
        "{message}"
    );
    let (code, message) = check(&scratch, &["serve", "--config", "rules.yaml"]);
    assert_eq!(code, Some(2));
    assert!(
        message.starts_with("tidegate: envoy.config: config has 1 error:"),
        "{message}"
    );
    scratch.write("rules.yaml", "envoy: {confg: x, near_limit_ratio: 2, response_headers: {limit: a b}, local_cache: much}\n");
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(1));
    for mistake in [
        "envoy.confg (line 1): unknown key `confg`; did you mean `config`?",
        "envoy.config (line 1): is missing; name the file or folder",
        "envoy.near_limit_ratio (line 1): expected a share from 0 to 1",
        "envoy.response_headers.limit (line 1): expected a header name, got \"a b\"",
        "envoy.local_cache (line 1): expected a size such as 512MiB or 1GiB, got \"much\"",
    ] {
        assert!(message.contains(mistake), "no {mistake:?} in:\n{message}");
    }
}

/// `check` must not report success for a configuration that `serve` cannot read, or for a
/// configuration without limits.
#[test]
fn an_empty_or_missing_folder_is_an_error() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("empty")).unwrap();
    scratch.write("empty/.hidden.yaml", SHOP);
    let (code, message) = check(&scratch, &["check", "--envoy", "empty"]);
    let nothing =
        "empty contains no file that defines a domain: requests from Envoy would not be limited\n";
    assert_eq!((code, message), (Some(1), format!("tidegate: {nothing}")));

    scratch.write("rules.yaml", "envoy: {config: empty}\n");
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(1));
    assert!(
        message.contains(&format!("tidegate: envoy.config: {nothing}")),
        "{message}"
    );

    scratch.write("rules.yaml", "envoy: {config: nowhere}\n");
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(2));
    assert!(
        message.starts_with("tidegate: rules.yaml: envoy.config: cannot read nowhere: "),
        "{message}"
    );
    assert!(
        message.contains("RUNTIME_ROOT and RUNTIME_SUBDIRECTORY"),
        "{message}"
    );
    assert!(!message.contains("no errors"), "{message}");

    // Both files are checked, and the worse result determines the exit code.
    scratch.write("bad.yaml", "domain: 1.5");
    let (code, message) = check(&scratch, &["check", "nowhere.yaml", "--envoy", "bad.yaml"]);
    assert_eq!(code, Some(2));
    for part in ["cannot read nowhere.yaml: ", "bad.yaml has 1 error:"] {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
}

#[test]
fn the_start_logs_the_active_configuration() {
    let config = format!("{EVERY_LISTENER}envoy: {{config: config}}\n");
    let mut server = Server::start_in(shop(), &config);
    server.signal("HUP");
    let (domains, descriptors) = ("domains=1", "descriptors=1");
    let reloaded = "reloaded the configuration of the rate limit service";
    server.wait_for(&[reloaded, domains, descriptors]);
    let message = server.log_text();
    let words = [
        "the configuration of the rate limit service is active",
        domains,
        descriptors,
    ];
    let says_it = |line: &str| words.iter().all(|word| line.contains(word));
    assert!(message.lines().any(says_it), "{message}");
}

#[test]
fn a_reload_reports_the_warnings_for_the_files() {
    let server = Server::start_in(
        shop(),
        &format!("{EVERY_LISTENER}envoy: {{config: config}}\n"),
    );
    let file = server.directory().join("config/shop.yaml");
    let text = "domain: shop\ndescriptors: [{key: api_key, rate_limit: {unit: hour}}]\n";
    std::fs::write(file, text).unwrap();
    let answer = Ask::new("POST", server.admin, "/v1/reload").send();
    let expected = json!([
        "shop.yaml: descriptors[0].rate_limit (line 2): requests_per_unit is missing and defaults to 0: every \
         request is over the limit; set it"
    ]);
    assert_eq!(answer.json()["warnings"], expected, "{}", answer.body);
}

/// If a read fails because file descriptors are exhausted, it is retried until it succeeds, even if
/// the file does not change.
#[test]
fn an_unreadable_file_is_retried_until_it_is_readable() {
    let config = format!("{EVERY_LISTENER}envoy: {{config: config/shop.yaml}}\n");
    let mut server = Server::start_in(shop(), &config);
    assert_eq!(remaining(&ask(server.http)), json!(1));
    let raised = SHOP.replace("requests_per_unit: 2", "requests_per_unit: 9");
    server.limit_files(3);
    let (draft, file) = (
        server.directory().join("draft"),
        server.directory().join("config/shop.yaml"),
    );
    std::fs::write(&draft, raised).unwrap();
    std::fs::rename(draft, file).unwrap();
    server.wait_for(&[
        "kept the old configuration of the rate limit service: cannot read config/shop.yaml",
        "retrying until the configuration can be read",
    ]);
    server.limit_files(1_024);
    let line = server.wait_for(&["the configuration of the rate limit service"]);
    assert!(
        line.contains("reloaded"),
        "the failure is logged once: {line}"
    );
    assert_eq!(remaining(&ask(server.http)), json!(7));
    let metrics = server.metrics();
    for sample in [
        "tidegate_envoy_config_loads_total{result=\"ok\"} 2\n",
        "tidegate_envoy_config_loads_total{result=\"failed\"} 1\n",
        "tidegate_envoy_last_config_load_success 1\n",
    ] {
        assert!(metrics.contains(sample), "no {sample:?} in:\n{metrics}");
    }
}

#[test]
fn an_envoy_folder_is_served_and_reloaded_on_changes() {
    let mut server = Server::start_in(
        shop(),
        &format!("{EVERY_LISTENER}envoy: {{config: config}}\n"),
    );
    let first = ask(server.http);
    assert_eq!((first.status, remaining(&first)), (200, json!(1)));
    let health = Ask::get(server.http, "/healthcheck").send();
    assert_eq!((health.status, health.body.as_str()), (200, "OK"));
    let file = server.directory().join("config/shop.yaml");
    std::fs::write(
        &file,
        SHOP.replace("requests_per_unit: 2", "requests_per_unit: 5"),
    )
    .unwrap();
    server.wait_for(&["reloaded the configuration of the rate limit service"]);
    assert_eq!(
        remaining(&ask(server.http)),
        json!(3),
        "1 was spent of 2, and now 2 of 5"
    );
    std::fs::write(&file, "domain: []").unwrap();
    server.wait_for(&["kept the old configuration of the rate limit service"]);
    assert_eq!(remaining(&ask(server.http)), json!(2));
    let ready = Ask::get(server.admin, "/readyz").send().json();
    assert_eq!(ready["last_reload"], "failed; the old rules stay active");
    assert!(
        ready["mistakes"][0]
            .as_str()
            .unwrap()
            .starts_with("shop.yaml: "),
        "{ready}"
    );
    let refused = Ask::new("POST", server.admin, "/v1/reload").send();
    assert_eq!(refused.status, 422, "{}", refused.body);
    let metrics = server.metrics();
    for sample in [
        "tidegate_envoy_hits_total{domain=\"shop\",descriptor=\"api_key\"} 3\n",
        "tidegate_envoy_within_limit_total{domain=\"shop\",descriptor=\"api_key\"} 3\n",
        "tidegate_envoy_over_limit_total{domain=\"shop\",descriptor=\"api_key\"} 0\n",
        "tidegate_envoy_config_loads_total{result=\"ok\"} 2\n",
        "tidegate_envoy_last_config_load_success 0\n",
        "tidegate_envoy_domains 1\n",
        "tidegate_envoy_errors_total 0\n",
    ] {
        assert!(metrics.contains(sample), "no {sample:?} in:\n{metrics}");
    }
    server.stop();
}

#[test]
fn every_envoy_metric_is_documented() {
    let server = Server::start_in(
        shop(),
        &format!("{EVERY_LISTENER}envoy: {{config: config}}\n"),
    );
    ask(server.http);
    let page = std::fs::read_to_string(crate::support::repository().join("docs/envoy.md")).unwrap();
    let metrics = server.metrics();
    let names = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE tidegate_envoy_"));
    let names: Vec<&str> = names.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names.len(), 13, "{names:?}");
    for name in names {
        assert!(
            page.contains(&format!("`tidegate_envoy_{name}`")),
            "{name} is not in docs/envoy.md"
        );
    }
}

/// Returns a command with envoyproxy/ratelimit's environment variables and ephemeral ports.
fn from_environment(scratch: &Scratch) -> std::process::Command {
    let mut command = tidegate(&["serve", "--from-envoy-env"]);
    command.current_dir(scratch.path());
    for (name, value) in [
        ("HOST", "127.0.0.1"),
        ("PORT", "0"),
        ("GRPC_HOST", "127.0.0.1"),
        ("GRPC_PORT", "0"),
        ("DEBUG_PORT", "0"),
        ("RUNTIME_ROOT", "."),
        ("RUNTIME_WATCH_ROOT", "false"),
        ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
        ("REDIS_POOL_SIZE", "5"),
        ("USE_STATSD", "false"),
        ("LOG_LEVEL", "info"),
    ] {
        command.env(name, value);
    }
    command
}

#[test]
fn the_environment_of_envoyproxy_ratelimit_starts_the_server() {
    let scratch = shop();
    let mut process = Process::start(&mut from_environment(&scratch));
    process.wait_for(&["REDIS_POOL_SIZE is ignored: "]);
    process.wait_for(&["RUNTIME_WATCH_ROOT is ignored: "]);
    process.wait_for(&["USE_STATSD is ignored: metrics are in the Prometheus format, at /metrics of the admin listener"]);
    let line = process
        .wait_for(&["listening", "listener=\"http\""])
        .replace('"', "");
    let address = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("address="))
        .unwrap();
    let answer = ask(address.parse().unwrap());
    assert_eq!(answer.status, 200);
    let headers = &answer.json()["responseHeadersToAdd"];
    assert_eq!(
        headers[1],
        json!({"key": "RateLimit-Remaining", "value": "1"}),
        "{headers}"
    );
}

#[test]
fn open_listeners_of_that_environment_cause_a_warning() {
    let scratch = shop();
    let mut command = from_environment(&scratch);
    let mut process = Process::start(command.env("GRPC_HOST", "0.0.0.0"));
    let line = process.wait_for(&["open-listener"]);
    let expected = "GRPC_HOST: open-listener: other machines can reach 0.0.0.0:0";
    assert!(line.contains(expected), "{line}");
}

#[test]
fn unsupported_variables_of_envoyproxy_ratelimit_are_rejected() {
    let scratch = shop();
    let mut command = from_environment(&scratch);
    for (name, value) in [
        ("CONFIG_TYPE", "GRPC_XDS_DELTA"),
        ("BACKEND_TYPE", "memcache"),
        ("GRPC_UDS", "/run/ratelimit.sock"),
        ("NEAR_LIMIT_RATIO", "much"),
        ("GRPC_SERVER_USE_TLS", "true"),
        ("PORT", "http"),
    ] {
        command.env(name, value);
    }
    let output = run(&mut command);
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    for problem in [
        "CONFIG_TYPE: expected FILE or GRPC_XDS_SOTW, got \"GRPC_XDS_DELTA\"",
        "BACKEND_TYPE: counts are kept in Redis or in the memory of this process only",
        "GRPC_UDS: the gRPC listener does not support Unix sockets",
        "NEAR_LIMIT_RATIO: expected a share from 0 to 1, such as 0.8, got \"much\"",
        "GRPC_SERVER_TLS_CERT: is missing",
        "PORT: expected a port from 0 to 65535, got \"http\"",
    ] {
        assert!(message.contains(problem), "no {problem:?} in:\n{message}");
    }
}

const LIMITADOR: &str = "\
- namespace: api
  max_value: 2
  seconds: 86400
  conditions: [\"descriptors[0].method == 'POST'\"]
  variables: [\"descriptors[0]['user']\"]
";

#[test]
fn a_limits_file_of_limitador_is_checked() {
    let scratch = Scratch::new();
    scratch.write("limits.yaml", LIMITADOR);
    let good = "limits.yaml: 1 domain, no errors\n";
    assert_eq!(
        check(&scratch, &["check", "--limitador", "limits.yaml"]),
        (Some(0), good.into())
    );
    scratch.write(
        "rules.yaml",
        &format!("{EVERY_LISTENER}envoy: {{limitador: limits.yaml}}\n"),
    );
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(0), "{message}");
    assert!(message.contains(good), "{message}");

    let wrong = LIMITADOR.replace("== 'POST'", "> 'POST'");
    scratch.write("limits.yaml", &wrong);
    for args in [
        ["check", "--limitador", "limits.yaml"].as_slice(),
        &["check", "rules.yaml"],
    ] {
        let (code, message) = check(&scratch, args);
        assert_eq!(code, Some(1), "{message}");
        let mistake = "  limits.yaml: [0].conditions[0] (line 4): this condition is not supported; \
            supported are descriptors[0]['key'] == 'value', != in place of ==, and key == value";
        assert!(message.contains(mistake), "{message}");
    }
    let (code, message) = check(&scratch, &["serve", "--config", "rules.yaml"]);
    assert_eq!(code, Some(2));
    let refused = "tidegate: envoy.limitador: limits.yaml has 1 error:";
    assert!(message.starts_with(refused), "{message}");
    let both = "envoy: {limitador: limits.yaml, config: shop.yaml, quota_mode: true}\n";
    scratch.write("rules.yaml", both);
    let (code, message) = check(&scratch, &["check", "rules.yaml"]);
    assert_eq!(code, Some(1));
    for name in ["config", "quota_mode"] {
        let mistake =
            format!("`{name}` cannot be combined with `limitador`; remove one of the two");
        assert!(message.contains(&mistake), "{message}");
    }
    let (code, message) = check(&scratch, &["check", "limits.yaml"]);
    assert_eq!(code, Some(1));
    assert!(
        message.contains("tidegate check --limitador limits.yaml"),
        "{message}"
    );
}

#[test]
fn a_limits_file_of_limitador_is_served_and_reloaded() {
    let scratch = Scratch::new();
    scratch.write("limits.yaml", LIMITADOR);
    let mut server = Server::start_in(
        scratch,
        &format!("{EVERY_LISTENER}envoy: {{limitador: limits.yaml}}\n"),
    );
    let body = json!({"namespace": "api", "values": {"method": "POST", "user": "a"}, "delta": 1});
    let http = server.http;
    let ask = |path| Ask::new("POST", http, path).body(&body).send().status;
    let statuses: Vec<u16> = (0..3).map(|_| ask("/check_and_report")).collect();
    assert_eq!(statuses, [200, 200, 429]);
    let raised = LIMITADOR.replace("max_value: 2", "max_value: 3");
    std::fs::write(server.directory().join("limits.yaml"), raised).unwrap();
    server.wait_for(&["reloaded the configuration of the rate limit service"]);
    // The two hits that were counted before the reload still count.
    assert_eq!(ask("/check_and_report"), 200);
    assert_eq!(ask("/check"), 429);
}
