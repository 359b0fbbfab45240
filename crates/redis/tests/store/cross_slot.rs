//! Tests requests with limits in several slots of a cluster. The tests send many requests at the
//! same time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, Outcome, Rate, Span, Timestamp,
};
use tidegate_redis::{Address, Redis, RedisSettings, RedisStore, Topology};
use tokio::runtime::Handle;

use crate::{
    START,
    differential::strategies::Kind,
    support::{RedisCluster, RedisServer},
};

/// Returns a store on the cluster of the server at `url`.
pub(crate) async fn store(url: &str) -> RedisStore {
    let (address, _) = Address::parse(url).unwrap();
    let settings = RedisSettings {
        timeout: Duration::from_secs(5),
        ..RedisSettings::new(Topology::Cluster {
            seeds: vec![address],
        })
    };
    let redis = Redis::start(settings, &Handle::current());
    redis.wait_for_first_attempt().await.unwrap();
    RedisStore::new(Arc::new(redis), "tg")
}

/// Returns a limit of this kind with `count` units, which refills by `rate` units per `period`.
fn limits(kind: Kind, count: u64, rate: u64, period: Span) -> Limits {
    let rate = Rate {
        count: rate,
        period,
    };
    // A queue with `count` places admits one more request, which does not wait.
    let count = count - u64::from(kind == Kind::Queue);
    Limits::new(vec![Limit::new(kind.algorithm(count, rate, 2)).unwrap()]).unwrap()
}

/// A limit that all clients share, and one limit for each of eight clients.
struct Race {
    store: RedisStore,
    common: Limits,
    own: Limits,
}

impl Race {
    const OWNERS: usize = 8;

    async fn ask(&self, owner: usize, effect: Effect) -> (Decision, Vec<u64>) {
        let key = format!("owner {owner}");
        let one = |key, limits| Charge::new(key, limits, Cost::ONE).unwrap();
        let charges = [one(b"common", &self.common), one(key.as_bytes(), &self.own)];
        let mut outcomes = Vec::new();
        let decision = self
            .store
            .check(&charges, effect, &mut outcomes)
            .await
            .unwrap();
        (
            decision,
            outcomes.iter().map(|outcome| outcome.remaining).collect(),
        )
    }

    /// Sends `requests` requests at the same time, and returns the number of admitted requests per
    /// client.
    async fn run(&self, requests: usize) -> [u64; Self::OWNERS] {
        let all = (0..requests).map(|number| self.ask(number % Self::OWNERS, Effect::Charge));
        let mut admitted = [0; Self::OWNERS];
        for (number, (decision, _)) in join_all(all).await.into_iter().enumerate() {
            admitted[number % Self::OWNERS] += u64::from(decision == Decision::Admitted);
        }
        admitted
    }
}

