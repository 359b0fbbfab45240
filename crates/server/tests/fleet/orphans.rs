//! Tests of reservations whose server has stopped.

use std::pin::pin;

use futures_util::{FutureExt as _, future::join};
use tidegate_config::Config;
use tidegate_core::Span;
use tidegate_redis::ExpiryQueueEntry;

use crate::{
    node::Node,
    reservations::{RULES, left, renew, reserve, settle, two_nodes, window_spent},
    support::{RedisServer, eventually},
};

const USER: [(&str, &str); 1] = [("user", "u")];

/// The expiry queue in Redis.
const EXPIRY_QUEUE: &str = "test#{reservations}";

/// Starts two nodes. The test sets the clocks of both nodes and of Redis.
fn nodes() -> (RedisServer, Node, Node) {
    let (redis, a, b) = two_nodes();
    a.at_millis_with_redis(0);
    b.at_millis_with_redis(0);
    (redis, a, b)
}

/// Writes the expiry queue of `node`, and then kills the node.
fn kill(node: Node) {
    write(&node);
    drop(node);
}

fn write(node: &Node) {
    assert!(node.run(node.limiter.write_expiry_queue()));
}

/// Sets the clocks of Redis and of `node`, and lets the node end the reservations of other nodes.
fn end_orphans_at(node: &Node, millis: u64) {
    node.at_millis_with_redis(millis);
    node.run(node.limiter.end_orphaned_reservations());
}

fn lost(node: &Node) -> bool {
    let page = node.limiter.exposition();
    page.contains("tidegate_reservations_ended_total{by=\"lost\"} 1\n")
}

#[test]
fn a_reservation_of_a_killed_server_costs_nothing() {
    let (redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    end_orphans_at(&b, 14_999);
    assert_eq!(left(&b, "u"), 400);
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 1_000);
    assert_eq!(window_spent(&b, "u"), 0);
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
}

#[test]
fn a_reservation_of_a_stopped_server_costs_nothing() {
    let (_redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    a.run(a.limiter.flush_expiry_queue());
    drop(a);
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 1_000);
}

/// A stopped server may have made more reservations than one call can claim or write.
#[test]
fn many_reservations_of_a_killed_server_cost_nothing() {
    let (redis, a, b) = nodes();
    for _ in 0..200 {
        reserve(&a, &USER, 3, 10).unwrap();
    }
    kill(a);
    assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":200");
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 1_000);
}

/// A search is bounded, so that one server does not claim a long queue alone.
#[test]
fn a_search_is_bounded() {
    let (redis, _a, b) = nodes();
    let entries = |first: u32| {
        let ids = first..first + 64;
        let entries = ids.map(|number| ExpiryQueueEntry {
            id: (u128::from(number) << 64).to_be_bytes(),
            delay: Span::from_micros(0),
            value: Vec::new(),
        });
        entries.collect::<Vec<_>>()
    };
    let store = b.limiter.redis_store().unwrap().store();
    for batch in 0..65 {
        assert_eq!(
            b.run(store.write_expiry_queue(&[], &entries(batch * 64))),
            Ok(0)
        );
    }
    // A value in an unknown format is dropped if it is long overdue.
    end_orphans_at(&b, 45_000);
    assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":64");
}

/// If a reservation cannot be ended, the server leaves the rest of the queue to other servers.
#[test]
fn a_search_ends_after_a_failure() {
    let (redis, a, b) = nodes();
    for _ in 0..200 {
        reserve(&a, &USER, 3, 10).unwrap();
    }
    kill(a);
    // With guards of another type, ending a reservation fails.
    let break_guards = "
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  redis.call('LPUSH', 'test#ends{}:' .. string.gsub(id, '.', function(byte)
    return string.format('%02x', string.byte(byte))
  end), 'x')
end";
    redis.ask(&["EVAL", break_guards, "1", EXPIRY_QUEUE]);
    end_orphans_at(&b, 15_000);
    b.at_millis_with_redis(15_001);
    let store = b.limiter.redis_store().unwrap().store();
    let mut claimed = 0;
    loop {
        match b.run(store.claim_expired()).unwrap().len() {
            0 => break,
            more => claimed += more,
        }
    }
    assert_eq!(claimed, 200 - 64);
}

#[test]
fn a_settled_reservation_of_a_killed_server_stays_charged() {
    let (_redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    settle(&b, &reservation.token, 100).unwrap();
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 900);
    assert_eq!(window_spent(&b, "u"), 100);
}

