//! Tests of reservations on servers that share a Redis.

use std::sync::Arc;

use tidegate::rate_limiter::SlotTurn;
use tidegate_config::Config;
use tidegate_core::{Charge, Cost, Effect, Request, Scratch, Span, Verdict};
use tidegate_limiter::reservations::{Reservation, ReservationError, SettledReservation};

use crate::{
    node::Node,
    support::{RedisCluster, RedisServer, eventually},
};

pub(crate) const RULES: &str = "
rules:
  - {name: log, key: user, limits: [{algorithm: sliding_window_log, limit: 1000, window: 1h}]}
  - {name: window, key: user, limits: [{algorithm: fixed_window, limit: 5000, window: 1h}]}
  - {name: slots, when: {path: /slow}, key: user, cost: 1, limits: [{algorithm: concurrency, limit: 1, lease: 30s}]}
";

pub(crate) fn two_nodes() -> (RedisServer, Node, Node) {
    let redis = RedisServer::start();
    let nodes = [Node::start(&redis.url()), Node::start(&redis.url())];
    let [a, b] = nodes.map(|node| {
        node.until_up(true);
        node.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
        node
    });
    (redis, a, b)
}

pub(crate) fn reserve(
    node: &Node,
    entries: &[(&str, &str)],
    cost: u64,
    ttl: u64,
) -> Option<Reservation> {
    let request = Request::new(entries, Cost::new(cost).unwrap()).unwrap();
    let (rules, mut scratch) = (node.limiter.rules(), Scratch::default());
    let ttl = Span::from_secs(ttl);
    let finish = |_: &_, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
        assert_eq!(verdict.allowed, reservation.is_some());
        reservation
    };
    let turn = SlotTurn::at_once();
    let reserving = node
        .limiter
        .reserve(&rules, &mut scratch, &request, ttl, turn, finish);
    node.run(reserving).unwrap()
}

pub(crate) fn settle(
    node: &Node,
    token: &str,
    cost: u64,
) -> Result<SettledReservation, ReservationError> {
    let limiter = Arc::clone(&node.limiter);
    node.run(limiter.settle_reservation(token, cost))
}

/// Renews a reservation for `ttl` seconds.
pub(crate) fn renew(node: &Node, token: &str, ttl: u64) -> Result<Reservation, ReservationError> {
    node.run(node.limiter.renew_reservation(token, Span::from_secs(ttl)))
}

/// Returns the number of remaining units under the rule `log`. Determines the remaining units by a
/// binary search that makes and cancels reservations.
pub(crate) fn left(node: &Node, user: &str) -> u64 {
    let (mut low, mut high) = (0, 1_001);
    while high - low > 1 {
        let middle = (low + high) / 2;
        match reserve(node, &[("user", user)], middle, 60) {
            Some(reservation) => {
                settle(node, &reservation.token, 0).unwrap();
                low = middle;
            }
            None => high = middle,
        }
    }
    low
}

/// Returns the number of units charged under the rule `window`.
pub(crate) fn window_spent(node: &Node, user: &str) -> u64 {
    let rules = node.limiter.rules();
    let rule = rules.rule("window").unwrap();
    let key = rule.encode_key(&[user]).unwrap();
    let charges = [Charge::new(&key, rule.limits(), Cost::ONE).unwrap()];
    let mut outcomes = Vec::new();
    let store = node.limiter.redis_store().unwrap().store();
    let look = store.check(&charges, Effect::Look, &mut outcomes);
    node.run(look).unwrap();
    5_000 - outcomes[0].remaining
}

#[test]
fn any_server_settles_a_reservation_once() {
    let (_redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("user", "u")], 600, 60).unwrap();
    assert_eq!(left(&b, "u"), 400, "the reservation counts on every server");
    let settled = settle(&b, &reservation.token, 100).unwrap();
    assert_eq!(
        (settled.settled, settled.released, settled.over),
        (100, 500, 0)
    );
    for node in [&a, &b] {
        let again = settle(node, &reservation.token, 0).unwrap_err();
        assert!(again.reason().starts_with("was already settled; only"));
        let repeated = settle(node, &reservation.token, 100);
        assert_eq!(
            repeated,
            Ok(settled),
            "a repeated call gets the same answer"
        );
        assert_eq!(left(node, "u"), 900);
    }
    // The server that made the reservation must not refund it again.
    a.at_millis(61_000);
    a.run(a.limiter.expire_reservations());
    assert_eq!(left(&b, "u"), 900);
}

