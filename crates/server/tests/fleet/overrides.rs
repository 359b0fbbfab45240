//! Tests of overrides on servers that share a Redis.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;
use tidegate_config::Config;
use tidegate_core::{Override, OverrideTarget, Replacement};
use tidegate_limiter::overrides::ChangeOverrideError;
use tidegate_redis::OverridePutResult;

use crate::{
    listeners::json,
    node::Node,
    support::{RedisCluster, RedisServer, eventually},
};

const RULE: &str = "local";

fn set(node: &Node, target: &str, limit: &str) -> Option<Override> {
    try_set(node, target, limit).unwrap()
}

fn try_set(
    node: &Node,
    target: &str,
    limit: &str,
) -> Result<Option<Override>, ChangeOverrideError> {
    let rules = node.limiter.rules();
    let rule = rules.rule(RULE).unwrap();
    let new = Override {
        replacement: Replacement::Limits(Box::new([limit.into()])),
        until: None,
        reason: "a test".into(),
    };
    let target = OverrideTarget::of(&[target]);
    let set = node.limiter.set_override(rule, &target, new);
    node.run(set)
}

fn remove(node: &Node, target: &str) -> bool {
    let target = OverrideTarget::of(&[target]);
    node.run(node.limiter.remove_override(RULE, &target))
        .unwrap()
        .is_some()
}

/// Starts following override changes, as a running server does.
fn follow(node: &Node) {
    let limiter = Arc::clone(&node.limiter);
    node.spawn(async move { limiter.sync_overrides().await });
}

/// Formats a node's overrides.
fn shown(node: &Node) -> Vec<String> {
    let rules = node.limiter.rules();
    let rule = rules.rule(RULE).unwrap();
    let page = rules
        .overrides(rule)
        .unwrap()
        .page(None, 1_000, node.limiter.now(), |_, _| true);
    let shown = page.into_iter().map(|(target, found)| {
        format!(
            "{} {}",
            target.values().collect::<String>(),
            found.replacement
        )
    });
    shown.collect()
}

fn agree(nodes: &[&Node], expected: &[&str]) {
    for node in nodes {
        eventually(&format!("{expected:?}"), || {
            (shown(node) == expected).then_some(())
        });
    }
}

/// Sends 100 requests by `user`, and returns the number of admitted requests.
fn admitted(node: &Node, user: &str) -> usize {
    node.admitted(RULE, user, 100)
}

fn test_fleet(a: &Node, b: &Node) {
    for node in [a, b] {
        follow(node);
    }
    assert_eq!(admitted(a, "alice"), 10);
    assert!(!b.spend(RULE, "alice").allowed);
    assert!(set(a, "alice", "15/h").is_none());
    // The server that has set the override applies it immediately.
    assert_eq!(shown(a), ["alice 15/h"]);
    agree(&[b], &["alice 15/h"]);
    // The server no longer uses its cached denial. The previous charges still count.
    assert_eq!(admitted(b, "alice"), 5);
    assert!(set(b, "al*", "20/h").is_none());
    assert!(set(b, "alice", "12/h").is_some());
    agree(&[a, b], &["alice 12/h", "al* 20/h"]);
    assert!(remove(a, "alice"));
    assert!(!remove(a, "alice"), "only once");
    agree(&[a, b], &["al* 20/h"]);
    assert_eq!(admitted(a, "alice"), 5, "15 of 20 were spent");
    assert!(remove(b, "al*"));
    agree(&[a, b], &[]);
    assert!(!b.spend(RULE, "alice").allowed);
}

