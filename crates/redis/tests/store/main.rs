//! Tests the store on real servers, both Redis and Valkey. Each test starts its own servers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clock;
mod cross_slot;
mod differential;
mod expiry_queue;
mod fallback;
mod moving;
mod operate;
mod partial_settlement;
mod refunds;
mod renewal;
mod rollout;
mod server;
#[path = "../support/mod.rs"]
mod support;
mod vectors;

use server::Server;
use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore,
    Outcome, RefillMode, Timestamp, notation,
};
use tidegate_redis::RedisStore;

/// An instant in 2026.
const START: u64 = 1_767_225_600_000_000;

/// Returns a runtime on the current thread, for tests that do not run on a runtime.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

fn limits(rates: &[&str]) -> Limits {
    let limit = |text: &&str| {
        let rate = notation::rate(text).unwrap();
        LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)
            .build()
            .unwrap()
    };
    Limits::new(rates.iter().map(limit).collect()).unwrap()
}

/// Sends the same request to both stores at one instant, and checks that the replies are equal.
async fn same(
    redis: &RedisStore,
    memory: &MemoryStore,
    charges: &[Charge<'_>],
    now: Timestamp,
    effect: Effect,
) -> Decision {
    let (mut expected, mut got) = (Vec::<Outcome>::new(), Vec::new());
    let decision = memory.check(charges, now, effect, &mut expected);
    redis.pin_clock(now);
    let there = redis.check(charges, effect, &mut got).await.unwrap();
    assert_eq!((there, got), (decision.clone(), expected));
    decision
}

#[tokio::test]
async fn schedules_decide_as_in_memory() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let sets = [
            limits(&["3/s"]),
            limits(&["7/s"]),
            limits(&["3/s", "5/min"]),
            limits(&["9/s"]).in_shadow(true),
        ];
        for step in 0..200_u64 {
            let now = Timestamp::from_micros(START + step * 41_003);
            let charges: Vec<Charge<'_>> = (0..sets.len())
                .filter(|set| step >> (set % 3) & 1 == 0)
                .map(|set| {
                    let key = [b"one", b"two", b"six", b"ten"][set];
                    Charge::new(key, &sets[set], Cost::new(1 + step % 4).unwrap()).unwrap()
                })
                .collect();
            let effect = [Effect::Charge, Effect::Charge, Effect::Peek, Effect::Look]
                [(step % 7 % 4) as usize];
            if !charges.is_empty() {
                same(&redis, &memory, &charges, now, effect).await;
            }
        }
    }
}

/// Tests sliding window logs that are long enough to be changed in place. Some windows of the logs
/// become partly empty, some become completely empty, and some never become empty.
#[tokio::test]
async fn long_logs_decide_as_in_memory() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let log = |rates: &[&str]| {
            let limit = |text: &&str| {
                let rate = notation::rate(text).unwrap();
                let spec = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog);
                spec.build().unwrap()
            };
            Limits::new(rates.iter().map(limit).collect()).unwrap()
        };
        let sets = [log(&["900/10s"]), log(&["1500/min", "300/s", "4000/h"])];
        let (mut now, mut longest) = (START, 0);
        for step in 0..4_000_u64 {
            now += match step % 1_000 {
                999 => 70_000_000,
                500 => 9_000_000,
                part => [0, 1, 700, 4_000, 20_000][(part * 7 % 5) as usize],
            };
            let units = match step % 97 {
                96 => 2_500,
                part => 1 + part % 3,
            };
            let effect = match step % 50 {
                49 => Effect::Peek,
                48 => Effect::Refund,
                _ => Effect::Charge,
            };
            let (key, limits) = (
                [b"one", b"two"][(step % 2) as usize],
                &sets[(step % 2) as usize],
            );
            let charge = Charge::new(key, limits, Cost::new(units).unwrap()).unwrap();
            same(
                &redis,
                &memory,
                &[charge],
                Timestamp::from_micros(now),
                effect,
            )
            .await;
            if step % 400 == 0 {
                let bytes = server.command(&["STRLEN", "tg:two"]);
                longest = longest.max(bytes.parse().unwrap());
            }
        }
        assert!(longest > 8_000, "{longest} bytes are not a long log");
    }
}

