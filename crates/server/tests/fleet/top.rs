//! Tests of top talkers across several nodes.

use serde_json::{Value, json};
use tidegate_limiter::KeyMask;
use tidegate_redis::FallbackSettings;

use crate::{listeners::json, node::Node, support::RedisServer};

const MINUTE_MS: u64 = 60_000;

fn start(redis: &RedisServer, mask: &KeyMask) -> Node {
    let node = Node::with_mask(&redis.url(), FallbackSettings::default(), mask.clone());
    node.until_up(true);
    node
}

/// Sets the clock to `millis` milliseconds after its initial time, and publishes the completed time
/// slices.
fn publish(node: &Node, millis: u64) {
    node.at_millis(millis);
    let top = node.limiter.top_talkers().unwrap();
    top.collect_ended(node.limiter.now());
    node.run(node.limiter.publish_lists());
}

pub(crate) fn top(node: &Node, query: &str) -> Value {
    let (status, list) = json(node.open_admin(), "GET", &format!("/v1/top{query}"), "");
    assert_eq!(status, 200, "{list}");
    list
}

fn history(node: &Node, user: &str) -> Value {
    let query = format!("/v1/history?rule=local&key={user}&over=5m");
    let (status, history) = json(node.open_admin(), "GET", &query, "");
    assert_eq!(status, 200, "{history}");
    history
}

/// Returns the number of requests in all time slices of a history.
fn requests_of(history: &Value) -> u64 {
    let slices = history["slices"].as_array().unwrap().iter();
    let requests = slices.map(|slice| slice["requests"]["estimate"].as_u64().unwrap());
    requests.sum()
}

#[test]
fn any_node_answers_for_all_and_a_lost_one_loses_one_slice() {
    let redis = RedisServer::start();
    let [a, b] = [(); 2].map(|()| start(&redis, &KeyMask::plain()));
    let spend = |node: &Node, user: &str, times: usize| {
        for _ in 0..times {
            node.spend("local", user);
        }
    };
    spend(&a, "acme", 3);
    spend(&b, "acme", 4);
    spend(&b, "globex", 12);
    // The current minute has not ended, so each node knows only its own requests.
    assert_eq!(top(&a, "?rule=local")["total"]["requests"], 3);
    publish(&a, MINUTE_MS);
    publish(&b, MINUTE_MS);
    spend(&b, "lost", 5);
    let row = |user: &str, estimate: u64| json!({"key": [user], "estimate": estimate, "error": 0});
    for over in ["5m", "15m", "1h", "1d"] {
        let list = top(&a, &format!("?rule=local&over={over}"));
        assert_eq!(list["servers"], 2);
        assert_eq!(
            list["total"],
            json!({"requests": 19, "denied": 2, "cost": 19})
        );
        assert_eq!(list["rows"], json!([row("globex", 12), row("acme", 7)]));
    }
    assert_eq!(
        top(&b, "")["total"],
        json!({"requests": 24, "denied": 2, "cost": 24})
    );
    let of_acme = history(&a, "acme");
    assert_eq!(of_acme["servers"], 2);
    assert_eq!(requests_of(&of_acme), 7);
    // If a node is killed, its counts for the current minute are lost.
    drop(b);
    assert_eq!(top(&a, "")["total"]["requests"], 19);
    // The slices that the killed node has published still count in every period that includes these
    // slices.
    publish(&a, MINUTE_MS * 59);
    let list = top(&a, "?over=5m");
    assert_eq!(list["total"]["requests"], 0);
    assert_eq!(list["servers"], 1, "the killed node decided nothing");
    assert_eq!(top(&a, "?over=1h")["total"]["requests"], 19);
    // A day later, the counts are too old to be included in any period.
    publish(&a, MINUTE_MS * 60 * 26);
    assert_eq!(top(&a, "?over=1d")["total"]["requests"], 0);
}

#[test]
fn while_redis_is_down_each_node_answers_for_itself() {
    let redis = RedisServer::start();
    let node = start(&redis, &KeyMask::plain());
    node.spend("open", "acme");
    drop(redis);
    node.until_up(false);
    // The fallback policy decides these requests. The second request is denied by the policy, not
    // because of its key.
    assert!(node.spend("open", "acme").allowed);
    assert!(!node.spend("closed", "acme").allowed);
    let list = top(&node, "");
    assert_eq!(list["servers"], 1);
    let hint = list["hint"].as_str().unwrap();
    assert!(
        hint.starts_with("requests of other servers are missing: "),
        "{hint}"
    );
    assert_eq!(
        list["total"],
        json!({"requests": 3, "denied": 1, "cost": 3})
    );
    let open = top(&node, "?rule=open");
    assert_eq!(
        open["rows"],
        json!([{"key": ["acme"], "estimate": 2, "error": 0}])
    );
    publish(&node, MINUTE_MS);
    let metrics = node.limiter.exposition();
    let failed = "tidegate_top_publications_total{result=\"failed\"} 1";
    assert!(metrics.contains(failed), "{metrics}");
}

#[test]
fn hashed_keys_are_hashed_in_redis_too_and_merge() {
    let redis = RedisServer::start();
    let mask = KeyMask::hashed(b"secret");
    let [a, b] = [(); 2].map(|()| start(&redis, &mask));
    a.spend("local", "acme-corporation");
    b.spend("local", "acme-corporation");
    publish(&b, MINUTE_MS);
    publish(&a, MINUTE_MS);
    let row = json!({"key": [mask.value("acme-corporation")], "estimate": 2, "error": 0});
    assert_eq!(top(&a, "?rule=local")["rows"], json!([row]));
    assert_eq!(requests_of(&history(&a, "acme-corporation")), 2);
    // The script returns three values for each server: whether there are hashes, whether there is a
    // plain key, and the hours until the counts expire.
    let script = "local found = {}
for _, key in ipairs(redis.call('KEYS', 'test#top:*')) do
  local slices, ttl = table.concat(redis.call('HVALS', key)), redis.call('TTL', key)
  local function has(text) return tostring(slices:find(text, 1, true) ~= nil) end
  table.insert(found, has('hash:') .. ' ' .. has('acme') .. ' ' .. tostring(math.ceil(ttl / 3600)))
end
return table.concat(found, ', ')";
    let found = redis.ask(&["EVAL", script, "0"]);
    assert_eq!(found, "true false 26, true false 26");
}
