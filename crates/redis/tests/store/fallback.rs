//! Tests charges with receipts in a store with a local fallback, while Redis is reachable and after
//! it has failed.

use std::{sync::Arc, time::Duration};

use tidegate_core::{
    Algorithm, CacheSearch, Charge, Cost, Decision, DecisionAndReceipt, Effect, FallbackShare,
    Limit, Limits, MemoryBounds, MemoryStore, Renewal, Settlement, Source, Span, Store,
    StoreRequest, Timestamp,
};
use tidegate_redis::{
    Address, FallbackReceipt, FallbackSettings, FallbackStore, NodeShare, Redis, RedisSettings,
    Topology,
};
use tokio::runtime::Handle;

use crate::{
    START,
    support::{RedisServer, TIMEOUT},
};

/// Returns a limit of four concurrent requests. In a fleet of two nodes, this node's share is two
/// requests.
fn limits() -> Limits {
    let limit = Limit::new(Algorithm::Concurrency {
        limit: 4,
        lease: Span::from_secs(600),
    });
    Limits::new(vec![limit.unwrap()]).unwrap()
}

async fn node(url: &str) -> FallbackStore {
    node_that_waits(url, Duration::from_secs(5)).await
}

async fn node_that_waits(url: &str, timeout: Duration) -> FallbackStore {
    let topology = Topology::Standalone(Address::parse(url).unwrap().0);
    let settings = RedisSettings {
        timeout,
        ..RedisSettings::new(topology)
    };
    let redis = Redis::start(settings, &Handle::current());
    redis.wait_for_first_attempt().await.unwrap();
    let local = MemoryStore::new(MemoryBounds::default());
    let settings = FallbackSettings {
        share: NodeShare::Fixed(FallbackShare::default()),
        ..FallbackSettings::default()
    };
    FallbackStore::new(Arc::new(redis), "tg", local, settings)
}

/// Returns a node that counts the servers on its Redis.
async fn node_that_counts(url: &str) -> FallbackStore {
    let topology = Topology::Standalone(Address::parse(url).unwrap().0);
    let settings = RedisSettings {
        timeout: Duration::from_secs(5),
        ..RedisSettings::new(topology)
    };
    let redis = Redis::start(settings, &Handle::current());
    let local = MemoryStore::new(MemoryBounds::default());
    FallbackStore::new(Arc::new(redis), "tg", local, FallbackSettings::default())
}

