//! Tests of requests waiting for concurrency slots that are in use on other servers.

use std::sync::{Arc, mpsc::Receiver};

use serde_json::json;
use tidegate::{RateLimiter as _, rate_limiter::SlotTurn};
use tidegate_config::Config;
use tidegate_core::{
    Cost, Effect, EntryBlock, EntryBlockTarget, Override, OverrideTarget, Reason, Replacement,
    Request, Scratch, Span, Verdict,
};
use tidegate_limiter::reservations::Reservation;

use crate::{
    node::Node,
    support::{RedisServer, TIMEOUT, eventually},
    top::top,
};

const RULES: &str = "
rules:
  - {name: slots, key: user, cost: 1, limits: [{algorithm: concurrency, limit: 1, lease: 30s, wait: 30s}]}
";

/// Makes a reservation on `node`, waiting at most `longest_wait`. Returns the reason of a denial.
async fn reserve_or_reason(
    node: Arc<tidegate_limiter::ServerLimiter>,
    longest_wait: Span,
) -> Result<Reservation, Option<Reason>> {
    let request = Request::new(&[("user", "a")], Cost::ONE).unwrap();
    let (rules, mut scratch) = (node.rules(), Scratch::default());
    let ttl = Span::from_secs(20);
    let turn = SlotTurn::new(Effect::Charge, longest_wait);
    let finish = |_: &_, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
        reservation.ok_or(verdict.reason)
    };
    let reserved = node.reserve(&rules, &mut scratch, &request, ttl, turn, finish);
    reserved.await.unwrap()
}

async fn reserve(
    node: Arc<tidegate_limiter::ServerLimiter>,
    longest_wait: Span,
) -> Option<Reservation> {
    reserve_or_reason(node, longest_wait).await.ok()
}

/// Starts two servers on one Redis.
fn two_nodes() -> (RedisServer, [Node; 2]) {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    for node in &nodes {
        node.until_up(true);
        node.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
    }
    (redis, nodes)
}

/// Starts a request that waits on `node` for up to 30 seconds.
fn wait_on(node: &Node) -> Receiver<Result<Reservation, Option<Reason>>> {
    let (sender, decided) = std::sync::mpsc::channel();
    let limiter = Arc::clone(&node.limiter);
    node.spawn(async move {
        let decided = reserve_or_reason(limiter, Span::from_secs(30)).await;
        let _ = sender.send(decided);
    });
    eventually("the request waits", || {
        (node.limiter.wait_queues().count() == 1).then_some(())
    });
    decided
}

#[test]
fn a_slot_that_another_server_releases_ends_a_wait() {
    let (_redis, [a, b]) = two_nodes();
    let held = a.run(reserve(Arc::clone(&a.limiter), Span::ZERO)).unwrap();
    let denied = b.run(reserve(Arc::clone(&b.limiter), Span::ZERO));
    assert_eq!(denied, None);
    let admitted = wait_on(&b);
    let settled = a.limiter.settle_reservation(&held.token, 1);
    a.run(settled).unwrap();
    let reservation = admitted.recv_timeout(TIMEOUT).unwrap();
    assert!(reservation.is_ok());
    assert_eq!(b.limiter.wait_queues().count(), 0);
}

/// A request waits on one server while the other server blocks it or overrides its limits.
#[test]
fn a_change_on_another_server_applies_to_waiting_requests() {
    let (_redis, [a, b]) = two_nodes();
    let limiter = Arc::clone(&b.limiter);
    b.spawn(async move { limiter.sync_overrides().await });
    let held = a.run(reserve(Arc::clone(&a.limiter), Span::ZERO)).unwrap();
    let hour = Span::from_secs(3_600);

    let waiting = wait_on(&b);
    let key = a.key("slots", "a");
    assert!(a.run(a.limiter.block(&key, Some(hour), "abuse")).unwrap());
    let denied = waiting.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(denied, Err(Some(Reason::Blocked)));
    assert!(a.run(a.limiter.unblock(&key)).unwrap());

    let waiting = wait_on(&b);
    let target = EntryBlockTarget::new(None, &[("user", "a")]).unwrap();
    let block = EntryBlock {
        until: Some(a.limiter.now().after(hour)),
        reason: "abuse".into(),
    };
    a.run(a.limiter.set_entry_block(&target, block)).unwrap();
    let denied = waiting.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(denied, Err(Some(Reason::Blocked)));
    a.run(a.limiter.remove_entry_block(&target)).unwrap();
    eventually("the block has no effect on the other server", || {
        b.limiter.entry_blocks().is_empty().then_some(())
    });

    let waiting = wait_on(&b);
    let new = Override {
        replacement: Replacement::Factor("2x".parse().unwrap()),
        until: None,
        reason: "launch".into(),
    };
    let (rules, target) = (a.limiter.rules(), OverrideTarget::of(&["a"]));
    let slots = rules.rule("slots").unwrap();
    a.run(a.limiter.set_override(slots, &target, new)).unwrap();
    let admitted = waiting.recv_timeout(TIMEOUT).unwrap();
    assert!(admitted.is_ok(), "the override has a second slot");
    let settled = a.limiter.settle_reservation(&held.token, 1);
    a.run(settled).unwrap();
}

#[test]
fn a_reload_applies_to_requests_that_wait_for_slots_in_redis() {
    let (_redis, [a, b]) = two_nodes();
    a.run(reserve(Arc::clone(&a.limiter), Span::ZERO)).unwrap();
    let waiting = wait_on(&b);
    let rules = RULES.replace("limit: 1,", "limit: 2,");
    b.limiter.swap_rules(Config::parse(&rules).unwrap().rules);
    assert!(waiting.recv_timeout(TIMEOUT).unwrap().is_ok());
    let waiting = wait_on(&b);
    let rules = RULES.replace(", wait: 30s", "");
    b.limiter.swap_rules(Config::parse(&rules).unwrap().rules);
    let denied = waiting.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(denied, Err(Some(Reason::Limit)), "the rule has no wait");
}

/// A waiting request is evaluated in Redis several times, but is counted as one decision and one
/// request.
#[test]
fn a_request_that_waits_is_counted_once() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let rules = Config::parse(RULES).unwrap().rules;
    node.limiter.swap_rules(rules);
    let reserve = |longest_wait| node.run(reserve(Arc::clone(&node.limiter), longest_wait));
    let decisions = || {
        let stats = node.limiter.redis_store().unwrap().stats();
        stats.decisions.iter().map(|(_, count)| count).sum::<u64>()
    };
    let before = decisions();
    let held = reserve(Span::from_secs(1)).unwrap();
    assert_eq!(reserve(Span::from_millis(200)), None);
    assert_eq!(decisions() - before, 2);
    let counted = json!({"requests": 2, "denied": 1, "cost": 2});
    assert_eq!(top(&node, "?rule=slots")["total"], counted);
    let settled = node.limiter.settle_reservation(&held.token, 1);
    node.run(settled).unwrap();
}