#[tokio::test]
async fn a_state_of_changed_limits_is_converted() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let old = std::sync::Arc::new(limits(&["20/min"]));
        // The memory store needs the former limits. In Redis, the stored state itself contains the
        // parameters of the former limits.
        let second = std::sync::Arc::new(limits(&["30/min"]).inheriting_from(&old));
        let third = std::sync::Arc::new(limits(&["7/s", "40/min"]).inheriting_from(&second));
        let fourth = std::sync::Arc::new(limits(&["20/min"]).inheriting_from(&third));
        for (second, limits) in [(0, &old), (1, &second), (2, &third), (3, &fourth)] {
            for effect in [Effect::Peek, Effect::Charge, Effect::Charge] {
                let charge = Charge::new(b"user:1", limits, Cost::new(4).unwrap()).unwrap();
                let now = Timestamp::from_micros(START + second * 1_000_000);
                same(&redis, &memory, &[charge], now, effect).await;
            }
        }
    }
}

/// Returns a token bucket of this size, refilled with one unit per hour.
fn bucket(units: u64, refill_mode: Option<RefillMode>, count_denied: bool) -> Limits {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::TokenBucket),
        capacity: Some(units),
        refill: Some(notation::rate("1/h").unwrap()),
        refill_mode,
        count_denied: Some(count_denied),
        ..LimitSpec::default()
    };
    Limits::new(vec![spec.build().unwrap()]).unwrap()
}

#[tokio::test]
async fn a_server_with_a_lower_limit_takes_nothing_from_others() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let modes = [None, Some(RefillMode::Interval)];
        for (mode, counts) in modes
            .into_iter()
            .flat_map(|mode| [(mode, false), (mode, true)])
        {
            let (more, less) = (bucket(10, mode, false), bucket(5, mode, counts));
            let key = format!("{mode:?}{counts}");
            let mut admitted = 0;
            for _ in 0..3 {
                let now = Timestamp::from_micros(START);
                for limits in [&more; 11].into_iter().chain([&less]) {
                    let charge = Charge::new(key.as_bytes(), limits, Cost::ONE).unwrap();
                    let decision = same(&redis, &memory, &[charge], now, Effect::Charge).await;
                    admitted += usize::from(decision == Decision::Admitted);
                }
            }
            assert_eq!(admitted, 10, "{key}");
        }
    }
}

#[tokio::test]
async fn the_server_clock_decides_unless_pinned() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let limits = limits(&["2/d"]);
        let charge = Charge::new(b"user:1", &limits, Cost::ONE).unwrap();
        let mut outcomes = Vec::new();
        for expected in [Decision::Admitted, Decision::Admitted, Decision::Limited] {
            assert_eq!(
                redis
                    .check(&[charge], Effect::Charge, &mut outcomes)
                    .await
                    .unwrap(),
                expected
            );
        }
        let wait = outcomes[0].retry_after.span().unwrap().as_secs_ceil();
        assert!((43_190..=43_200).contains(&wait), "{wait} s");
    }
}

#[tokio::test]
async fn a_foreign_value_under_a_key_is_reported() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let limits = limits(&["2/d"]);
        let charge = Charge::new(b"user:1", &limits, Cost::ONE).unwrap();
        server.command(&["SET", "tg:user:1", "hello"]);
        let error = redis
            .check(&[charge], Effect::Charge, &mut Vec::new())
            .await
            .unwrap_err();
        assert!(error.to_string().contains("tg:user:1"), "{error}");
        server.command(&["DEL", "tg:user:1"]);
        server.command(&["LPUSH", "tg:user:1", "hello"]);
        let error = redis
            .check(&[charge], Effect::Charge, &mut Vec::new())
            .await
            .unwrap_err();
        assert!(error.to_string().contains("a different type"), "{error}");
    }
}