async fn until(what: &str, wanted: impl Fn() -> bool) {
    let waited = async {
        while !wanted() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, waited).await;
    waited.unwrap_or_else(|_| panic!("the condition was never met: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_count_themselves_and_keep_the_count_during_an_outage() {
    let mut redis = tokio::task::block_in_place(RedisServer::start);
    // Two ids belong to servers that stopped long ago. The last heartbeat of one of these servers
    // was recorded by a primary whose clock was ahead.
    tokio::task::block_in_place(|| {
        redis.ask(&["ZADD", "tg#servers", "1", "old", "99999999999999", "ahead"]);
    });
    let mut nodes = Vec::new();
    for number in 1..=4 {
        nodes.push(node_that_counts(&redis.url()).await);
        // A server that has just started and counts only itself has the default share, because the
        // other servers may not have written their ids again yet.
        let share = FallbackShare::one_of(number.max(2)).unwrap();
        let last = &nodes[nodes.len() - 1];
        until("the last server has counted itself", || {
            last.stats().servers == Some(number)
        })
        .await;
        until("the last server has counted all", || last.share() == share).await;
    }
    let quarter = FallbackShare::one_of(4).unwrap();
    until("all have counted all", || {
        nodes.iter().all(|node| node.share() == quarter)
    })
    .await;
    assert_eq!(nodes[0].stats().servers, Some(4));
    redis.kill();
    until("it is down", || nodes[0].stats().health.up == 0).await;
    assert_eq!(nodes[0].share(), quarter);
    // A server that has never been able to count the servers has the default share.
    let late = node_that_counts(&redis.url()).await;
    assert_eq!(
        (late.share(), late.stats().servers),
        (FallbackShare::default(), None)
    );
    redis.restart();
    until("the count is empty and all have come back", || {
        late.stats().servers == Some(5) && nodes.iter().all(|node| node.stats().servers == Some(5))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_not_sent_during_an_outage_count_as_failures() {
    let mut redis = tokio::task::block_in_place(RedisServer::start);
    let (node, limits) = (node(&redis.url()).await, limits());
    assert_eq!(reserve(&node, &limits).await.1, Source::Redis);
    redis.kill();
    until("it is down", || node.stats().health.up == 0).await;
    let failures = || -> u64 { node.stats().failures.iter().map(|(_, count)| count).sum() };
    let before = failures();
    let mut charges = vec![Charge::new(b"key", &limits, Cost::ONE).unwrap()];
    for _ in 0..10 {
        assert_eq!(reserve(&node, &limits).await.1, Source::Local);
        let request = request(&mut charges);
        let decided = node.decide(request, &mut Vec::new()).ready().unwrap();
        assert_eq!(decided.source, Source::Local);
    }
    assert_eq!(failures() - before, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evicting_redis_is_warned_about() {
    let redis = tokio::task::block_in_place(|| {
        RedisServer::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"])
    });
    let node = node(&redis.url()).await;
    let warnings = node.stats().health.warnings;
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].contains("maxmemory-policy allkeys-lru"),
        "{warnings:?}"
    );
    assert_eq!(reserve(&node, &limits()).await.1, Source::Redis);
}

fn request<'q, 'c>(charges: &'q mut Vec<Charge<'c>>) -> StoreRequest<'q, 'c> {
    StoreRequest::new(charges, Timestamp::from_micros(START), Effect::Charge)
}

async fn reserve(
    node: &FallbackStore,
    limits: &Limits,
) -> (Decision, Source, Option<FallbackReceipt>) {
    let mut charges = vec![Charge::new(b"key", limits, Cost::ONE).unwrap()];
    let mut outcomes = Vec::new();
    let DecisionAndReceipt {
        decision: decided,
        receipt,
    } = node.reserve(request(&mut charges), &mut outcomes).await;
    (decided.decision, decided.source, receipt)
}

/// Settles a receipt, and returns the store in which the charge was made. If only this node's share
/// was charged, the refund is immediate.
async fn settle(node: &FallbackStore, limits: &Limits, receipt: Option<FallbackReceipt>) -> Source {
    let charges = [Charge::new(b"key", limits, Cost::ONE).unwrap()];
    let now = Timestamp::from_micros(START);
    let settled = [Settlement::default()];
    let mut receipt = Some(receipt.unwrap());
    let is_local = node
        .settle(&charges, &mut receipt, &settled, now)
        .is_ready();
    assert_eq!(receipt.is_none(), is_local, "a pending receipt is kept");
    node.settle(&charges, &mut receipt, &settled, now).await;
    assert!(receipt.is_none());
    if is_local {
        Source::Local
    } else {
        Source::Redis
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_are_released_in_redis_and_on_the_granting_node() {
    let mut redis = tokio::task::block_in_place(RedisServer::start);
    let (one, other, limits) = (node(&redis.url()).await, node(&redis.url()).await, limits());
    let mut held = Vec::new();
    for _ in 0..4 {
        let (decision, source, receipt) = reserve(&one, &limits).await;
        assert_eq!((decision, source), (Decision::Admitted, Source::Redis));
        held.push(receipt);
    }
    // The denials are not cached, because a lease may be released at any moment.
    for _ in 0..2 {
        let (decision, source, receipt) = reserve(&other, &limits).await;
        assert_eq!((decision, source), (Decision::Limited, Source::Redis));
        assert!(receipt.is_none());
    }
    for receipt in held.drain(2..) {
        assert_eq!(settle(&one, &limits, receipt).await, Source::Redis);
    }
    let (decision, ..) = reserve(&other, &limits).await;
    assert_eq!(decision, Decision::Admitted);

    redis.kill();
    while reserve(&one, &limits).await.1 != Source::Local {}
    // This node's share is two requests, and two of its requests are in flight. Leases that were
    // acquired in Redis count towards the share too.
    assert_eq!(reserve(&one, &limits).await.0, Decision::Limited);
    assert_eq!(settle(&one, &limits, held.remove(0)).await, Source::Redis);
    let (decision, source, receipt) = reserve(&one, &limits).await;
    assert_eq!((decision, source), (Decision::Admitted, Source::Local));
    assert_eq!(reserve(&one, &limits).await.0, Decision::Limited);
    assert_eq!(settle(&one, &limits, receipt).await, Source::Local);
    assert_eq!(reserve(&one, &limits).await.0, Decision::Admitted);
}

/// Renews the lease of `receipt` at `now`, in Redis and on the node.
async fn renew(
    node: &FallbackStore,
    receipt: &mut Option<FallbackReceipt>,
    now: Timestamp,
) -> Renewal {
    let (limits, receipt) = (limits(), receipt.as_mut().unwrap());
    let charges = [Charge::new(b"key", &limits, Cost::ONE).unwrap()];
    node.store().pin_clock(now);
    node.renew(&charges, receipt, now).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_fleet_wide_and_survive_an_outage() {
    let mut redis = tokio::task::block_in_place(RedisServer::start);
    let (one, other, limits) = (node(&redis.url()).await, node(&redis.url()).await, limits());
    let minutes = |minutes: u64| Timestamp::from_micros(START).after(Span::from_secs(60 * minutes));
    one.store().pin_clock(minutes(0));
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(reserve(&one, &limits).await.2);
    }
    // Three requests last half an hour. The fourth is never renewed.
    for now in [9, 18, 27] {
        for receipt in held.iter_mut().take(3) {
            assert_eq!(renew(&one, receipt, minutes(now)).await, Renewal::Held);
        }
        other.store().pin_clock(minutes(now));
        let decision = reserve(&other, &limits).await.0;
        let is_free = now == 18;
        let expected = if is_free {
            Decision::Admitted
        } else {
            Decision::Limited
        };
        assert_eq!(decision, expected, "after {now} minutes");
    }
    // Another request acquired the fourth slot at minute 18, so the renewal of the fourth lease is
    // too late.
    assert_eq!(renew(&one, &mut held[3], minutes(27)).await, Renewal::Lost);

    redis.kill();
    while reserve(&one, &limits).await.1 != Source::Local {}
    assert_eq!(
        renew(&one, &mut held[0], minutes(29)).await,
        Renewal::Unknown
    );
    assert_eq!(settle(&one, &limits, held.remove(0)).await, Source::Redis);
}

/// A renewal whose reply was lost leaves an unidentified lease in the slot. The request's lease is
/// not reported as lost, and is acquired again once the unidentified lease has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_without_a_reply_keeps_the_lease() {
    let redis = tokio::task::block_in_place(RedisServer::start);
    let node = node_that_waits(&redis.url(), Duration::from_millis(500)).await;
    let minutes = |minutes: u64| Timestamp::from_micros(START).after(Span::from_secs(60 * minutes));
    node.store().pin_clock(minutes(0));
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(reserve(&node, &limits()).await.2);
    }
    assert_eq!(
        renew(&node, &mut held[0], minutes(3)).await,
        Renewal::Held,
        "the script is known"
    );
    tokio::task::block_in_place(|| redis.ask(&["CLIENT", "PAUSE", "1000", "ALL"]));
    let unheard = renew(&node, &mut held[0], minutes(6)).await;
    assert_eq!(unheard, Renewal::Unknown);
    // The reply to `PING` arrives when the pause ends.
    tokio::task::block_in_place(|| redis.ask(&["PING"]));
    for then in [8, 9] {
        let renewal = renew(&node, &mut held[0], minutes(then)).await;
        assert_eq!(renewal, Renewal::Unknown, "after {then} minutes");
    }
    // The leases of the other requests have expired, so three slots are free.
    assert_eq!(renew(&node, &mut held[0], minutes(11)).await, Renewal::Held);
    for other in &mut held[1..3] {
        assert_eq!(renew(&node, other, minutes(11)).await, Renewal::Held);
    }
    let last = renew(&node, &mut held[3], minutes(11)).await;
    assert_eq!(last, Renewal::Lost, "the renewal without a reply holds it");
}

/// Charges one unit through the node, and returns the decision and its source.
async fn ask(node: &FallbackStore, key: &'static [u8]) -> (Decision, Source) {
    let limits = limits();
    let mut charges = vec![Charge::new(key, &limits, Cost::ONE).unwrap()];
    let decided = node.decide(request(&mut charges), &mut Vec::new()).await;
    (decided.decision, decided.source)
}

/// Charges `cost` units to a limit of 10 per day, and returns the decision, its source and the
/// remaining units.
async fn charge(node: &FallbackStore, cost: u64) -> (Decision, Source, u64) {
    let limits = Limits::new(vec!["10/d".parse().unwrap()]).unwrap();
    let charge = Charge::new(b"key", &limits, Cost::new(cost).unwrap()).unwrap();
    let (mut charges, mut outcomes) = (vec![charge], Vec::new());
    let decided = node.decide(request(&mut charges), &mut outcomes).await;
    (decided.decision, decided.source, outcomes[0].remaining)
}

/// If a request with a different cost is charged, the earlier cached denials of the key must be
/// dropped. An old cached denial would report too many remaining units and too short a wait.
#[tokio::test]
async fn a_charge_drops_the_cached_denials_of_its_key() {
    let redis = tokio::task::spawn_blocking(RedisServer::start)
        .await
        .unwrap();
    let node = node(&redis.url()).await;
    assert_eq!(
        charge(&node, 5).await,
        (Decision::Admitted, Source::Redis, 5)
    );
    assert_eq!(
        charge(&node, 8).await,
        (Decision::Limited, Source::Redis, 5)
    );
    assert_eq!(
        charge(&node, 8).await,
        (Decision::Limited, Source::Cache, 5)
    );
    assert_eq!(
        charge(&node, 3).await,
        (Decision::Admitted, Source::Redis, 2)
    );
    assert_eq!(
        charge(&node, 8).await,
        (Decision::Limited, Source::Redis, 2)
    );
    assert_eq!(
        charge(&node, 8).await,
        (Decision::Limited, Source::Cache, 2)
    );
}

/// The caller has just searched the cache and found nothing, so the store does not search the cache
/// again.
#[tokio::test]
async fn a_search_of_the_denial_cache_is_not_repeated() {
    let redis = tokio::task::spawn_blocking(RedisServer::start)
        .await
        .unwrap();
    let node = node(&redis.url()).await;
    assert_eq!(charge(&node, 11).await.1, Source::Redis);
    assert_eq!(charge(&node, 11).await.1, Source::Cache);
    let limits = Limits::new(vec!["10/d".parse().unwrap()]).unwrap();
    let cost = Cost::new(11).unwrap();
    let mut charges = vec![Charge::new(b"key", &limits, cost).unwrap()];
    let pending = StoreRequest {
        cache_search: CacheSearch::Skip,
        ..request(&mut charges)
    };
    let decided = node.decide(pending, &mut Vec::new()).await;
    assert_eq!(
        (decided.decision, decided.source),
        (Decision::Limited, Source::Redis)
    );
}

fn is_blocked((decision, source): (Decision, Source), by: Source) -> bool {
    matches!(decision, Decision::Blocked { .. }) && source == by
}

/// A node that has enforced a block is not notified when another node lifts the block, or when
/// Redis loses it. The node nevertheless lifts its copy, even if no request uses the key in the
/// meantime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lifted_block_is_lifted_on_a_node_that_enforced_it() {
    let mut redis = tokio::task::block_in_place(RedisServer::start);
    let (one, other) = (node(&redis.url()).await, node(&redis.url()).await);
    let keys: [&[u8]; 4] = [b"lifted", b"ended", b"kept", b"lost"];
    for key in keys {
        assert!(other.store().block(key, None, "test").await.unwrap());
        assert!(is_blocked(ask(&one, key).await, Source::Redis));
    }
    assert!(other.store().unblock(b"lifted").await.unwrap());
    // Replaces the block that has no end.
    let soon = Some(Span::from_millis(1));
    assert!(other.store().block(b"ended", soon, "test").await.unwrap());
    let blocked = |key: &[u8]| one.local().blocked_keys().iter().any(|own| **own == *key);
    until("the local copies are lifted", || {
        !blocked(b"lifted") && !blocked(b"ended")
    })
    .await;
    assert!(blocked(b"kept") && blocked(b"lost"));

    // During an outage, blocks are still enforced.
    redis.kill();
    until("it is down", || one.stats().health.up == 0).await;
    assert_eq!(
        ask(&one, b"lifted").await,
        (Decision::Admitted, Source::Local)
    );
    assert_eq!(
        ask(&one, b"ended").await,
        (Decision::Admitted, Source::Local)
    );
    assert!(is_blocked(ask(&one, b"kept").await, Source::Local));
    assert!(is_blocked(ask(&one, b"lost").await, Source::Local));
    // The Redis server in this test has no persistence, so the restart loses its data.
    redis.restart();
    until("the block that Redis lost is lifted", || !blocked(b"lost")).await;
}

/// Regression test: after a timed-out call to Redis, the local store used the time from before the
/// call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fallback_after_a_timeout_is_decided_at_the_later_time() {
    let redis = tokio::task::block_in_place(RedisServer::start);
    let node = node_that_waits(&redis.url(), Duration::from_millis(500)).await;
    let start = Timestamp::from_micros(START);
    for (key, millis) in [(&b"short"[..], 400), (b"long", 60_000)] {
        // If there were no block in Redis, the node would drop its copy.
        assert!(node.store().block(key, None, "test").await.unwrap());
        let span = Span::from_millis(millis);
        node.local().block(key, Some(span), "test", start);
    }
    tokio::task::block_in_place(|| redis.ask(&["CLIENT", "PAUSE", "3000", "ALL"]));
    let limits = limits();
    let decide = |key: &'static [u8], receipt: bool| {
        let (node, limits) = (&node, &limits);
        async move {
            let mut charges = vec![Charge::new(key, limits, Cost::ONE).unwrap()];
            let (request, mut outcomes) = (request(&mut charges), Vec::new());
            let decided = if receipt {
                node.reserve(request, &mut outcomes).await.decision
            } else {
                node.decide(request, &mut outcomes).await
            };
            assert_eq!(decided.source, Source::Local);
            decided.decision
        }
    };
    // The decisions run concurrently, because no more requests are sent to an unresponsive server
    // after a few failures.
    let decided = tokio::join!(
        decide(b"short", false),
        decide(b"long", false),
        decide(b"short", true)
    );
    assert_eq!(decided.0, Decision::Admitted);
    assert!(matches!(decided.1, Decision::Blocked { .. }));
    assert_eq!(decided.2, Decision::Admitted);
}

/// The server replies after the caller has stopped waiting, but before the connection times out.
/// The store then refunds the charge of the abandoned request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_slot_is_released() {
    let redis = tokio::task::block_in_place(RedisServer::start);
    let (node, limits) = (node(&redis.url()).await, limits());
    node.store().pin_clock(Timestamp::from_micros(START));
    tokio::task::block_in_place(|| redis.ask(&["CLIENT", "PAUSE", "300", "ALL"]));
    let mut charges = vec![Charge::new(b"key", &limits, Cost::ONE).unwrap()];
    let request = StoreRequest {
        within: Some(Duration::from_millis(100)),
        ..request(&mut charges)
    };
    let DecisionAndReceipt {
        decision: decided,
        receipt,
    } = node.reserve(request, &mut Vec::new()).await;
    assert_eq!(decided.source, Source::Local, "Redis has not answered");
    drop(receipt);
    // The server runs the second group of requests after the abandoned request. Once the server has
    // replied to them, the abandoned request has therefore been charged.
    let held: Vec<_> = [
        reserve(&node, &limits).await,
        reserve(&node, &limits).await,
        reserve(&node, &limits).await,
    ]
    .into();
    assert!(
        held.iter()
            .all(|(decision, ..)| *decision == Decision::Admitted)
    );
    // The refund arrives later. After the refund, a fourth lease can be acquired, but not a fifth.
    let admitted = async {
        loop {
            let last = reserve(&node, &limits).await;
            if last.0 == Decision::Admitted {
                return last;
            }
        }
    };
    let last = tokio::time::timeout(Duration::from_secs(10), admitted).await;
    let last = last.expect("it is released");
    assert_eq!(last.0, Decision::Admitted);
    assert_eq!(last.1, Source::Redis);
    assert_eq!(reserve(&node, &limits).await.0, Decision::Limited);
}
