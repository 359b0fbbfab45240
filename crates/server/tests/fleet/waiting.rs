//! Tests of requests waiting for concurrency slots that are in use on other servers.

use std::sync::Arc;

use serde_json::json;
use tidegate::{RateLimiter as _, rate_limiter::SlotTurn};
use tidegate_config::Config;
use tidegate_core::{Cost, Effect, Request, Scratch, Span};
use tidegate_limiter::reservations::Reservation;

use crate::{
    node::Node,
    support::{RedisServer, eventually},
    top::top,
};

const RULES: &str = "
rules:
  - {name: slots, key: user, cost: 1, limits: [{algorithm: concurrency, limit: 1, lease: 30s, wait: 30s}]}
";

/// Makes a reservation on `node`, waiting at most `longest_wait`.
async fn reserve(
    node: Arc<tidegate_limiter::ServerLimiter>,
    longest_wait: Span,
) -> Option<Reservation> {
    let request = Request::new(&[("user", "a")], Cost::ONE).unwrap();
    let (rules, mut scratch) = (node.rules(), Scratch::default());
    let ttl = Span::from_secs(20);
    let turn = SlotTurn::new(Effect::Charge, longest_wait);
    let reserved = node.reserve(&rules, &mut scratch, &request, ttl, turn);
    reserved.await.unwrap().1
}

#[test]
fn a_slot_that_another_server_releases_ends_a_wait() {
    let redis = RedisServer::start();
    let [a, b] = [Node::start(&redis.url()), Node::start(&redis.url())];
    for node in [&a, &b] {
        node.until_up(true);
        node.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
    }
    let held = a.run(reserve(Arc::clone(&a.limiter), Span::ZERO)).unwrap();
    let denied = b.run(reserve(Arc::clone(&b.limiter), Span::ZERO));
    assert_eq!(denied, None);
    let (sender, admitted) = std::sync::mpsc::channel();
    let waiting = Arc::clone(&b.limiter);
    b.spawn(async move {
        let reservation = reserve(waiting, Span::from_secs(30)).await;
        let _ = sender.send(reservation);
    });
    eventually("the request waits", || {
        (b.limiter.wait_queues().count() == 1).then_some(())
    });
    let settled = a.limiter.settle_reservation(&held.token, 1);
    a.run(settled).unwrap();
    let reservation = admitted.recv_timeout(crate::support::TIMEOUT).unwrap();
    assert!(reservation.is_some());
    assert_eq!(b.limiter.wait_queues().count(), 0);
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
