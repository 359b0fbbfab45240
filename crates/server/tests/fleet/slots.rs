//! Tests of a cluster where some slots are not served by any node.

use serde_json::{Value, json};
use tidegate_core::Source;

use crate::{
    client::Client,
    listeners::json,
    node::Node,
    support::{RedisServer, SERVER, eventually},
};

/// The first unserved slot. All lower slots are served.
const FIRST_UNSERVED: u16 = 12_000;

/// Starts a cluster with one node, which serves only the slots below [`FIRST_UNSERVED`].
fn partial_cluster() -> RedisServer {
    let redis = RedisServer::node(SERVER, &["--cluster-require-full-coverage", "no"]);
    let last = (FIRST_UNSERVED - 1).to_string();
    let assigned = redis.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", &last]);
    assert_eq!(assigned, "+OK");
    redis
}

/// Returns the JSON field `redis` of the document at `path`.
fn redis_state(node: &Node, path: &str) -> Value {
    let (status, document) = json(node.open_admin(), "GET", path, "");
    assert_eq!(status, 200, "a degraded server stays ready");
    assert_eq!(document["state"], "degraded", "{document}");
    document["redis"].clone()
}

#[test]
fn unserved_slots_are_reported_by_readyz_the_status_and_the_metrics() {
    let redis = partial_cluster();
    let node = Node::on_cluster(&redis.url());
    node.until_up(true);
    eventually("the slot map has been read", || {
        let health = node.limiter.redis_store().unwrap().stats().health;
        (health.unserved_slots == 4_384).then_some(())
    });
    for path in ["/readyz", "/v1/status"] {
        let seen = redis_state(&node, path);
        assert_eq!(seen["unserved_slots"], 4_384, "{seen}");
        assert_eq!(
            (&seen["servers"], &seen["up"]),
            (&json!(1), &json!(1)),
            "{seen}"
        );
        let state = "some hash slots of the cluster have no node; the rules' `on_failure` policies apply to the keys in these slots";
        assert_eq!(seen["state"], state);
    }
    let metrics = Client::connect(node.open_admin()).ask("GET", "/metrics", &[], b"");
    let sample = "\ntidegate_redis_slots_unserved 4384\n";
    assert!(metrics.body.contains(sample), "{}", metrics.body);
    // Only keys in unserved slots are decided locally.
    let decided_in_redis = (0..40)
        .filter(|user| node.spend("local", &user.to_string()).source == Source::Redis)
        .count();
    assert!((1..40).contains(&decided_in_redis), "{decided_in_redis}");
}
