//! Tests of candidate rules on a real Redis.

use serde_json::Value;
use tidegate_config::Config;
use tidegate_core::MemoryBounds;
use tidegate_limiter::candidate::CandidateRules;

use crate::{
    listeners::json,
    node::{Node, RULES},
    support::{RedisServer, eventually},
};

/// Starts a node. The node's active rules admit 10 requests per hour, and its candidate rules admit
/// only 3.
fn start(redis: &RedisServer) -> Node {
    let node = Node::start(&redis.url());
    node.until_up(true);
    let rules = Config::parse(&RULES.replace("limits: [10/h]", "limits: [3/h]"));
    let candidate = CandidateRules {
        file: "candidate.yaml".into(),
        rules: rules.unwrap().rules,
        until: None,
    };
    let bounds = MemoryBounds::default();
    node.limiter.set_candidate(Some(candidate), bounds);
    node
}

/// Returns the comparison report once `count` requests have been compared or counted as lost.
fn report(node: &Node, count: u64) -> Value {
    let admin = node.open_admin();
    eventually("the requests are compared", || {
        let (status, report) = json(admin, "GET", "/v1/candidate", "");
        assert_eq!(status, 200, "{report}");
        let done = [&report["compared"], &report["lost"]];
        let done: u64 = done.iter().filter_map(|count| count.as_u64()).sum();
        (done == count).then_some(report)
    })
}

const BODY: &str = r#"{"entries": {"path": "/local", "user": "ada"}}"#;

#[test]
fn nodes_share_the_counters_of_the_candidate() {
    let redis = RedisServer::start();
    let [a, b] = [(); 2].map(|()| start(&redis));
    let ask = |node: &Node, times: usize| -> Vec<u16> {
        let http = node.open_http();
        let asked = (0..times).map(|_| json(http, "POST", "/v1/check", BODY).0);
        asked.collect()
    };
    assert_eq!(ask(&a, 2), [200; 2]);
    assert_eq!(report(&a, 2)["newly_denied"], 0);
    assert_eq!(ask(&b, 3), [200; 3]);
    let compared = report(&b, 3);
    assert_eq!(compared["newly_denied"], 2, "{compared}");
    // The candidate rules do not charge the active rules' counters.
    assert_eq!(ask(&a, 6), [200, 200, 200, 200, 200, 429]);
    let compared = report(&a, 8);
    assert_eq!(compared["newly_denied"], 5, "{compared}");
    assert_eq!(compared["lost"], 0);
}

#[test]
fn a_request_that_redis_cannot_decide_is_lost() {
    let redis = RedisServer::start();
    let node = start(&redis);
    drop(redis);
    node.until_up(false);
    let http = node.open_http();
    // The local fallback makes the decision.
    assert_eq!(json(http, "POST", "/v1/check", BODY).0, 200);
    assert_eq!(report(&node, 1)["lost"], 1);
}