#[test]
fn an_expired_reservation_costs_nothing() {
    let (_redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("user", "u")], 600, 10).unwrap();
    b.at_millis(10_000);
    let late = settle(&b, &reservation.token, 1).unwrap_err();
    assert_eq!(late.reason(), "has expired");
    assert_eq!(left(&b, "u"), 400);
    a.at_millis(10_000);
    a.run(a.limiter.expire_reservations());
    assert_eq!(left(&b, "u"), 1_000);
}

/// The reservation is renewed by another server than the one that made it.
#[test]
fn a_renewal_by_another_server_is_respected() {
    let (_redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("user", "u")], 600, 10).unwrap();
    b.at_millis(9_000);
    let renewed = renew(&b, &reservation.token, 10).unwrap();
    for millis in [10_000, 19_000] {
        a.at_millis(millis);
        a.run(a.limiter.expire_reservations());
        assert_eq!(left(&a, "u"), 400, "the other server ends it");
    }
    b.at_millis(18_999);
    b.run(b.limiter.expire_reservations());
    assert_eq!(left(&b, "u"), 400);
    b.at_millis(19_000);
    b.run(b.limiter.expire_reservations());
    assert_eq!(left(&b, "u"), 1_000);
    b.at_millis(19_000);
    assert!(settle(&b, &renewed.token, 1).is_err());
}

#[test]
fn a_slot_is_released_and_renewed_by_any_server() {
    let (_redis, a, b) = two_nodes();
    let entries = [("user", "u"), ("path", "/slow")];
    let first = reserve(&a, &entries, 1, 60).unwrap();
    assert_eq!(first.expires_in, Span::from_secs(30));
    assert!(reserve(&b, &entries, 1, 60).is_none());
    let renewed = renew(&b, &first.token, 60);
    assert!(reserve(&a, &entries, 1, 60).is_none());
    settle(&b, &renewed.unwrap().token, 1).unwrap();
    assert!(reserve(&a, &entries, 1, 60).is_some());
}

/// If a settlement does not reach Redis, the reservation is unchanged, so the settlement can be
/// repeated.
#[test]
fn a_settlement_is_repeated_after_an_outage() {
    let (redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("user", "u")], 600, 600).unwrap();
    redis.pause();
    let failed = settle(&b, &reservation.token, 100).unwrap_err();
    assert!(
        matches!(failed, ReservationError::Unavailable(_)),
        "{failed}"
    );
    redis.resume();
    b.until_up(true);
    // The paused Redis server may have executed the call after the timeout.
    let settled = settle(&b, &reservation.token, 100).unwrap();
    assert_eq!(settled.settled, 100);
    assert_eq!(left(&b, "u"), 900);
}

/// While Redis is unreachable, only the server that made the reservation can settle it.
#[test]
fn a_reservation_without_redis_belongs_to_its_server() {
    let (redis, a, b) = two_nodes();
    drop(redis);
    a.until_up(false);
    let reservation = reserve(&a, &[("user", "u")], 100, 60).unwrap();
    let unknown = settle(&b, &reservation.token, 1).unwrap_err();
    assert!(
        unknown
            .reason()
            .ends_with("was made by another server or before a restart of this server")
    );
    assert_eq!(settle(&a, &reservation.token, 1).unwrap().released, 99);
}

/// If a reservation is made while Redis is unreachable, the excess cost is charged after Redis is
/// back.
#[test]
fn the_excess_is_charged_after_an_outage() {
    let (mut redis, a, b) = two_nodes();
    redis.kill();
    a.until_up(false);
    let reservation = reserve(&a, &[("user", "u")], 10, 60).unwrap();
    redis.restart();
    a.until_up(true);
    b.until_up(true);
    assert_eq!(settle(&a, &reservation.token, 60).unwrap().settled, 60);
    assert_eq!(
        left(&b, "u"),
        950,
        "the 10 units were charged to the share of one server"
    );
}

