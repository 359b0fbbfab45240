//! Tests that each rule's fallback policy is applied and reported while Redis is unreachable, and
//! that a server admits no more requests than the policy allows.

use serde_json::json as value;
use tidegate_core::{FallbackShare, Source};
use tidegate_redis::{FallbackSettings, NodeShare};

use crate::{
    listeners::json,
    node::{Answer, Node},
    support::{RedisServer, eventually, reserve_port},
};

#[test]
fn a_node_starts_without_redis_and_is_exact_when_redis_comes() {
    let port = reserve_port();
    let node = Node::start(&format!("redis://127.0.0.1:{port}"));
    node.until_up(false);
    assert_eq!(node.spend("local", "u").source, Source::Local);
    let _redis = RedisServer::start_on(port, &[]);
    node.until_up(true);
    assert_eq!(node.spend("local", "u").source, Source::Redis);
}

#[test]
fn every_rule_has_its_own_failure_policy() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    let answer = |allowed, reason, exactness, source, remaining| Answer {
        allowed,
        reason,
        exactness,
        source,
        remaining,
    };
    assert_eq!(
        node.spend("open", "u"),
        answer(true, None, "none", Source::Policy, None)
    );
    assert_eq!(
        node.spend("closed", "u"),
        answer(false, Some("store"), "none", Source::Policy, None)
    );
    assert_eq!(
        node.spend("shadow", "u"),
        answer(true, None, "none", Source::Policy, None)
    );
    assert_eq!(
        node.spend("local", "u"),
        answer(true, None, "local", Source::Local, Some(4))
    );
    // By default, the local share is half of the limit of ten, and one request was admitted before
    // the outage.
    assert_eq!(node.admitted("local", "u", 20), 4);
    assert_eq!(node.admitted("open", "u", 20), 20);
    assert_eq!(node.admitted("local_shadow", "u", 20), 20);
}