/// Many concurrent requests compete for few units. No limit is ever exceeded, and once all replies
/// have arrived, no denied request is charged.
async fn race(store: &RedisStore, kind: Kind) {
    store.pin_clock(Timestamp::from_micros(START));
    let day = Span::from_secs(86_400);
    let race = Race {
        store: store.clone(),
        common: limits(kind, 40, 40, day),
        own: limits(kind, 7, 7, day),
    };
    let mut admitted = [0; Race::OWNERS];
    for _ in 0..4 {
        let more = race.run(60).await;
        admitted
            .iter_mut()
            .zip(more)
            .for_each(|(sum, more)| *sum += more);
        let total: u64 = admitted.iter().sum();
        assert!(total <= 40, "{kind:?}: {total} of 40");
        for (owner, admitted) in admitted.into_iter().enumerate() {
            assert!(admitted <= 7, "{kind:?}: {admitted} of 7");
            let (_, left) = race.ask(owner, Effect::Look).await;
            let expected = [40 - total, 7 - admitted];
            if kind == Kind::Queue {
                // In a queue, only the last request can be refunded, so other denied requests may
                // stay charged.
                assert!(left[0] <= expected[0] && left[1] <= expected[1], "{left:?}");
            } else {
                assert_eq!(left, expected, "{kind:?}");
            }
        }
    }
    if kind != Kind::Queue {
        assert_eq!(
            admitted.iter().sum::<u64>(),
            40,
            "{kind:?}: all of it can be had"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_share_limits_in_several_slots() {
    for program in ["redis-server", "valkey-server"] {
        let server = tokio::task::block_in_place(|| RedisServer::slotted(program));
        for kind in Kind::ALL {
            server.ask(&["FLUSHALL"]);
            race(&store(&server.url()).await, kind).await;
        }
    }
}

/// Returns the number of scripts that the server has run since the last call.
fn scripts_run(server: &RedisServer) -> u64 {
    let stats = server.ask(&["INFO", "commandstats"]);
    assert_eq!(server.ask(&["CONFIG", "RESETSTAT"]), "+OK");
    let runs = stats
        .lines()
        .filter(|line| line.starts_with("cmdstat_eval"));
    let calls = runs.map(|line| {
        let (_, calls) = line.split_once("calls=").unwrap();
        calls.split(',').next().unwrap().parse::<u64>().unwrap()
    });
    calls.sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_denials_charge_other_slots_only_once() {
    let server = tokio::task::block_in_place(|| RedisServer::slotted("redis-server"));
    let day = Span::from_secs(86_400);
    let race = Race {
        store: store(&server.url()).await,
        common: limits(Kind::Gcra, 1_000, 1, day),
        own: limits(Kind::Gcra, 2, 1, day),
    };
    let charge = |owner| race.ask(owner, Effect::Charge);
    // The first three requests make the server cache the scripts. Two requests of the first client
    // are admitted, and one is denied.
    for _ in 0..3 {
        charge(0).await;
    }
    for _ in 0..16 {
        race.ask(0, Effect::Peek).await;
        race.store.reset(b"owner 0").await.unwrap();
        assert_eq!(charge(0).await.0, Decision::Admitted);
    }
    race.store.reset(b"owner 0").await.unwrap();
    scripts_run(&server);
    for questions in [2, 2] {
        assert_eq!(charge(0).await.0, Decision::Admitted);
        assert_eq!(scripts_run(&server), questions, "one round trip");
    }
    assert_eq!(charge(0).await.0, Decision::Limited);
    assert_eq!(scripts_run(&server), 3, "charged there, and refunded");
    for _ in 0..5 {
        assert_eq!(charge(0).await.0, Decision::Limited);
        assert_eq!(scripts_run(&server), 2, "checked, and not charged");
    }
    assert_eq!(charge(1).await.0, Decision::Admitted);
    assert_eq!(scripts_run(&server), 4, "checked, and then charged");
}

/// If the caller stops waiting before the slots have replied, the request is not charged in any
/// slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_request_is_refunded_in_every_slot() {
    let server = tokio::task::block_in_place(|| RedisServer::slotted("redis-server"));
    let store = store(&server.url()).await;
    store.pin_clock(Timestamp::from_micros(START));
    let day = Span::from_secs(86_400);
    let limits = limits(Kind::EpochWindow, 10, 10, day);
    let one = |key| Charge::new(key, &limits, Cost::ONE).unwrap();
    let charges = [one(b"common"), one(b"own")];
    let mut outcomes = Vec::new();
    let kept = store.reserve(&charges, &mut outcomes).await.unwrap();
    assert_eq!(kept.0, Decision::Admitted);
    tokio::task::block_in_place(|| server.ask(&["CLIENT", "PAUSE", "300", "ALL"]));
    let asked = store.reserve(&charges, &mut outcomes);
    let given_up = tokio::time::timeout(Duration::from_millis(100), asked).await;
    assert!(given_up.is_err(), "Redis is paused");
    // The server executes this request after the abandoned request. Therefore the abandoned request
    // has been charged in both slots by then.
    let next = store.check(&charges, Effect::Charge, &mut outcomes).await;
    assert_eq!(next, Ok(Decision::Admitted));
    let remaining = |outcomes: &[Outcome]| -> Vec<u64> {
        outcomes.iter().map(|outcome| outcome.remaining).collect()
    };
    let until = now() + Duration::from_secs(10);
    while remaining(&outcomes) != [8, 8] {
        assert!(now() < until, "{outcomes:?}");
        let looked = store.check(&charges, Effect::Look, &mut outcomes).await;
        assert_eq!(looked, Ok(Decision::Admitted));
    }
}

/// There are three primaries, each with its own clock. Every limit is exhausted, and no limit is
/// exceeded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_on_several_primaries_are_used_up_and_never_exceeded() {
    let cluster = tokio::task::block_in_place(RedisCluster::start);
    let second = Span::from_secs(1);
    let race = Race {
        store: store(&cluster.url()).await,
        common: limits(Kind::TokenBucket, 100, 400, second),
        own: limits(Kind::TokenBucket, 50, 100, second),
    };
    let (began, mut admitted, mut asked) = (now(), [0; Race::OWNERS], 0);
    while now().duration_since(began) < Duration::from_secs(1) {
        let more = race.run(64).await;
        admitted
            .iter_mut()
            .zip(more)
            .for_each(|(sum, more)| *sum += more);
        asked += 64;
    }
    let seconds = now().duration_since(began).as_secs_f64();
    let total: u64 = admitted.iter().sum();
    println!("{total} of {asked} admitted in {seconds:.3} s, {admitted:?}");
    let most = |capacity: f64, rate: f64| capacity + rate * seconds;
    #[expect(clippy::cast_precision_loss, reason = "some hundreds")]
    let within = |count: u64, most: f64| count as f64 <= most;
    assert!(within(total, most(100.0, 400.0)), "{total} in {seconds} s");
    for admitted in admitted {
        assert!(
            within(admitted, most(50.0, 100.0)),
            "{admitted} in {seconds} s"
        );
    }
    // If the machine is too slow to send enough requests, all requests are admitted.
    let spent = !within(total, most(100.0, 400.0) / 2.0) || total * 2 > asked;
    assert!(spent, "{total} of {asked} in {seconds} s");
}

#[expect(
    clippy::disallowed_methods,
    reason = "the servers' clocks cannot be pinned here"
)]
fn now() -> Instant {
    Instant::now()
}