/// Stores overrides with the limit `20/h` for `count` users in Redis.
fn store_many(node: &Node, count: usize) {
    let store = node.limiter.redis_store().unwrap().store();
    for number in 0..count {
        let user = format!("user-{number}");
        let id = [RULE.as_bytes(), b"\xFFk\xFF", user.as_bytes()].concat();
        let document = format!(r#"{{"rule":"{RULE}","key":["{user}"],"limits":["20/h"]}}"#);
        let put = store.put_override(id, document.into_bytes(), None);
        assert_eq!(node.run(put).unwrap(), OverridePutResult::Set(None));
    }
}

/// Neither server reads the changes of the other server before its own change.
#[test]
fn a_change_returns_what_another_server_has_just_set() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    nodes.iter().for_each(|node| node.until_up(true));
    let set = |node, limit| set(node, "alice", limit).map(|found| found.replacement.to_string());
    assert_eq!(set(a, "15/h"), None);
    assert_eq!(set(b, "12/h"), Some("15/h".to_owned()));
    assert_eq!(set(a, "20/h"), Some("12/h".to_owned()));
    assert!(remove(b, "alice"));
    assert_eq!(set(a, "15/h"), None);
}

/// `scripts/overrides/run` measures the same with a million overrides.
#[test]
fn a_change_takes_effect_on_all_servers_among_many_overrides() {
    const COUNT: usize = 10_000;
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    nodes.iter().for_each(|node| node.until_up(true));
    store_many(a, COUNT);
    for node in [a, b] {
        follow(node);
        eventually("the server has all overrides", || {
            (node.limiter.overrides().len() == COUNT).then_some(())
        });
    }
    assert_eq!(admitted(b, "user-7"), 20);
    set(a, "user-7", "35/h");
    assert!(remove(a, "user-8"));
    set(a, "another", "12/h");
    let decides = |user: &str, limit: usize| {
        let rules = b.limiter.rules();
        let (rule, now) = (rules.rule(RULE).unwrap(), b.limiter.now());
        let limits = rules.limits_of_key(rule, &b.key(RULE, user), None, now);
        let policies: Vec<_> = limits
            .iter()
            .map(|limit| limit.policy().to_string())
            .collect();
        policies == [format!("{limit}/h")]
    };
    eventually("the other server applies the changes", || {
        (decides("user-7", 35) && decides("user-8", 10) && decides("another", 12)).then_some(())
    });
    assert_eq!(admitted(b, "user-7"), 15, "20 of 35 were spent");
    assert_eq!(admitted(b, "user-8"), 10);
    assert_eq!(admitted(b, "another"), 12);
    assert_eq!(admitted(b, "user-9"), 20);
    assert_eq!(b.limiter.overrides().len(), COUNT);
}

/// A change is confirmed only after Redis has written it to disk, so a crash of Redis loses no
/// confirmed change. A change that is reported as failed may have been made.
#[test]
fn no_confirmed_change_is_lost_while_redis_restarts_with_persistence() {
    const CRASHES: usize = 3;
    // There are so many users that most changes before a crash are not repeated after it.
    const USERS: usize = 1_000;
    let mut redis = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    for node in [a, b] {
        node.until_up(true);
        follow(node);
    }
    let (confirmed, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let increases = |counter: &AtomicUsize, by: usize| {
        let before = counter.load(Ordering::Relaxed);
        eventually("changes are made", || {
            (counter.load(Ordering::Relaxed) >= before + by).then_some(())
        });
    };
    // For each user, the states that are permitted at the end: the last confirmed state, and the
    // states of later changes that failed.
    let mut permitted: HashMap<usize, Vec<Option<String>>> = HashMap::new();
    thread::scope(|scope| {
        let crashes = scope.spawn(|| {
            for _ in 0..CRASHES {
                increases(&confirmed, 200);
                redis.kill();
                increases(&failed, 1);
                redis.restart();
            }
            increases(&confirmed, 1);
        });
        for number in 0.. {
            if crashes.is_finished() {
                break;
            }
            let (node, user) = (&nodes[number % 2], number % USERS);
            let name = format!("user-{user:03}");
            let limit = (number % 7 > 0).then(|| format!("{}/h", number + 1));
            let changed = match &limit {
                Some(limit) => try_set(node, &name, limit).map(drop),
                None => {
                    let target = OverrideTarget::of(&[&name]);
                    node.run(node.limiter.remove_override(RULE, &target))
                        .map(drop)
                }
            };
            let state = limit.map(|limit| format!("{name} {limit}"));
            // At first, the user has no override.
            let states = permitted.entry(user).or_insert_with(|| vec![None]);
            if changed.is_ok() {
                states.clear();
                confirmed.fetch_add(1, Ordering::Relaxed);
            } else {
                failed.fetch_add(1, Ordering::Relaxed);
            }
            states.push(state);
        }
    });
    eventually("the servers agree with Redis and with each other", || {
        let overrides = shown(a);
        let state_of = |user: usize| {
            let name = format!("user-{user:03} ");
            let mut own = overrides.iter().filter(|state| state.starts_with(&name));
            own.next().cloned()
        };
        let is_permitted = permitted
            .iter()
            .all(|(user, states)| states.contains(&state_of(*user)));
        (is_permitted && shown(b) == overrides).then_some(())
    });
}

#[test]
fn a_server_reads_the_overrides_before_it_starts() {
    let redis = RedisServer::start();
    let (a, b) = (Node::start(&redis.url()), Node::start(&redis.url()));
    a.until_up(true);
    set(&a, "alice", "15/h");
    let patience = Duration::from_secs(10);
    b.run(b.limiter.read_overrides_at_start(patience));
    assert_eq!(shown(&b), ["alice 15/h"]);
}

#[test]
fn a_server_starts_without_overrides_if_redis_does_not_reply() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    drop(redis);
    let patience = Duration::from_millis(50);
    node.run(node.limiter.read_overrides_at_start(patience));
    assert!(shown(&node).is_empty());
}

