//! In a flood of new keys, the store never exceeds its maximum number of keys or bytes, and never
//! evicts a key that it must keep.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tidegate_core::{
    Charge, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Rate, Span,
    Timestamp, WhenFull,
};

use crate::{
    strategies::{self, Kind},
    world::Rule,
};

const NOW: u64 = 1_700_000_000_000_000;

/// Returns limits with states of very different sizes: inline states, numbers above 32 bits,
/// growing sliding window logs, counters of 8 KB, and several limits in one rule.
fn all_sizes() -> Vec<Limits> {
    let minute = Span::from_secs(60);
    let limit = |kind: Kind, count, buckets| {
        let rate = Rate {
            count,
            period: minute,
        };
        Limit::new(kind.algorithm(count, rate, buckets)).expect("a valid limit")
    };
    [
        vec![limit(Kind::Gcra, 4, 1)],
        vec![limit(Kind::Gcra, 77_777_777_777_777, 1)],
        vec![limit(Kind::EpochWindow, 77_777_777_777, 1)],
        vec![limit(Kind::FirstRequestWindow, 3, 1)],
        vec![limit(Kind::Log, 100_000, 1)],
        vec![limit(Kind::Log, 8, 1), limit(Kind::Log, 40, 1)],
        vec![limit(Kind::StrictBuckets, 50, 1_000)],
        vec![
            limit(Kind::Weighted, 10, 1),
            limit(Kind::Interval, 9, 1),
            limit(Kind::Log, 5, 1),
        ],
    ]
    .into_iter()
    .map(|limits| Limits::new(limits).expect("a few limits"))
    .collect()
}

#[derive(Clone, Debug)]
struct Wave {
    /// The indexes of the keys that are charged together.
    keys: BTreeSet<u16>,
    sizes: usize,
    cost: u64,
    wait: u64,
}

fn wave() -> impl Strategy<Value = Wave> {
    let key = prop_oneof![1 => 0..10_u16, 3 => any::<u16>()];
    let cost = prop_oneof![4 => Just(1_u64), 2 => 1..=10_u64, 1 => 1..=200_000_u64];
    let wait = prop_oneof![6 => Just(0_u64), 2 => 0..=1_000_000_u64, 1 => 0..=90_000_000_u64];
    (
        prop::collection::btree_set(key, 1..=6),
        0..8_usize,
        cost,
        wait,
    )
        .prop_map(|(keys, sizes, cost, wait)| Wave {
            keys,
            sizes,
            cost,
            wait,
        })
}

fn bounds() -> impl Strategy<Value = MemoryBounds> {
    let when_full = prop::sample::select(vec![WhenFull::Evict, WhenFull::Deny, WhenFull::Allow]);
    let bytes = prop_oneof![Just(1_usize), 65_536..200_000_usize, Just(1 << 30)];
    (1..150_usize, bytes, when_full).prop_map(|(max_keys, max_bytes, when_full)| MemoryBounds {
        max_keys,
        max_bytes,
        when_full,
    })
}

/// Returns a short or a long key. The key usually contains `sizes`, which selects the limits. Every
/// third key does not contain `sizes`, so that the keys are charged under changing limits.
fn key_of(number: u16, sizes: usize) -> Vec<u8> {
    let mut key = number.to_le_bytes().to_vec();
    if !number.is_multiple_of(3) {
        key.push(u8::try_from(sizes).expect("eight sizes"));
    }
    if number.is_multiple_of(5) {
        key.resize(900, 7);
    }
    key
}

/// Returns the instant until which the store must remember the spent units of a key.
fn kept_until(now: u64, outcomes: &[Outcome]) -> u64 {
    let resets = outcomes
        .iter()
        .map(|outcome| outcome.reset_after.as_micros());
    now + resets.max().unwrap_or(0)
}

fn is_pressed(outcomes: &[Outcome]) -> bool {
    let spent = |outcome: &Outcome| !outcome.allowed || outcome.remaining < outcome.limit / 2;
    outcomes.iter().any(spent)
}

proptest! {
    #![proptest_config(strategies::cases(300))]

    #[test]
    fn a_flood_stays_within_bounds_and_keeps_limited_keys(
        bounds in bounds(),
        waves in prop::collection::vec(wave(), 1..200),
    ) {
        let (store, sizes) = (MemoryStore::new(bounds), all_sizes());
        let mut now = NOW;
        let mut kept: BTreeMap<Vec<u8>, (u64, usize)> = BTreeMap::new();
        for wave in &waves {
            now += wave.wait;
            let instant = Timestamp::from_micros(now);
            let rules: Vec<Rule> = wave
                .keys
                .iter()
                .map(|key| Rule {
                    key: key_of(*key, wave.sizes),
                    limits: sizes[wave.sizes].clone(),
                })
                .collect();
            let charges: Vec<Charge<'_>> =
                rules.iter().map(|rule| rule.charge(wave.cost)).collect();
            let (known, before) = (store.stats(), kept.len());
            let (mut foreseen, mut outcomes) = (Vec::new(), Vec::new());
            let peeked = store.check(&charges, instant, Effect::Peek, &mut foreseen);
            prop_assert_eq!(store.stats(), known, "a peek leaves no trace");
            let decision = store.check(&charges, instant, Effect::Charge, &mut outcomes);
            prop_assert_eq!((&peeked, &foreseen), (&decision, &outcomes), "{:?}", wave);
            let stats = store.stats();
            prop_assert!(stats.keys <= bounds.max_keys, "{stats:?} of {bounds:?} after {before}");
            prop_assert!(stats.bytes <= bounds.max_bytes.max(65_536), "{known:?} {stats:?} {wave:?}");
            let evicts = bounds.when_full == WhenFull::Evict;
            prop_assert!(evicts || stats.evicted == 0);
            prop_assert!(bounds.when_full == WhenFull::Allow || stats.admitted_when_full == 0);
            prop_assert!(bounds.when_full != WhenFull::Allow || stats.denied_when_full == 0);
            let is_full = matches!(decision, Decision::Full { .. });
            prop_assert_eq!(stats.denied_when_full - known.denied_when_full, u64::from(is_full));
            let uncounted = stats.admitted_when_full > known.admitted_when_full;
            if let Decision::Full { retry_after } = decision {
                prop_assert!(retry_after.span().is_none_or(|wait| wait > Span::ZERO));
                prop_assert!(outcomes.is_empty());
            } else if uncounted {
                // The store did not count all of the charges, so the test cannot know which units
                // of the keys the store must remember.
                kept.retain(|key, _| rules.iter().all(|rule| rule.key != *key));
            } else {
                let each = outcomes.chunks(sizes[wave.sizes].len());
                for (rule, outcomes) in rules.iter().zip(each) {
                    kept.remove(&rule.key);
                    if !evicts || is_pressed(outcomes) {
                        kept.insert(rule.key.clone(), (kept_until(now, outcomes), wave.sizes));
                    }
                }
            }
            kept.retain(|_, (until, _)| *until > now);
            for (key, (_, size)) in &kept {
                let rule = Rule { key: key.clone(), limits: sizes[*size].clone() };
                store.check(&[rule.charge(1)], instant, Effect::Look, &mut outcomes);
                prop_assert!(kept_until(0, &outcomes) > 0, "{key:?} was forgotten after {wave:?}");
            }
        }
    }
}
