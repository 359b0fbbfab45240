//! Arbitrary bytes as a snapshot. They must be rejected or restored without a panic. A restored
//! store must be able to decide requests, and to save a valid snapshot.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, Limit, LimitSpec, Limits, MemoryBounds, MemoryStore, Span,
    Timestamp, notation,
};

const NOW: u64 = 1_700_000_000_000_000;
const MAX_BYTES: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let bounds = MemoryBounds {
        max_keys: 64,
        max_bytes: MAX_BYTES,
        ..MemoryBounds::default()
    };
    let store = MemoryStore::new(bounds);
    let _ = store.restore(bytes, Timestamp::from_micros(NOW));
    assert!(store.stats().keys <= 64 && store.stats().bytes <= MAX_BYTES);
    for limits in all_limits() {
        for (after, cost) in [(0, 1), (1, 3), (1_000_000, 1), (90_000_000, 2)] {
            let cost = Cost::new(cost).expect("a small cost");
            let charge = Charge::new(b"k", &limits, cost).expect("a short key");
            let now = Timestamp::from_micros(NOW + after);
            for effect in [Effect::Look, Effect::Peek, Effect::Charge] {
                store.check(&[charge], now, effect, &mut Vec::new());
            }
        }
    }
    let (mut saved, later) = (Vec::new(), Timestamp::from_micros(NOW + 90_000_000));
    (0..store.parts()).for_each(|part| store.save(part, later, &mut saved));
    let again = MemoryStore::new(bounds);
    assert!(
        again.restore(&saved, later).is_ok(),
        "a saved snapshot is valid"
    );
});

/// Returns limits for each kind of state. The seeds in the corpus were saved with these limits.
fn all_limits() -> Vec<Limits> {
    let limit = |text: &str, name| -> Limit {
        let rate = notation::rate(text).expect("a rate");
        LimitSpec::shorthand(rate, name)
            .build()
            .expect("a valid limit")
    };
    let buckets = LimitSpec {
        buckets: Some(6),
        ..LimitSpec::shorthand(
            notation::rate("9/min").expect("a rate"),
            AlgorithmName::SlidingWindowCounter,
        )
    };
    let interval = LimitSpec {
        refill_mode: Some(tidegate_core::RefillMode::Interval),
        ..LimitSpec::shorthand(
            notation::rate("5/min").expect("a rate"),
            AlgorithmName::TokenBucket,
        )
    };
    let first_request = LimitSpec {
        window: Some(Span::from_secs(60)),
        anchor: Some(tidegate_core::Anchor::FirstRequest),
        ..LimitSpec::shorthand(
            notation::rate("5/min").expect("a rate"),
            AlgorithmName::FixedWindow,
        )
    };
    [
        vec![limit("7/s", AlgorithmName::Gcra)],
        vec![interval.build().expect("a valid limit")],
        vec![first_request.build().expect("a valid limit")],
        vec![limit("7/min", AlgorithmName::SlidingWindowLog)],
        vec![buckets.build().expect("a valid limit")],
        vec![limit("7/min", AlgorithmName::SlidingWindowCounter)],
        vec![
            limit("3/s", AlgorithmName::SlidingWindowLog),
            limit("20/min", AlgorithmName::FixedWindow),
        ],
    ]
    .into_iter()
    .map(|limits| Limits::new(limits).expect("a few limits"))
    .collect()
}