#[test]
fn a_change_takes_effect_on_all_servers() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    nodes.iter().for_each(|node| node.until_up(true));
    test_fleet(&nodes[0], &nodes[1]);
}

#[test]
fn a_change_takes_effect_on_all_servers_of_a_cluster() {
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
fn a_new_server_reads_all_overrides_and_a_removal_is_not_missed() {
    let redis = RedisServer::start();
    let first = Node::start(&redis.url());
    first.until_up(true);
    // There are more overrides than one call can read.
    for number in 0..1_201 {
        set(&first, &format!("user-{number:04}"), "20/h");
    }
    for number in 0..1_200 {
        assert!(remove(&first, &format!("user-{number:04}")));
    }
    set(&first, "bob", "30/h");
    let second = Node::start(&redis.url());
    second.until_up(true);
    follow(&second);
    agree(&[&first, &second], &["bob 30/h", "user-1200 20/h"]);
}

#[test]
fn the_servers_follow_a_redis_that_has_lost_its_data() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    for node in [a, b] {
        node.until_up(true);
        follow(node);
    }
    set(a, "alice", "15/h");
    agree(&[a, b], &["alice 15/h"]);
    redis.ask(&["FLUSHALL"]);
    agree(&[a, b], &[]);
    set(b, "bob", "30/h");
    agree(&[a, b], &["bob 30/h"]);
}

/// A failover loses the last changes, and Redis makes another change before the servers read the
/// changes again. Some servers have applied a lost change, and others have not.
#[test]
fn the_servers_agree_after_a_failover_that_has_lost_changes() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = &nodes;
    for node in [a, b] {
        node.until_up(true);
    }
    set(a, "alice", "15/h");
    let eval = |script: &str| redis.ask(&["EVAL", script, "0"]);
    // The replica has only the first change.
    eval(
        "for _, key in ipairs(redis.call('KEYS', '*#{overrides}*')) do \
           redis.call('COPY', key, 'replica:' .. key) \
         end",
    );
    set(a, "alice", "99/h");
    set(a, "lost", "20/h");
    assert_eq!(shown(a), ["alice 99/h", "lost 20/h"]);
    eval(
        "for _, key in ipairs(redis.call('KEYS', 'replica:*')) do \
           redis.call('COPY', key, string.sub(key, 9), 'REPLACE') \
         end",
    );
    set(b, "bob", "30/h");
    assert_eq!(shown(b), ["alice 15/h", "bob 30/h"]);
    follow(a);
    agree(&[a, b], &["alice 15/h", "bob 30/h"]);
}

