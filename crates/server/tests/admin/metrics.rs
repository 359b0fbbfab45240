//! Tests of health and metrics.

use crate::{
    client::Client,
    listener::{KEY, TestListener},
};

#[test]
fn health_is_reported() {
    let listener = TestListener::open();
    assert_eq!(listener.ask("GET", "/healthz", "").status, 200);
    assert_eq!(listener.ask("HEAD", "/healthz", "").status, 200);
    assert_eq!(listener.ask("GET", "/readyz", "").json()["ready"], true);
    let answer = listener.ask("POST", "/healthz", "");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
    let answer = listener.ask("GET", "/v1/reload", "");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    let answer = listener.ask("GET", "/nowhere", "");
    assert_eq!(answer.status, 404);
    assert!(answer.problem().contains("/healthz"));
}

#[test]
fn verdicts_are_counted_by_rule_and_outcome() {
    let listener = TestListener::open();
    assert!(listener.spend() && listener.spend() && !listener.spend());
    listener.ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"for": "10s"}"#);
    assert!(!listener.spend());
    listener.at_secs(7);
    let metrics = listener.ask("GET", "/metrics", "");
    assert_eq!(
        metrics.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    for line in [
        "# TYPE tidegate_decisions_total counter",
        "tidegate_decisions_total{listener=\"http\",outcome=\"allowed\"} 2",
        "tidegate_decisions_total{listener=\"http\",outcome=\"limit\"} 1",
        "tidegate_decisions_total{listener=\"http\",outcome=\"blocked\"} 1",
        "tidegate_decisions_total{listener=\"resp\",outcome=\"allowed\"} 0",
        "tidegate_rule_decisions_total{rule=\"r\",outcome=\"allowed\"} 2",
        "tidegate_rule_decisions_total{rule=\"r\",outcome=\"limit\"} 1",
        "tidegate_rule_decisions_total{rule=\"r\",outcome=\"blocked\"} 1",
        "tidegate_rule_decisions_total{rule=\"all of it\",outcome=\"allowed\"} 0",
        "tidegate_rule_denied_cost_total{rule=\"r\"} 2",
        "tidegate_rule_utilization_ratio_bucket{le=\"0.5\",rule=\"r\"} 1",
        "tidegate_rule_utilization_ratio_count{rule=\"r\"} 1",
        "tidegate_rule_decision_duration_seconds_count{rule=\"r\"} 1",
        "tidegate_limit{rule=\"r\",policy=\"2/min\"} 2",
        "tidegate_limit{rule=\"r\",policy=\"100/h\"} 100",
        "tidegate_blocks 1",
        "tidegate_keys 2",
        "tidegate_uptime_seconds 7",
        "tidegate_last_reload_success 1",
        "tidegate_connections{listener=\"admin\"} 1",
    ] {
        assert!(
            metrics.body.lines().any(|found| found == line),
            "{line} is missing in {}",
            metrics.body
        );
    }
    // The duration of a thread's first decision is always measured, and this test has only one
    // thread.
    assert!(
        metrics
            .body
            .contains("tidegate_decision_duration_seconds_count 1"),
        "{}",
        metrics.body
    );
}

#[test]
fn the_metrics_listener_serves_metrics_and_nothing_else() {
    let listener = TestListener::with_token(Some("secret"));
    assert_eq!(listener.ask("GET", "/v1/rules", "").status, 401);
    let address = listener.open_metrics();
    let ask = |method: &str, path: &str| Client::connect(address).ask(method, path, &[], b"");
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(ask("GET", path).status, 200, "{path}");
        assert_eq!(ask("HEAD", path).status, 200, "{path}");
        assert_eq!(ask("POST", path).status, 405, "{path}");
    }
    assert!(ask("GET", "/metrics").body.contains("tidegate_limit{"));
    for path in ["/", "/v1/rules", "/v1/status", "/console", "/v1/events"] {
        assert_eq!(ask("GET", path).status, 404, "{path}");
    }
}

/// Tests that every sample belongs to the preceding metric family, and that no family appears
/// twice.
#[test]
fn the_output_is_valid_prometheus_text() {
    let listener = TestListener::open();
    assert!(listener.spend());
    let (mut family, mut families) = (String::new(), Vec::new());
    for line in listener.ask("GET", "/metrics", "").body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert!(!families.contains(&name.to_owned()), "{name} appears twice");
            families.push(name.to_owned());
            family = name.to_owned();
        } else if !line.starts_with("# HELP ") {
            assert!(line.starts_with(&family), "{line} appears under {family}");
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
    assert!(families.len() > 15, "{families:?}");
}
