//! Tests of listing recent denials from several nodes.

use serde_json::{Value, json};
use tidegate_limiter::KeyMask;
use tidegate_redis::FallbackSettings;

use crate::{listeners::json, node::Node, support::RedisServer};

fn start(redis: &RedisServer, mask: &KeyMask) -> Node {
    let node = Node::with_mask(&redis.url(), FallbackSettings::default(), mask.clone());
    node.until_up(true);
    node
}

fn denials(node: &Node, query: &str) -> Value {
    let (status, list) = json(node.open_admin(), "GET", &format!("/v1/denials{query}"), "");
    assert_eq!(status, 200, "{list}");
    list
}

/// Returns the keys of the listed denials, newest first.
fn keys(list: &Value) -> Vec<&str> {
    let rows = list["rows"].as_array().unwrap().iter();
    rows.map(|row| row["key"][0].as_str().unwrap()).collect()
}

fn publish(node: &Node) {
    node.run(node.limiter.publish_lists());
}

/// Denials are read in pages of 250. A node skips pages with only its own denials, and denials that
/// it cannot decode.
#[test]
fn older_pages_are_read_until_a_denial_of_another_node_is_found() {
    let redis = RedisServer::start();
    let [a, b] = [(); 2].map(|()| start(&redis, &KeyMask::plain()));
    exceed(&b, "other", 1);
    publish(&b);
    for round in 1..4 {
        a.at_millis(round);
        exceed(&a, &format!("own-{round}"), 150);
        publish(&a);
    }
    redis.ask(&[
        "EVAL",
        "for n = 200, 450 do redis.call('HSET', 'test#denials', n, n .. ' x') end",
        "0",
    ]);
    assert_eq!(keys(&denials(&a, "?key=other")), ["other"]);
    assert_eq!(keys(&denials(&a, "?n=1000")).len(), 451);
}

/// Exhausts the limit for `user`, and sends `denied` further requests, which are denied.
fn exceed(node: &Node, user: &str, denied: usize) {
    assert_eq!(node.admitted("local", user, 10 + denied), 10);
}

#[test]
fn any_node_lists_the_denials_of_all_and_a_lost_one_loses_the_unpublished() {
    let redis = RedisServer::start();
    let nodes = [(); 4].map(|()| start(&redis, &KeyMask::plain()));
    for (number, node) in nodes.iter().enumerate() {
        node.at_millis(number as u64 * 1_000);
        exceed(node, &format!("user-{number}"), number + 1);
        publish(node);
        // A second call has nothing new to publish.
        publish(node);
    }
    for node in &nodes {
        let list = denials(node, "");
        let expected = "user-3 user-3 user-3 user-3 user-2 user-2 user-2 user-1 user-1 user-0";
        assert_eq!(keys(&list).join(" "), expected);
        assert_eq!(list["lost"], 0);
        assert_eq!(
            keys(&denials(node, "?rule=local&key=user-1")),
            ["user-1"; 2]
        );
        assert_eq!(keys(&denials(node, "?rule=open")), [""; 0]);
        assert_eq!(keys(&denials(node, "?n=3")), ["user-3"; 3]);
    }
    let [first, .., last] = nodes;
    last.at_millis(10_000);
    exceed(&last, "unpublished", 1);
    first.at_millis(10_000);
    assert_eq!(keys(&denials(&first, "?since=7s")), ["user-3"; 4]);
    assert_eq!(keys(&denials(&last, "?since=1s")), ["unpublished"]);
    drop(last);
    assert_eq!(keys(&denials(&first, "")).len(), 10);
}

#[test]
fn a_flood_publishes_the_newest_denials_and_counts_the_others() {
    let redis = RedisServer::start();
    let [a, b] = [(); 2].map(|()| start(&redis, &KeyMask::plain()));
    exceed(&a, "first", 50);
    a.at_millis(1);
    exceed(&a, "flood", 200);
    publish(&a);
    let list = denials(&b, "?n=1000");
    assert_eq!(keys(&list), ["flood"; 200]);
    assert_eq!(list["lost"], 50);
    let own = denials(&a, "?n=1000");
    assert_eq!((keys(&own).len(), &own["lost"]), (250, &json!(0)));
}

#[test]
fn hashed_values_are_hashed_in_redis_too() {
    let redis = RedisServer::start();
    let mask = KeyMask::hashed(b"secret");
    let [a, b] = [(); 2].map(|()| start(&redis, &mask));
    exceed(&a, "acme-corporation", 1);
    publish(&a);
    let hashed = mask.value("acme-corporation");
    for node in [&a, &b] {
        let list = denials(node, "?rule=local&key=acme-corporation");
        assert_eq!(keys(&list), [&*hashed]);
        assert_eq!(list["rows"][0]["entries"]["user"], &*hashed);
    }
    // Denials are stored in a binary format, so the script only searches for the strings that they
    // contain.
    let script = "local stored = table.concat(redis.call('HVALS', 'test#denials'))
local function has(text) return tostring(stored:find(text, 1, true) ~= nil) end
return has(ARGV[1]) .. ' ' .. has('acme')";
    let found = redis.ask(&["EVAL", script, "0", &hashed]);
    assert_eq!(found, "true false");
    // If one server stores plain keys, another server can still show them as hashes.
    let plain = start(&redis, &KeyMask::plain());
    plain.at_millis(1);
    exceed(&plain, "plain-customer", 1);
    publish(&plain);
    assert_eq!(keys(&denials(&a, ""))[0], mask.value("plain-customer"));
}

#[test]
fn while_redis_is_down_each_node_lists_its_own_denials() {
    let redis = RedisServer::start();
    let node = start(&redis, &KeyMask::plain());
    drop(redis);
    node.until_up(false);
    assert!(!node.spend("closed", "acme").allowed);
    publish(&node);
    let list = denials(&node, "");
    assert_eq!(list["rows"].as_array().unwrap().len(), 1);
    let hint = list["hint"].as_str().unwrap();
    assert!(
        hint.starts_with("denials of other servers are missing: "),
        "{hint}"
    );
    let failed = "tidegate_denial_publications_total{result=\"failed\"} 1";
    let metrics = node.limiter.exposition();
    assert!(metrics.contains(failed), "{metrics}");
}