#[test]
fn overrides_stay_in_effect_while_redis_is_down() {
    let mut redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    follow(&node);
    set(&node, "alice", "40/h");
    redis.kill();
    node.until_up(false);
    // This server's local share is half of the override's limit.
    assert_eq!(admitted(&node, "alice"), 20);
    let rules = node.limiter.rules();
    let target = OverrideTarget::of(&["bob"]);
    let new = Override {
        replacement: Replacement::Factor("2x".parse().unwrap()),
        until: None,
        reason: "".into(),
    };
    let rule = rules.rule(RULE).unwrap();
    let refused = node.run(node.limiter.set_override(rule, &target, new));
    assert!(refused.is_err(), "a change needs Redis");
    assert_eq!(shown(&node), ["alice 40/h"]);
}

/// Redis keeps only a list of the latest removals. A server that starts later must nevertheless
/// read all overrides, even overrides that are older than the removals that Redis has discarded.
#[test]
fn a_new_server_reads_all_overrides_after_many_removals() {
    let redis = RedisServer::start();
    let first = Node::start(&redis.url());
    first.until_up(true);
    let store = first.limiter.redis_store().unwrap().store();
    let id = |number: usize| {
        let key = format!("user-{number}");
        [RULE.as_bytes(), b"\xFFk\xFF", key.as_bytes()].concat()
    };
    let document = |number: usize| {
        let document = format!(r#"{{"rule":"{RULE}","key":["user-{number}"],"limits":["20/h"]}}"#);
        document.into_bytes()
    };
    const KEPT: usize = 600;
    const REMOVED: usize = 10_100;
    first.run(async {
        for number in 0..KEPT + REMOVED {
            let put = store.put_override(id(number), document(number), None);
            assert_eq!(put.await.unwrap(), OverridePutResult::Set(None));
        }
        for number in KEPT..KEPT + REMOVED {
            let removed = store.drop_override(id(number)).await.unwrap();
            assert_eq!(removed, Some(document(number)));
        }
    });
    let second = Node::start(&redis.url());
    second.until_up(true);
    follow(&second);
    eventually("the new server has all overrides", || {
        (second.limiter.overrides().len() == KEPT).then_some(())
    });
    set(&second, "user-7", "30/h");
    assert_eq!(second.limiter.overrides().len(), KEPT);
}

/// The second server has not read the change of the first server when it sets a factor.
#[test]
fn a_factor_after_a_plan_of_another_server_says_what_it_multiplies() {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let rules = "{plans: {pro: {local: 100/h}}, rules: [{name: local, key: user, limits: 10/h}]}";
    for node in &nodes {
        node.until_up(true);
        node.limiter.swap_rules(Config::parse(rules).unwrap().rules);
    }
    let put = |node: &Node, body| {
        let answer = json(node.open_admin(), "PUT", "/v1/overrides/local/alice", body);
        assert_eq!(answer.0, 200, "{answer:?}");
        answer.1["hint"].clone()
    };
    let [a, b] = &nodes;
    assert_eq!(put(a, r#"{"plan": "pro"}"#), Value::Null);
    let hint = put(b, r#"{"limits": "2x"}"#);
    let expected =
        "an override selected plan pro until now; the factor does not multiply its limits (100/h)";
    assert!(
        hint.as_str().unwrap_or_default().starts_with(expected),
        "{hint}"
    );
}

#[test]
fn ended_overrides_are_removed_from_redis_and_from_all_servers() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    follow(&node);
    let ends = tidegate_core::Timestamp::from_micros(1_000);
    let store = node.limiter.redis_store().unwrap().store();
    let document = br#"{"rule":"local","key":["alice"],"limits":["20/h"]}"#;
    let put = store.put_override(
        b"local\xFFk\xFFalice".to_vec(),
        document.to_vec(),
        Some(ends),
    );
    assert_eq!(node.run(put).unwrap(), OverridePutResult::Set(None));
    agree(&[&node], &["alice 20/h"]);
    let later = tidegate_core::Timestamp::from_micros(2_000);
    assert!(
        !node.run(store.sweep_overrides(later)).unwrap(),
        "all were removed"
    );
    agree(&[&node], &[]);
}
