//! Places that are renewed after the numbers have changed, just before and just after all that was left has expired.

use std::sync::Arc;

use tidegate_core::{
    Algorithm, Charge, Cost, Effect, Limit, Limits, MemoryBounds, MemoryStore, Rate, Span,
    Timestamp,
};
use tidegate_redis::RedisStore;

use crate::{START, differential::strategies::Kind, same, server::Server};

/// A limit of that kind, and places beside it.
fn limits(kind: Kind, count: u64, period: Span, lease: Span) -> Limits {
    let rate = Rate { count, period };
    let places = Algorithm::Concurrency { limit: 9, lease };
    let both = [kind.algorithm(count, rate, 4), places];
    Limits::new(both.map(|algorithm| Limit::new(algorithm).unwrap()).into()).unwrap()
}

/// Takes a place for an hour, changes the limits to others that are over soon, and renews the place: when one of these has reset, or
/// after so many times 5 ms; a microsecond before that, then, or one after.
async fn renew(redis: &RedisStore, (kind, millis): (Kind, [u64; 2]), (which, nudge): (usize, u64)) {
    let hour = Span::from_secs(3_600);
    let [period, lease] = millis.map(|millis| Span::from_micros(1_000 * millis));
    let old = Arc::new(limits(kind, 4, hour, hour));
    let new = limits(kind, 4, period, lease).succeeding(&old);
    let key = format!("{kind:?} {millis:?} {which} {nudge}");
    let charge = |limits| Charge::new(key.as_bytes(), limits, Cost::ONE).unwrap();
    let at = |micros| Timestamp::from_micros(START + micros);

    // No store's clock ever goes back.
    let redis = &redis.unpinned();
    let bounds = MemoryBounds {
        max_keys: 1_000,
        ..MemoryBounds::default()
    };
    let memory = MemoryStore::new(bounds);
    redis.pin_clock(at(0));
    let (mut here, mut there) = (Vec::new(), Vec::new());
    let (_, mut receipt) = memory.reserve(&[charge(&old)], at(0), &mut here);
    let (_, mut remote) = redis.reserve(&[charge(&old)], &mut there).await.unwrap();
    assert_eq!(there, here);
    same(redis, &memory, &[charge(&new)], (at(999), Effect::Charge)).await;

    memory.check(&[charge(&new)], at(999), Effect::Look, &mut here);
    let reset = here
        .get(which)
        .map(|outcome| outcome.reset_after.as_micros());
    let now = 998 + nudge + reset.unwrap_or(5_000 * which as u64);
    redis.pin_clock(at(now));
    let renewed = redis.renew(&[charge(&old)], &mut remote).await.unwrap();
    let expected = memory.renew(&[charge(&old)], &mut receipt, at(now));
    assert_eq!(renewed, expected, "{key}");
    for later in [0, 1_000, 20_000, 70_000, 3_600_000_000] {
        same(
            redis,
            &memory,
            &[charge(&old)],
            (at(now + later), Effect::Look),
        )
        .await;
    }
}

#[tokio::test]
async fn a_place_is_renewed_in_what_has_expired_as_in_memory() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        for kind in Kind::ALL {
            for millis in [[5, 12], [50, 12]] {
                for at in (0..25).flat_map(|which| [(which, 0), (which, 1), (which, 2)]) {
                    renew(&redis, (kind, millis), at).await;
                }
            }
        }
    }
}