#[test]
fn a_renewed_reservation_of_a_killed_server_expires_later() {
    let (redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    b.at_millis_with_redis(9_000);
    let renewed = renew(&b, &reservation.token, 60).unwrap();
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 400);
    end_orphans_at(&b, 73_999);
    assert_eq!(left(&b, "u"), 400);
    end_orphans_at(&b, 74_000);
    assert_eq!(left(&b, "u"), 1_000);
    assert!(settle(&b, &renewed.token, 1).is_err());
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
}

/// The server that made a reservation has renewed it, so the expiry queue contains the new expiry.
#[test]
fn a_reservation_that_a_killed_server_has_renewed_expires_later() {
    let (_redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    write(&a);
    a.at_millis_with_redis(9_000);
    renew(&a, &reservation.token, 60).unwrap();
    kill(a);
    let store = b.limiter.redis_store().unwrap().store();
    b.at_millis_with_redis(73_999);
    assert_eq!(b.run(store.claim_expired()), Ok(Vec::new()));
    end_orphans_at(&b, 74_000);
    assert_eq!(left(&b, "u"), 1_000);
}

#[test]
fn a_slot_of_a_killed_server_is_released() {
    let (_redis, a, b) = two_nodes();
    let slow = [("user", "u"), ("path", "/slow")];
    a.at_millis_with_redis(0);
    reserve(&a, &slow, 1, 10).unwrap();
    kill(a);
    end_orphans_at(&b, 14_999);
    assert!(reserve(&b, &slow, 1, 10).is_none());
    end_orphans_at(&b, 15_000);
    assert!(reserve(&b, &slow, 1, 10).is_some());
}

/// A renewal moves the slot, and only the server that has renewed it knows the new slot.
#[test]
fn a_slot_that_another_server_has_renewed_is_released() {
    let slow = [("user", "u"), ("path", "/slow")];
    for is_killed in [false, true] {
        let (_redis, a, b) = two_nodes();
        a.at_millis_with_redis(0);
        b.at_millis_with_redis(5_000);
        let reservation = reserve(&a, &slow, 1, 10).unwrap();
        write(&a);
        renew(&b, &reservation.token, 10).unwrap();
        a.at_millis_with_redis(10_000);
        a.run(a.limiter.expire_reservations());
        let end = if is_killed {
            kill(b);
            end_orphans_at(&a, 19_999);
            20_000
        } else {
            b.at_millis_with_redis(15_000);
            b.run(b.limiter.expire_reservations());
            15_000
        };
        if is_killed {
            assert!(reserve(&a, &slow, 1, 10).is_none());
            end_orphans_at(&a, end);
        }
        a.at_millis_with_redis(end);
        assert!(reserve(&a, &slow, 1, 10).is_some(), "killed: {is_killed}");
    }
}

/// The server that made the reservation would otherwise end it at the former expiry.
#[test]
fn a_reservation_that_another_server_has_shortened_expires_sooner() {
    let (_redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 60).unwrap();
    renew(&b, &reservation.token, 10).unwrap();
    b.at_millis_with_redis(10_000);
    b.run(b.limiter.expire_reservations());
    assert_eq!(left(&b, "u"), 1_000);
}

/// Removes one of the two rules of a request on `node`.
fn remove_log_rule(node: &Node) {
    let window = RULES.lines().filter(|line| !line.contains("name: log"));
    let rules = window.collect::<Vec<_>>().join("\n");
    node.limiter
        .swap_rules(Config::parse(&rules).unwrap().rules);
}

/// A server renews its reservation twice after one of the rules was removed.
#[test]
fn a_reservation_is_refunded_after_a_rule_was_removed_and_it_was_renewed() {
    let (_redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    remove_log_rule(&a);
    let renewed = renew(&a, &reservation.token, 20).unwrap();
    renew(&a, &renewed.token, 20).unwrap();
    a.at_millis_with_redis(20_000);
    a.run(a.limiter.expire_reservations());
    b.at_millis_with_redis(20_000);
    assert_eq!((left(&b, "u"), window_spent(&b, "u")), (1_000, 0));
}

/// A server that does not have all rules returns a token that still contains all charges.
#[test]
fn a_token_of_a_server_without_all_rules_contains_all_charges() {
    let (_redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    remove_log_rule(&b);
    let renewed = renew(&b, &reservation.token, 20).unwrap();
    let renewed = renew(&b, &renewed.token, 20).unwrap();
    settle(&a, &renewed.token, 100).unwrap();
    assert_eq!((left(&a, "u"), window_spent(&a, "u")), (900, 100));
}

/// Redis executes a renewal, and then the call that ends the reservation, because the renewal began
/// before the expiry.
#[test]
fn a_reservation_that_is_renewed_while_it_is_ended_expires_later() {
    let (redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    // Loads the script, so that the next renewal is a single call.
    let reservation = renew(&a, &reservation.token, 10).unwrap();
    a.at_millis_with_redis(9_999);
    let renewed = a.run(async {
        let ttl = Span::from_secs(10);
        let renewal = a.limiter.renew_reservation(&reservation.token, ttl);
        let mut renewal = pin!(renewal);
        // Redis receives the calls in this order, and answers none of them yet.
        redis.pause();
        assert!(renewal.as_mut().now_or_never().is_none());
        a.at_millis_with_redis(10_000);
        let mut expiry = pin!(a.limiter.expire_reservations());
        assert!(expiry.as_mut().now_or_never().is_none());
        redis.resume();
        join(renewal, expiry).await.0
    });
    renewed.unwrap();
    assert_eq!(left(&b, "u"), 400);
    // A renewal of the server itself needs no delay.
    a.at_millis_with_redis(19_998);
    a.run(a.limiter.expire_reservations());
    assert!(is_outstanding(&a));
    reserve(&a, &USER, 100, 60).unwrap();
    b.at_millis_with_redis(19_999);
    a.at_millis_with_redis(19_999);
    let next = a.run(a.limiter.expire_reservations()).unwrap();
    assert_eq!(left(&b, "u"), 900);
    // Only the second reservation is left.
    assert!(next > a.limiter.now());
    a.at_millis_with_redis(79_998);
    assert_eq!(a.run(a.limiter.expire_reservations()), None);
    assert!(!is_outstanding(&a));
}

fn is_outstanding(node: &Node) -> bool {
    let page = node.limiter.exposition();
    !page.contains("\ntidegate_reservations_outstanding 0\n")
}

/// The second server is killed after it has claimed the reservation of the first one.
#[test]
fn a_killed_claimer_loses_nothing() {
    let (redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    b.at_millis_with_redis(15_000);
    let store = b.limiter.redis_store().unwrap().store();
    assert_eq!(b.run(store.claim_expired()).unwrap().len(), 1);
    drop(b);
    let c = Node::start(&redis.url());
    c.until_up(true);
    c.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
    end_orphans_at(&c, 16_999);
    assert_eq!(left(&c, "u"), 400);
    end_orphans_at(&c, 17_000);
    assert_eq!(left(&c, "u"), 1_000);
}

/// A server that was paused for longer than the grace period does not end its reservation again.
#[test]
fn a_reservation_of_a_paused_server_ends_once() {
    let (redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    write(&a);
    end_orphans_at(&b, 15_000);
    assert!(reserve(&b, &USER, 300, 60).is_some());
    a.at_millis_with_redis(16_000);
    a.run(a.limiter.expire_reservations());
    write(&a);
    assert_eq!((left(&a, "u"), window_spent(&a, "u")), (700, 300));
    assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":0");
}

/// The clock of the server is behind, so it does not regard the reservation as expired yet.
#[test]
fn a_reservation_does_not_end_early_on_a_server_whose_clock_is_behind() {
    let (_redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    b.at_millis(9_999);
    let in_redis = b.limiter.now().after(Span::from_millis(5_001));
    let store = b.limiter.redis_store().unwrap().store();
    store.pin_clock(in_redis);
    b.run(b.limiter.end_orphaned_reservations());
    assert_eq!(left(&b, "u"), 400);
    end_orphans_at(&b, 20_001);
    assert_eq!(left(&b, "u"), 1_000);
}

/// Redis was unreachable for too long, so it no longer knows whether the reservation was settled.
#[test]
fn a_reservation_that_expired_long_ago_is_lost() {
    let (redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    end_orphans_at(&b, 40_001);
    assert_eq!(left(&b, "u"), 400);
    assert!(lost(&b));
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
}

/// No server searches the expiry queue until 30 s after the reservation expired without its
/// renewal.
#[test]
fn a_late_server_respects_a_renewal() {
    let (redis, a, b) = nodes();
    let other = without_rules(&redis);
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    b.at_millis_with_redis(9_000);
    renew(&b, &reservation.token, 60).unwrap();
    end_orphans_at(&other, 45_000);
    assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":1");
    end_orphans_at(&b, 45_001);
    assert_eq!(left(&b, "u"), 400);
    end_orphans_at(&b, 74_000);
    assert_eq!(left(&b, "u"), 1_000);
    assert!(!lost(&b) && !lost(&other));
}

#[test]
fn a_late_server_does_not_count_a_settled_reservation_as_lost() {
    let (redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    settle(&b, &reservation.token, 100).unwrap();
    end_orphans_at(&b, 45_000);
    assert_eq!((left(&b, "u"), lost(&b)), (900, false));
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
}

#[test]
fn a_server_whose_clock_is_ahead_loses_no_reservation() {
    let (_redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    b.at_millis_with_redis(15_000);
    b.at_millis(44_000);
    b.run(b.limiter.end_orphaned_reservations());
    assert!(!lost(&b));
    assert_eq!(left(&b, "u"), 1_000);
}

/// Starts a node of another service, which shares the prefix of its keys.
fn without_rules(redis: &RedisServer) -> Node {
    let other = Node::start(&redis.url());
    other.until_up(true);
    other
}

/// Both servers search every second. The server without the rules always searches first, and again
/// when the lease of its first claim ends.
#[test]
fn a_server_without_the_rules_leaves_a_reservation_to_others() {
    let (redis, a, b) = nodes();
    let other = without_rules(&redis);
    reserve(&a, &USER, 600, 10).unwrap();
    kill(a);
    for second in 15..18 {
        end_orphans_at(&other, second * 1_000);
        assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":1");
    }
    end_orphans_at(&b, 17_500);
    assert_eq!(left(&b, "u"), 1_000);
}

/// Most requests end within 100 ms. The reservations of short requests must not cost a write to the
/// expiry queue.
#[test]
fn a_reservation_that_is_settled_soon_is_not_written() {
    let (redis, a, b) = nodes();
    let reservation = reserve(&a, &USER, 600, 60).unwrap();
    settle(&a, &reservation.token, 1).unwrap();
    write(&a);
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");

    // A written reservation is removed after it was settled.
    let reservation = reserve(&a, &USER, 600, 60).unwrap();
    write(&a);
    assert_eq!(redis.ask(&["HLEN", EXPIRY_QUEUE]), ":1");
    settle(&a, &reservation.token, 1).unwrap();
    write(&a);
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");

    // If another server settles it, it is removed when it expires.
    let reservation = reserve(&a, &USER, 600, 60).unwrap();
    write(&a);
    settle(&b, &reservation.token, 1).unwrap();
    a.at_millis_with_redis(60_000);
    a.run(a.limiter.expire_reservations());
    write(&a);
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
    assert_eq!(left(&b, "u"), 997);
}

/// If a write fails, its changes are written by the next one.
#[test]
fn the_expiry_queue_is_written_after_an_outage() {
    let (redis, a, b) = nodes();
    reserve(&a, &USER, 600, 10).unwrap();
    redis.pause();
    assert!(!a.run(a.limiter.write_expiry_queue()));
    redis.resume();
    a.until_up(true);
    kill(a);
    b.until_up(true);
    end_orphans_at(&b, 15_000);
    assert_eq!(left(&b, "u"), 1_000);
}

/// All keys of the expiry queue are in one slot, and the charges are in several other slots.
#[test]
fn a_reservation_of_a_killed_server_on_a_cluster_costs_nothing() {
    const RULES: &str = "
rules:
  - {name: log, key: user, limits: [{algorithm: sliding_window_log, limit: 1000, window: 1h}]}
  - {name: per_ip, key: ip, limits: [{algorithm: sliding_window_log, limit: 1000, window: 1h}]}
";
    let redis = RedisServer::slotted("redis-server");
    let [a, b] = [(); 2].map(|()| {
        let node = Node::on_cluster(&redis.url());
        node.limiter.swap_rules(Config::parse(RULES).unwrap().rules);
        eventually("the node of the cluster is connected", || {
            let health = node.limiter.redis_store().unwrap().stats().health;
            (health.up == 1 && health.unserved_slots == 0).then_some(())
        });
        node
    });
    let entries = |user| [("user", user), ("ip", "192.0.2.1")];
    a.at_millis_with_redis(0);
    reserve(&a, &entries("u"), 600, 10).unwrap();
    kill(a);
    b.at_millis_with_redis(0);
    assert!(reserve(&b, &entries("v"), 500, 10).is_none());
    end_orphans_at(&b, 15_000);
    for user in ["u", "v"] {
        let reservation = reserve(&b, &entries(user), 1_000, 10).unwrap();
        settle(&b, &reservation.token, 0).unwrap();
    }
    assert_eq!(redis.ask(&["EXISTS", EXPIRY_QUEUE]), ":0");
}
