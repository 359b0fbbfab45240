//! Tests two servers with one Redis and different limits for one rule, as during the rollout of a
//! configuration change.

use futures_util::future::join_all;
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, Limit, Limits, Rate, RefillMode, RetryAfter, Span,
    Timestamp,
};
use tidegate_redis::RedisStore;

use crate::{START, differential::strategies::Kind, server::Server};

const HOUR: Span = Span::from_secs(3_600);
const DAY: Span = Span::from_secs(86_400);

fn limits(kind: Kind, quota: u64, rate: (u64, Span)) -> Limits {
    let rate = Rate {
        count: rate.0,
        period: rate.1,
    };
    let quota = quota - u64::from(kind == Kind::Queue);
    Limits::new(vec![Limit::new(kind.algorithm(quota, rate, 4)).unwrap()]).unwrap()
}

/// Charges one unit.
async fn ask(store: &RedisStore, key: &str, limits: &Limits) -> (Decision, RetryAfter) {
    let charge = Charge::new(key.as_bytes(), limits, Cost::ONE).unwrap();
    let mut outcomes = Vec::new();
    let decided = store.check(&[charge], Effect::Charge, &mut outcomes).await;
    let retry = outcomes
        .first()
        .map_or(RetryAfter::NOW, |outcome| outcome.retry_after);
    (decided.unwrap(), retry)
}

/// Sends requests to both stores in turn, and then sends many requests at the same time. Returns
/// the number of admitted requests.
async fn admitted(stores: [&RedisStore; 2], key: &str, limits: [&Limits; 2]) -> usize {
    let mut decisions = Vec::new();
    for turn in 0..300 {
        let server = usize::from(turn % 7 < 3);
        decisions.push(ask(stores[server], key, limits[server]).await);
    }
    for _ in 0..5 {
        let all = (0..64).map(|turn| ask(stores[turn % 2], key, limits[turn % 2]));
        decisions.extend(join_all(all).await);
    }
    let is_admitted = |(decision, _): &&(Decision, RetryAfter)| *decision == Decision::Admitted;
    decisions.iter().filter(is_admitted).count()
}

/// Returns whether limits of this kind count requests in windows of a fixed length. Two counts
/// cannot be compared if their windows have different lengths.
fn has_windows(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Gcra | Kind::TokenBucket | Kind::Interval | Kind::Meter | Kind::Queue
    )
}

#[tokio::test]
async fn servers_with_different_limits_together_admit_the_larger() {
    for server in Server::each() {
        let url = server.url();
        let first = RedisStore::connect(&url, "tg").await.unwrap();
        let second = RedisStore::connect(&url, "tg").await.unwrap();
        for store in [&first, &second] {
            store.pin_clock(Timestamp::from_micros(START + 1));
        }
        for kind in Kind::ALL {
            let slower = [(200, (200, HOUR)), (200, (200, DAY))];
            let fewer = [(200, (200, HOUR)), (100, (100, HOUR))];
            let both = [(200, (200, HOUR)), (20, (20, DAY))];
            let sets = if has_windows(kind) {
                vec![fewer]
            } else {
                vec![slower, fewer, both]
            };
            for set in sets {
                let [more, less] = set.map(|(quota, rate)| limits(kind, quota, rate));
                for (turned, limits) in [[&more, &less], [&less, &more]].into_iter().enumerate() {
                    let key = format!("{kind:?} {set:?} {turned}");
                    let admitted = admitted([&first, &second], &key, limits).await;
                    assert_eq!(admitted, 200, "{key}");
                }
            }
        }
    }
}

/// Units admitted by the larger limit drain at the rate of that limit, even if the smaller limit
/// has a lower rate.
#[tokio::test]
async fn a_count_above_the_smaller_limit_reports_when_it_has_drained() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    store.pin_clock(Timestamp::from_micros(START));
    let more = limits(Kind::TokenBucket, 200, (200, Span::from_secs(60)));
    let less = limits(Kind::TokenBucket, 100, (100, Span::from_secs(60)));
    let bucket = |limits| Charge::new(b"key", limits, Cost::new(200).unwrap()).unwrap();
    let (all, mut outcomes) = ([bucket(&more)], Vec::new());
    let spent = store.check(&all, Effect::Charge, &mut outcomes).await;
    assert_eq!(spent, Ok(Decision::Admitted));
    let wait = Span::from_micros(101 * 300_000);
    for _ in 0..2 {
        let denied = ask(&store, "key", &less).await;
        assert_eq!(denied, (Decision::Limited, RetryAfter::After(wait)));
    }
    store.pin_clock(Timestamp::from_micros(START + wait.as_micros() - 1));
    assert_eq!(ask(&store, "key", &less).await.0, Decision::Limited);
    store.pin_clock(Timestamp::from_micros(START + wait.as_micros() + 600_000));
    assert_eq!(ask(&store, "key", &less).await.0, Decision::Admitted);
}

/// Tests rates that do not fit into the short encoding of a value, and rates whose unit is not an
/// integer number of microseconds.
#[tokio::test]
async fn limits_of_any_form_are_stored_with_the_state() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    store.pin_clock(Timestamp::from_micros(START));
    let bucket = |count, micros, mode| {
        let limit = Limit::new(Algorithm::TokenBucket {
            capacity: 10,
            refill: Rate {
                count,
                period: Span::from_micros(micros),
            },
            mode,
        });
        Limits::new(vec![limit.unwrap()]).unwrap()
    };
    let rates = [
        (1, 60_000_000),
        (7, 60_000_000),
        (1, 268_435_457),
        (600, 999_983_000_001),
        (999_983, 86_400_000_000),
    ];
    for mode in [RefillMode::Continuous, RefillMode::Interval] {
        for (count, micros) in rates {
            let (first, second) = (bucket(1, 3_600_000_000, mode), bucket(count, micros, mode));
            let key = format!("{mode:?} {count} {micros}");
            for turn in 0..10 {
                let limits = [&first, &second][turn % 2];
                let decision = ask(&store, &key, limits).await.0;
                assert_eq!(decision, Decision::Admitted, "{key} {turn}");
            }
            for limits in [&first, &second, &first] {
                let denied = ask(&store, &key, limits).await.0;
                assert_eq!(denied, Decision::Limited, "{key}");
            }
        }
    }
}
