//! Tests of the state that nodes share: counters, blocks, and resets by the operator.

use tidegate_config::Config;
use tidegate_core::{BlockNote, FallbackShare, RuleSet, Source, Span, bounds};
use tidegate_limiter::blocks::{BlockedKey, InactiveBlocks};
use tidegate_redis::{FallbackSettings, NodeShare};

use crate::{
    listeners::json,
    node::{Answer, Node, RULES},
    support::RedisServer,
};

fn two() -> (RedisServer, Node, Node) {
    let redis = RedisServer::start();
    let (a, b) = (Node::start(&redis.url()), Node::start(&redis.url()));
    for node in [&a, &b] {
        node.until_up(true);
    }
    (redis, a, b)
}

#[test]
fn nodes_share_one_limit_of_ten() {
    let (_redis, a, b) = two();
    assert_eq!(
        a.spend("local", "u"),
        Answer {
            allowed: true,
            reason: None,
            exactness: "exact",
            source: Source::Redis,
            remaining: Some(9),
        }
    );
    assert_eq!(b.spend("local", "u").remaining, Some(8));
    assert_eq!(a.admitted("local", "u", 5) + b.admitted("local", "u", 5), 8);
    assert_eq!(b.admitted("local", "another", 12), 10);
}

#[test]
fn clock_skew_between_nodes_does_not_raise_the_limit() {
    let (_redis, a, b) = two();
    b.at_millis(5 * 60_000);
    let admitted = (0..6).map(|_| {
        usize::from(a.spend("local", "u").allowed) + usize::from(b.spend("local", "u").allowed)
    });
    assert_eq!(admitted.sum::<usize>(), 10);
    let early = Node::start(&_redis.url());
    early.until_up(true);
    assert_eq!(early.admitted("local", "u", 3), 0);
}

#[test]
fn cached_denials_query_redis_once_per_ttl() {
    let (redis, a, _b) = two();
    assert_eq!(a.admitted("local", "u", 11), 10);
    let calls = || {
        redis
            .ask(&["INFO", "commandstats"])
            .lines()
            .filter(|line| line.contains("cmdstat_eval"))
            .map(calls)
            .sum::<u64>()
    };
    let before = calls();
    a.at_millis(999);
    for _ in 0..100 {
        assert_eq!(a.spend("local", "u").source, Source::Cache);
    }
    assert_eq!(calls(), before);
    a.at_millis(1_000);
    assert_eq!(a.spend("local", "u").source, Source::Redis);
    assert_eq!(a.spend("local", "u").source, Source::Cache);
    assert_eq!(calls(), before + 1);
}

/// Parses the number of calls in `cmdstat_evalsha:calls=12,usec=…`.
fn calls(line: &str) -> u64 {
    let calls = line
        .split("calls=")
        .nth(1)
        .and_then(|rest| rest.split(',').next());
    calls.unwrap().parse().unwrap()
}

#[test]
fn a_cached_denial_has_the_remaining_wait() {
    let (_redis, a, _b) = two();
    assert_eq!(a.admitted("local", "u", 11), 10);
    let denied = a.spend("local", "u");
    assert_eq!(
        (denied.allowed, denied.reason, denied.exactness),
        (false, Some("limit"), "exact")
    );
    assert_eq!((denied.source, denied.remaining), (Source::Cache, Some(0)));
}

#[test]
fn setting_and_lifting_a_block_takes_effect_on_all_nodes_at_once() {
    let (_redis, a, b) = two();
    let key = a.key("local", "u");
    assert!(a.spend("local", "u").allowed && b.spend("local", "u").allowed);
    let minute = Some(Span::from_secs(60));
    assert_eq!(a.run(a.limiter.block(&key, minute, "abuse")), Ok(true));
    for node in [&a, &b] {
        assert_eq!(node.spend("local", "u").reason, Some("blocked"));
        let block = node.run(node.limiter.block_on(&key)).unwrap().unwrap();
        assert_eq!(block.reason, "abuse");
        assert_eq!(node.run(node.limiter.blocks()).unwrap(), [block]);
    }
    assert_eq!(b.run(b.limiter.unblock(&key)), Ok(true));
    for node in [&a, &b] {
        assert!(node.spend("local", "u").allowed);
        assert_eq!(node.run(node.limiter.blocks()).unwrap(), []);
    }
    assert_eq!(b.run(b.limiter.unblock(&key)), Ok(false));
}