/// If Redis is unreachable and the fallback policy denies a request, no rule's denial counter is
/// incremented.
#[test]
fn a_denial_by_the_failure_policy_is_counted_for_no_rule() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    let check = r#"{"entries": {"path": "/closed", "user": "u"}}"#;
    assert_eq!(json(node.open_http(), "POST", "/v1/check", check).0, 503);
    let metrics = node.limiter.exposition();
    let has = |line: &str| metrics.lines().any(|found| found == line);
    assert!(
        has(r#"tidegate_decisions_total{listener="http",outcome="store"} 1"#),
        "{metrics}"
    );
    let series = r#"tidegate_rule_decisions_total{rule="closed",outcome="#;
    assert!(has(&format!(r#"{series}"limit"}} 0"#)), "{metrics}");
    assert!(
        !metrics.contains(&format!(r#"{series}"store"}}"#)),
        "{metrics}"
    );
}

/// The listed denial contains the rule that failed closed, and the reason.
#[test]
fn a_denial_by_the_failure_policy_is_listed_with_its_rule_and_counted_in_top() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    assert!(!node.spend("closed", "u").allowed);
    assert!(node.spend("open", "u").allowed);
    let admin = node.open_admin();
    let (status, list) = json(admin, "GET", "/v1/denials", "");
    assert_eq!(status, 200);
    let rows = list["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{list}");
    let row = &rows[0];
    assert_eq!(
        (&row["rule"], &row["key"]),
        (&value!("closed"), &value!(["u"]))
    );
    assert_eq!(
        (&row["reason"], &row["policy"]),
        (&value!("on_failure"), &value!(null))
    );
    assert_eq!(row["entries"], value!({"path": "/closed", "user": "u"}));
    let (_, top) = json(admin, "GET", "/v1/top?rule=closed&by=denied", "");
    assert_eq!(top["total"]["denied"], 1, "{top}");
    assert_eq!(top["rows"][0]["key"], value!(["u"]));
    let (_, top) = json(admin, "GET", "/v1/top?rule=open&by=denied", "");
    assert_eq!(top["total"]["denied"], 0, "{top}");
}

#[test]
fn an_explanation_is_not_counted_in_an_outage_or_without_one() {
    let port = reserve_port();
    let node = Node::start(&format!("redis://127.0.0.1:{port}"));
    let admin = node.open_admin();
    let explain = |rule: &str| {
        let body = format!(r#"{{"entries": {{"path": "/{rule}", "user": "u"}}}}"#);
        let (status, answer) = json(admin, "POST", "/v1/explain", &body);
        assert_eq!(status, 200, "{answer}");
    };
    let decisions = || -> Vec<String> {
        let metrics = node.limiter.exposition();
        let counted = metrics.lines().filter(|line| {
            line.starts_with("tidegate_decisions_by_source_total")
                || line.starts_with("tidegate_decision_duration_seconds_count")
        });
        counted.map(str::to_owned).collect()
    };
    node.until_up(false);
    let before = decisions();
    assert!(!before.is_empty());
    ["local", "open", "closed"].into_iter().for_each(explain);
    assert_eq!(decisions(), before);
    let _redis = RedisServer::start_on(port, &[]);
    node.until_up(true);
    ["local", "open", "closed"].into_iter().for_each(explain);
    assert_eq!(decisions(), before);
}

#[test]
fn an_outage_has_an_event_at_its_start_and_at_its_end() {
    let port = reserve_port();
    let mut redis = RedisServer::start_on(port, &[]);
    let node = Node::start(&format!("redis://127.0.0.1:{port}"));
    node.until_up(true);
    assert_eq!(node.spend("local", "u").source, Source::Redis);
    let outages = || -> Vec<serde_json::Value> {
        let events = node.limiter.events().unwrap().list(None, 100).events;
        let events = events.iter();
        let events = events.map(|event| serde_json::from_str(&event.json).unwrap());
        events
            .filter(|event: &serde_json::Value| {
                event["type"].as_str().unwrap().starts_with("store.")
            })
            .collect()
    };
    assert!(outages().is_empty());
    redis.kill();
    node.until_up(false);
    for _ in 0..3 {
        assert_eq!(node.spend("local", "u").source, Source::Local);
    }
    let lost = outages();
    assert_eq!(lost.len(), 1, "{lost:?}");
    assert_eq!(lost[0]["type"], "store.lost");
    assert!(lost[0]["data"]["problem"].is_string(), "{lost:?}");
    let _redis = RedisServer::start_on(port, &[]);
    node.until_up(true);
    // The node detects the end of the outage even if there are no requests.
    let both = eventually("the end of the outage is an event", || {
        Some(outages()).filter(|both| both.len() == 2)
    });
    assert_eq!(both[1]["type"], "store.recovered");
    assert_eq!(both[1]["data"]["local_decisions"], 3);
    assert!(both[1]["data"]["lasted_ms"].is_u64(), "{both:?}");
}

#[test]
fn requests_admitted_by_redis_count_in_the_fallback() {
    let mut redis = RedisServer::start();
    let quarter = FallbackSettings {
        share: NodeShare::Fixed(FallbackShare::percent(20).unwrap()),
        ..FallbackSettings::default()
    };
    let node = Node::with(&redis.url(), quarter);
    node.until_up(true);
    assert_eq!(node.admitted("local", "spent", 10), 10);
    assert_eq!(node.admitted("local", "fresh", 1), 1);
    redis.kill();
    node.until_up(false);
    assert_eq!(node.admitted("local", "spent", 5), 0);
    assert_eq!(node.admitted("local", "fresh", 5), 1);
    assert_eq!(node.admitted("local", "unseen", 5), 2);
}

/// A node applies its own charges and refunds both in Redis and in its local fallback. If the node
/// refunds another node's charge, the refund is applied only in Redis, so the local share admits no
/// additional requests.
#[test]
fn refunds_in_redis_count_in_the_fallback() {
    let mut redis = RedisServer::start();
    let (node, other) = (Node::start(&redis.url()), Node::start(&redis.url()));
    node.until_up(true);
    other.until_up(true);
    assert_eq!(node.admitted("local", "u", 5), 5);
    for (node, left) in [(&node, 6), (&node, 7), (&other, 8)] {
        assert_eq!(node.refund("local", "u").remaining, Some(left));
    }
    redis.kill();
    node.until_up(false);
    other.until_up(false);
    assert_eq!(
        node.admitted("local", "u", 10),
        2,
        "its share of 5 is used, and 2 are refunded"
    );
    assert_eq!(
        other.admitted("local", "u", 10),
        5,
        "its share and not more"
    );
}

#[test]
fn a_known_block_stays_while_redis_is_unreachable() {
    let mut redis = RedisServer::start();
    let (a, b) = (Node::start(&redis.url()), Node::start(&redis.url()));
    a.until_up(true);
    b.until_up(true);
    let key = a.key("local", "u");
    assert_eq!(a.run(a.limiter.block(&key, None, "abuse")), Ok(true));
    assert_eq!(b.spend("local", "u").reason, Some("blocked"));
    redis.kill();
    for node in [&a, &b] {
        node.until_up(false);
        assert_eq!(node.spend("local", "u").reason, Some("blocked"));
    }
    redis.restart();
    for node in [&a, &b] {
        node.until_up(true);
        assert!(
            node.spend("local", "u").allowed,
            "the block is gone from Redis and from the node"
        );
    }
    redis.kill();
    a.until_up(false);
    assert_ne!(a.spend("local", "u").reason, Some("blocked"));
}

/// The wall clock was set forward by two hours while the old process of an upgrade was running. The
/// fallback counts with the clock of the process, so the new process continues with this clock.
#[test]
fn a_step_of_the_wall_clock_refills_no_limit_of_the_fallback() {
    let url = format!("redis://127.0.0.1:{}", reserve_port());
    let (old, new) = (Node::start(&url), Node::start(&url));
    old.until_up(false);
    new.until_up(false);
    assert_eq!(old.admitted("local", "u", 20), 5);
    new.at_millis(2 * 3_600_000);
    new.limiter.begin_taking_state();
    let taken = old.limiter.send_state(&mut |tag, record| {
        new.limiter.take_state(tag, record).unwrap();
        Ok(())
    });
    taken.unwrap();
    new.limiter.end_taking_state().unwrap();
    assert_eq!(new.limiter.now(), old.limiter.now());
    assert_eq!(new.admitted("local", "u", 20), 0);
}

#[test]
fn a_failed_admin_operation_is_reported() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    let key = node.key("local", "u");
    let refused = node.run(node.limiter.reset(&key)).unwrap_err().to_string();
    assert!(refused.contains("cannot reach Redis"), "{refused}");
}

/// If Redis is reachable but rejects decisions, the server reports the error with a message that
/// says how to fix it.
#[test]
fn a_redis_error_is_shown_for_a_minute() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    node.at_millis(0);
    assert_eq!(node.spend("local", "u").source, Source::Redis);
    let listener = node.open_admin();
    let shown = || json(listener, "GET", "/readyz", "").1["redis"].clone();
    assert_eq!(shown()["state"], "ok");

    redis.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(node.spend("closed", "u").reason, Some("store"));
    let problem = shown()["problem"].as_str().unwrap().to_owned();
    assert!(
        problem.contains("raise the `maxmemory` of Redis"),
        "{problem}"
    );
    redis.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    redis.ask(&["ACL", "SETUSER", "default", "-time"]);
    assert_eq!(node.spend("local", "u").source, Source::Local);
    let problem = shown()["problem"].as_str().unwrap().to_owned();
    assert!(problem.contains("ACL SETUSER"), "{problem}");
    redis.ask(&["ACL", "SETUSER", "default", "+time"]);
    assert_eq!(node.spend("local", "u").source, Source::Redis);
    node.at_millis(60_000);
    assert_eq!(shown()["state"], "ok");
}

#[test]
fn a_reset_repairs_a_key_written_by_another_program() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let key = node.key("local", "u");
    for write in [
        "redis.call('LPUSH', k, 'x')",
        "redis.call('SET', k, 'hello')",
    ] {
        assert_eq!(node.spend("local", "u").source, Source::Redis);
        let script =
            format!("local k = redis.call('KEYS', '*')[1]; redis.call('DEL', k); return {write}");
        redis.ask(&["EVAL", &script, "0"]);
        assert_eq!(node.spend("local", "u").source, Source::Local);
        let refusal = node
            .limiter
            .redis_store()
            .unwrap()
            .last_server_error(node.limiter.now());
        let problem = refusal.unwrap();
        assert!(
            problem.contains("`tidegate reset` deletes the value"),
            "{problem}"
        );
        assert_eq!(node.run(node.limiter.reset(&key)), Ok(true));
    }
    assert_eq!(node.spend("local", "u").source, Source::Redis);
}