/// Redis executes a settlement, but its reply is lost. The repeated call ends the reservation on
/// this server, and counts it once.
#[test]
fn a_settlement_whose_reply_was_lost_is_counted_when_it_is_repeated() {
    let (redis, a, b) = two_nodes();
    // This loads the script, so that Redis executes the next call even if its reply is lost.
    let loading = reserve(&a, &[("user", "u")], 1, 60).unwrap();
    settle(&a, &loading.token, 0).unwrap();
    let reservation = reserve(&a, &[("user", "u")], 600, 60).unwrap();
    redis.pause();
    assert!(settle(&a, &reservation.token, 100).is_err());
    redis.resume();
    eventually("Redis executes the settlement", || {
        (window_spent(&b, "u") == 100).then_some(())
    });
    a.until_up(true);
    let metric = |name: &str| a.limiter.exposition().contains(&format!("\n{name}\n"));
    assert!(metric("tidegate_reservations_outstanding 1"));
    assert!(metric("tidegate_reservations_ended_total{by=\"settle\"} 1"));
    for _ in 0..2 {
        let repeated = settle(&a, &reservation.token, 100).unwrap();
        assert_eq!((repeated.settled, repeated.released), (100, 500));
        assert!(metric("tidegate_reservations_outstanding 0"));
        assert!(metric("tidegate_reservations_ended_total{by=\"settle\"} 2"));
    }
}

/// The rules may change while a reservation is outstanding.
#[test]
fn a_reservation_ends_once_although_a_rule_is_removed() {
    let (_redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("user", "u")], 600, 10).unwrap();
    let rest = RULES.replace("name: log", "name: renamed");
    b.limiter.swap_rules(Config::parse(&rest).unwrap().rules);
    settle(&b, &reservation.token, 100).unwrap();
    let gone = Config::parse("rules: []").unwrap().rules;
    b.limiter.swap_rules(gone);
    assert!(settle(&b, &reservation.token, 0).is_err());
    a.at_millis(10_000);
    a.run(a.limiter.expire_reservations());
    assert!(settle(&a, &reservation.token, 0).is_err());
    assert_eq!(window_spent(&a, "u"), 100);
}

/// Redis remembers that a reservation has ended until the reservation's newest token has expired.
#[test]
fn an_old_token_ends_a_renewed_reservation_once() {
    let (redis, a, b) = two_nodes();
    let first = reserve(&a, &[("user", "u")], 600, 60).unwrap();
    let second = renew(&b, &first.token, 600).unwrap();
    settle(&b, &first.token, 100).unwrap();
    let ttl = "return redis.call('PTTL', redis.call('KEYS', '*#ends*')[1])";
    let kept = redis.ask(&["EVAL", ttl, "0"]);
    let millis: i64 = kept.trim_start_matches(':').parse().unwrap();
    assert!(millis > 600_000, "{kept}");
    assert!(settle(&a, &second.token, 0).is_err());
    assert_eq!(left(&a, "u"), 900);
}

/// If no rule applies to a request, the reservation has no charges, so any server can settle it.
#[test]
fn any_server_settles_a_reservation_without_charges() {
    let (_redis, a, b) = two_nodes();
    let reservation = reserve(&a, &[("other", "x")], 5, 10).unwrap();
    assert_eq!(settle(&b, &reservation.token, 2).unwrap().released, 3);
    b.at_millis(10_000);
    assert!(settle(&b, &reservation.token, 2).is_err());
}

/// A request's charges are in several cluster slots, and all of them are settled together.
#[test]
fn a_reservation_ends_in_every_slot_of_a_cluster() {
    const RULES: &str = "
rules:
  - {name: per_user, key: user, limits: [{algorithm: sliding_window_log, limit: 1000, window: 1h}]}
  - {name: per_ip, key: ip, limits: [{algorithm: sliding_window_log, limit: 1000, window: 1h}]}
  - {name: all, limits: [{algorithm: fixed_window, limit: 100000, window: 1h}]}
";
    let cluster = RedisCluster::start();
    let [a, b] = [(); 2].map(|()| {
        let node = Node::on_cluster(&cluster.url());
        node.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
        eventually("the nodes of the cluster are connected", || {
            let health = node.limiter.redis_store().unwrap().stats().health;
            (health.up >= 3 && health.unserved_slots == 0).then_some(())
        });
        node
    });
    let entries = |user| [("user", user), ("ip", "192.0.2.1")];
    let reservation = reserve(&a, &entries("u"), 600, 60).unwrap();
    assert!(
        reserve(&b, &entries("other"), 500, 60).is_none(),
        "the address has spent 600"
    );
    let settled = settle(&b, &reservation.token, 100).unwrap();
    assert_eq!(settled.released, 500);
    assert!(settle(&a, &reservation.token, 0).is_err());
    let other = reserve(&a, &entries("other"), 900, 10).unwrap();
    assert!(reserve(&b, &entries("third"), 1, 60).is_none());
    a.at_millis(10_000);
    a.run(a.limiter.expire_reservations());
    assert!(settle(&b, &other.token, 900).is_err());
    assert!(reserve(&b, &entries("third"), 900, 60).is_some());
}