/// The node's clock is years behind the Redis clock, which determines when a block ends.
#[test]
fn a_block_can_be_repeated_whatever_the_clock_of_the_node_is() {
    let (_redis, a, b) = two();
    let path = "/v1/blocks/local/u";
    let put = |node: &Node, body: &str| json(node.open_admin(), "PUT", path, body).0;
    for node in [&a, &b, &a] {
        assert_eq!(put(node, r#"{"for": "1h"}"#), 200);
    }
    assert_eq!(put(&b, r#"{"for": "10min"}"#), 409);
    assert_eq!(put(&b, r#"{"for": "10min", "shorten": true}"#), 200);
    assert_eq!(put(&a, r#"{"for": "10min"}"#), 200);
    assert_eq!(put(&a, r#"{"for": "forever"}"#), 200);
    assert_eq!(put(&b, r#"{"for": "1h"}"#), 409);
}

/// The node's clock is years behind the Redis clock, which determines when a block ends.
#[test]
fn the_time_left_of_a_block_is_by_the_clock_of_redis() {
    let (_redis, node, _) = two();
    let (blocks, admin) = ("/v1/blocks", node.open_admin());
    let path = format!("{blocks}/local/u");
    let is_left = |document: &serde_json::Value| {
        let left = document["left_ms"].as_u64().unwrap();
        assert!((1..=3_600_000).contains(&left), "{document}");
    };
    is_left(&json(admin, "PUT", &path, r#"{"for": "1h"}"#).1);
    is_left(&json(admin, "GET", &path, "").1);
    is_left(&json(admin, "GET", blocks, "").1["blocks"][0]);
    let key = json(admin, "GET", "/v1/keys/local/u", "").1;
    is_left(&key["block"]);
    let retry = key["limits"][0]["retry_after_ms"].as_u64().unwrap();
    assert!(retry <= 3_600_000, "{key}");
    let replaced = json(admin, "PUT", &path, r#"{"for": "2h"}"#).1;
    is_left(&replaced["replaced"]);
}

/// The call reports whether the block was set in Redis, even if the local copy of the block was not
/// stored.
#[test]
fn a_block_whose_local_copy_does_not_fit_is_set() {
    let (_redis, a, b) = two();
    for copy in 0..bounds::MAX_BLOCKS {
        let key = copy.to_le_bytes();
        assert!(
            a.limiter
                .local_store()
                .block(&key, None, "", a.limiter.now())
        );
    }
    let key = a.key("local", "u");
    assert_eq!(a.run(a.limiter.block(&key, None, "abuse")), Ok(true));
    for node in [&a, &b] {
        assert_eq!(node.spend("local", "u").reason, Some("blocked"));
        assert_eq!(node.run(node.limiter.blocks()).unwrap().len(), 1);
    }
}

/// Blocks the key `u` of the rule `local`. The block contains the name of the rule.
fn block_local(node: &Node) {
    let key = node.key("local", "u");
    let rule = node.limiter.rules().rule("local").unwrap().blocked_rule();
    let note = BlockNote {
        reason: "abuse",
        rule: Some(&rule),
    };
    assert_eq!(node.run(node.limiter.block(&key, None, note)), Ok(true));
}

/// Redis stores the rule's name, so every node can show it even after the rule is removed.
#[test]
fn blocks_of_a_removed_rule_are_counted_by_its_name() {
    let (_redis, a, b) = two();
    block_local(&a);
    assert_eq!(
        b.run(b.limiter.inactive_blocks()),
        Ok(InactiveBlocks::default())
    );
    b.limiter.swap_rules(RuleSet::default());
    let inactive = b.run(b.limiter.inactive_blocks()).unwrap();
    assert_eq!(
        inactive.0.into_iter().collect::<Vec<_>>(),
        [(Some("local".to_owned()), 1)]
    );
}

/// Redis also stores the names of the key entries. Without the names, a block on an address could
/// be shown as a block on a user.
#[test]
fn blocks_of_a_rule_with_another_key_are_counted() {
    let (_redis, a, b) = two();
    block_local(&a);
    let rules = RULES.replace("key: [user]", "key: [ip]");
    b.limiter.swap_rules(Config::parse(&rules).unwrap().rules);
    let inactive = b.run(b.limiter.inactive_blocks()).unwrap();
    assert_eq!(
        inactive.0.into_iter().collect::<Vec<_>>(),
        [(Some("local".to_owned()), 1)]
    );
    let blocks = b.run(b.limiter.blocks()).unwrap();
    let rules = b.limiter.rules();
    let shown = BlockedKey::of(&blocks[0], &rules);
    assert_eq!(
        (shown.values, shown.inactive),
        (Some(vec!["u"]), Some("rule has another key now"))
    );
}

#[test]
fn a_reset_takes_effect_locally_at_once_and_elsewhere_within_the_ttl() {
    let (_redis, a, b) = two();
    let key = a.key("local", "u");
    assert_eq!(
        a.admitted("local", "u", 11) + b.admitted("local", "u", 2),
        10
    );
    assert_eq!(a.run(a.limiter.reset(&key)), Ok(true));
    assert!(a.spend("local", "u").allowed);
    assert_eq!(b.spend("local", "u").source, Source::Cache);
    b.at_millis(1_000);
    assert!(b.spend("local", "u").allowed);
    assert_eq!(b.run(b.limiter.reset(&key)), Ok(true));
    assert_eq!(b.run(b.limiter.reset(&key)), Ok(false));
}

#[test]
fn without_a_ttl_no_denial_is_cached() {
    let redis = RedisServer::start();
    let settings = FallbackSettings {
        denial_ttl: Span::ZERO,
        share: NodeShare::Fixed(FallbackShare::default()),
        ..FallbackSettings::default()
    };
    let node = Node::with(&redis.url(), settings);
    node.until_up(true);
    assert_eq!(node.admitted("local", "u", 11), 10);
    assert_eq!(node.spend("local", "u").source, Source::Redis);
}
