//! Tests of blocks by entries on servers that share a Redis.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tidegate_core::{EntryBlock, EntryBlockTarget, Source};

use crate::{
    listeners,
    node::Node,
    support::{RedisCluster, RedisServer, eventually},
};

const RULE: &str = "local";

fn target(user: &str) -> EntryBlockTarget {
    EntryBlockTarget::new(None, &[("user", user)]).unwrap()
}

fn set(node: &Node, user: &str) -> Option<EntryBlock> {
    let block = EntryBlock {
        until: None,
        reason: "a test".into(),
    };
    let target = target(user);
    node.run(node.limiter.set_entry_block(&target, block))
        .unwrap()
}

fn remove(node: &Node, user: &str) -> bool {
    let target = target(user);
    let removed = node.run(node.limiter.remove_entry_block(&target));
    removed.unwrap().is_some()
}

/// Starts following changes, as a running server does.
fn follow(node: &Node) {
    let limiter = Arc::clone(&node.limiter);
    node.spawn(async move { limiter.sync_overrides().await });
}

fn is_blocked(node: &Node, user: &str) -> bool {
    let answer = node.spend(RULE, user);
    answer.reason == Some("blocked")
}

fn agree(nodes: &[&Node], user: &str, blocked: bool) {
    for node in nodes {
        eventually(&format!("{user} is blocked: {blocked}"), || {
            (is_blocked(node, user) == blocked).then_some(())
        });
    }
}

fn test_fleet(a: &Node, b: &Node) {
    for node in [a, b] {
        follow(node);
    }
    assert!(!is_blocked(a, "203.0.113.9"));
    assert!(set(a, "203.0.113.0/24").is_none());
    // The server that has set the block enforces it immediately, without a call to Redis.
    let answer = a.spend(RULE, "203.0.113.9");
    assert_eq!(
        (answer.reason, answer.source),
        (Some("blocked"), Source::Cache)
    );
    agree(&[b], "203.0.113.9", true);
    for node in [a, b] {
        let block = node.limiter.entry_blocks().get(&target("203.0.113.0/24"));
        assert_eq!(&*block.unwrap().reason, "a test");
    }
    assert!(!is_blocked(b, "203.0.114.9"));
    assert!(set(b, "203.0.113.0/24").is_some(), "replaced");
    assert!(remove(b, "203.0.113.0/24"));
    assert!(!remove(b, "203.0.113.0/24"), "only once");
    agree(&[a, b], "203.0.113.9", false);
}

/// Neither server reads the changes of the other server before its own change.
#[test]
fn a_change_returns_what_another_server_has_just_set() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    nodes.iter().for_each(|node| node.until_up(true));
    assert!(set(a, "203.0.113.0/24").is_none());
    let replaced = set(b, "203.0.113.0/24");
    assert_eq!(&*replaced.unwrap().reason, "a test");
    assert!(remove(a, "203.0.113.0/24"));
    assert!(set(b, "203.0.113.0/24").is_none());
}

#[test]
fn a_block_takes_effect_on_all_servers() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    nodes.iter().for_each(|node| node.until_up(true));
    test_fleet(&nodes[0], &nodes[1]);
}

#[test]
fn a_block_takes_effect_on_all_servers_of_a_cluster() {
    let cluster = RedisCluster::start();
    let nodes = [(); 2].map(|()| Node::on_cluster(&cluster.url()));
    for node in &nodes {
        eventually("the nodes of the cluster are connected", || {
            let health = node.limiter.redis_store().unwrap().stats().health;
            (health.up >= 3 && health.unserved_slots == 0).then_some(())
        });
    }
    test_fleet(&nodes[0], &nodes[1]);
}

#[test]
fn a_new_server_reads_the_blocks_and_enforces_them_during_an_outage() {
    let redis = RedisServer::start();
    let (a, b) = (Node::start(&redis.url()), Node::start(&redis.url()));
    a.until_up(true);
    set(&a, "203.0.113.0/24");
    b.run(b.limiter.read_overrides_at_start(Duration::from_secs(10)));
    assert!(is_blocked(&b, "203.0.113.9"));
    drop(redis);
    b.until_up(false);
    assert!(is_blocked(&b, "203.0.113.9"));
    let target = target("203.0.113.0/24");
    let removed = b.run(b.limiter.remove_entry_block(&target));
    assert!(removed.is_err(), "Redis is unreachable");
    assert!(is_blocked(&b, "203.0.113.9"));
}

#[test]
fn every_listener_enforces_a_block() {
    let redis = RedisServer::start();
    let (remote, local) = (Node::start(&redis.url()), Node::in_memory());
    remote.until_up(true);
    for node in [&remote, &local] {
        set(node, "203.0.113.0/24");
        let (http, resp, admin) = (node.open_http(), node.open_resp(), node.open_admin());
        // No rule applies to the second path.
        for (path, rule, reply) in [
            ("/local", "local".into(), "$5\r\nlocal\r\n"),
            ("/none", Value::Null, "$-1\r\n"),
        ] {
            let body = json!({"entries": {"path": path, "user": "203.0.113.9"}}).to_string();
            let (status, verdict) = listeners::json(http, "POST", "/v1/check", &body);
            assert_eq!(status, 429, "{verdict}");
            assert_eq!(
                (&verdict["reason"], &verdict["rule"]),
                (&"blocked".into(), &rule)
            );
            let command = format!("TIDEGATE.CHECK path {path} user 203.0.113.9\r\n");
            let answer = listeners::converse(resp, &command);
            let expected = format!("*6\r\n:0\r\n{reply}:-1\r\n:-1\r\n:-1\r\n");
            assert!(answer.starts_with(&expected), "{answer:?}");
            let (_, explained) = listeners::json(admin, "POST", "/v1/explain", &body);
            assert_eq!(explained["reason"], "blocked", "{explained}");
            assert_eq!(explained["block"]["reason"], "a test", "{explained}");
        }
    }
}

/// No limit applies to a blocked request without rules, so Redis is not queried for the state of
/// limits.
#[test]
fn a_blocked_request_without_rules_is_explained_without_redis() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    set(&node, "203.0.113.0/24");
    drop(redis);
    node.until_up(false);
    let failures = || node.limiter.redis_store().unwrap().stats().failures;
    let before = failures();
    let body = r#"{"entries": {"path": "/none", "user": "203.0.113.9"}}"#;
    let (status, explained) = listeners::json(node.open_admin(), "POST", "/v1/explain", body);
    assert_eq!((status, &explained["reason"]), (200, &"blocked".into()));
    assert_eq!(failures(), before);
}

/// The same requests have the same verdicts with the memory store and with Redis.
#[test]
fn the_verdicts_of_memory_and_redis_are_equal() {
    let redis = RedisServer::start();
    let (remote, local) = (Node::start(&redis.url()), Node::in_memory());
    remote.until_up(true);
    let users = ["203.0.113.9", "203.0.114.9", "alice", "bob"];
    let answers = |node: &Node| {
        let answers = users.map(|user| node.spend(RULE, user));
        answers.map(|answer| (answer.allowed, answer.reason, answer.remaining))
    };
    for blocked in ["203.0.113.0/24", "alice", "203.0.112.0/22"] {
        for node in [&remote, &local] {
            set(node, blocked);
        }
        assert_eq!(answers(&remote), answers(&local), "{blocked}");
    }
    for lifted in ["203.0.112.0/22", "203.0.113.0/24", "alice"] {
        for node in [&remote, &local] {
            assert!(remove(node, lifted));
        }
        assert_eq!(answers(&remote), answers(&local), "{lifted}");
    }
}
