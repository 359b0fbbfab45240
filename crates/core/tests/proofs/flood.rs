//! The store under a flood of keys: never over its bounds, never forgetting what it must keep, and empty
//! again once everything has ended.

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

/// Limits of all sizes in memory: plain, wide, logs that grow, counters of 8 KB, several at once.
fn all_sizes() -> Vec<Limits> {
    let minute = Span::from_secs(60);
    let limit = |kind: Kind, count, buckets| {
        let rate = Rate {
            count,
            period: minute,
        };
        Limit::new(kind.algorithm(count, rate, buckets)).expect("a sound limit")
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
    /// Numbers of the keys that are charged together.
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

/// A key, long or short; the limits that it was first charged with are part of it or not, so that some
/// keys change their limits.
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

/// What a key has spent is worth keeping until this instant.
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
    fn a_flood_stays_within_bounds_and_keeps_what_is_limited(
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
                .map(|key| Rule { key: key_of(*key, wave.sizes), limits: sizes[wave.sizes].clone() })
                .collect();
            let charges: Vec<Charge<'_>> = rules.iter().map(|rule| rule.charge(wave.cost)).collect();
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
            prop_assert!(bounds.when_full == WhenFull::Allow || stats.newcomers_allowed == 0);
            prop_assert!(bounds.when_full != WhenFull::Allow || stats.newcomers_denied == 0);
            let is_full = matches!(decision, Decision::Full { .. });
            prop_assert_eq!(stats.newcomers_denied - known.newcomers_denied, u64::from(is_full));
            let uncounted = stats.newcomers_allowed > known.newcomers_allowed;
            if let Decision::Full { retry_after } = decision {
                prop_assert!(retry_after.span().is_none_or(|wait| wait > Span::ZERO));
                prop_assert!(outcomes.is_empty());
            } else if uncounted {
                // Nobody can tell which of them; those that changed their limits are not what they were.
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

fn hourly(count: u64) -> Limits {
    let rate = Rate {
        count,
        period: Span::from_secs(3_600),
    };
    Limits::new(vec![
        Limit::new(Kind::Log.algorithm(count, rate, 1)).expect("a sound limit"),
    ])
    .expect("one limit")
}

fn small(when_full: WhenFull) -> MemoryStore {
    MemoryStore::new(MemoryBounds {
        max_keys: 500,
        when_full,
        ..MemoryBounds::default()
    })
}

/// Charges once for each of `keys`; answers how often each decision was made: admitted, limited, full.
fn flood(store: &MemoryStore, limits: &Limits, keys: std::ops::Range<u32>) -> [usize; 3] {
    let mut decisions = [0; 3];
    for key in keys {
        let rule = Rule {
            key: key.to_le_bytes().to_vec(),
            limits: limits.clone(),
        };
        let now = Timestamp::from_micros(NOW);
        match store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new()) {
            Decision::Admitted => decisions[0] += 1,
            Decision::Limited => decisions[1] += 1,
            _ => decisions[2] += 1,
        }
    }
    decisions
}

#[test]
fn a_full_store_evicts_what_has_hardly_been_used() {
    let store = small(WhenFull::Evict);
    assert_eq!(flood(&store, &hourly(1), 0..100), [100, 0, 0]);
    let [admitted, limited, full] = flood(&store, &hourly(10), 1_000..5_000);
    assert_eq!((admitted + full, limited), (4_000, 0));
    assert!(full < 400, "a few met nothing but limited keys: {full}");
    assert_eq!(
        flood(&store, &hourly(1), 0..100),
        [0, 100, 0],
        "the limited are kept"
    );
    let stats = store.stats();
    assert_eq!((stats.keys, stats.evicted), (500, admitted as u64 - 400));
    assert_eq!((stats.expired, stats.newcomers_denied), (0, full as u64));
    assert_eq!(stats.newcomers_allowed, 0);
}

#[test]
fn a_full_store_of_limited_keys_denies_newcomers() {
    let store = small(WhenFull::Evict);
    assert_eq!(flood(&store, &hourly(1), 0..600), [500, 0, 100]);
    assert_eq!(
        (store.stats().keys, store.stats().newcomers_denied),
        (500, 100)
    );
}

#[test]
fn a_full_store_denies_newcomers_if_told_so() {
    let store = small(WhenFull::Deny);
    assert_eq!(flood(&store, &hourly(10), 0..600), [500, 0, 100]);
    assert_eq!(
        (store.stats().keys, store.stats().newcomers_denied),
        (500, 100)
    );
}

#[test]
fn a_full_store_lets_newcomers_pass_uncounted_if_told_so() {
    let store = small(WhenFull::Allow);
    assert_eq!(flood(&store, &hourly(1), 0..600), [600, 0, 0]);
    assert_eq!(flood(&store, &hourly(1), 0..600), [100, 500, 0]);
    assert_eq!(
        (store.stats().keys, store.stats().newcomers_allowed),
        (500, 200)
    );
}

/// A full store has room for the newcomer that a peek was told of only if the charge after it finds some too.
#[test]
fn a_peek_foresees_whether_there_is_room() {
    for (when_full, quota, expected) in [
        (WhenFull::Deny, 10, None),
        (WhenFull::Evict, 1, None),
        (WhenFull::Evict, 10, Some(Decision::Admitted)),
        (WhenFull::Allow, 1, Some(Decision::Admitted)),
    ] {
        let store = small(when_full);
        flood(&store, &hourly(quota), 0..500);
        let full = store.stats();
        let newcomer = Rule {
            key: b"newcomer".to_vec(),
            limits: hourly(quota),
        };
        let ask = |effect| {
            let now = Timestamp::from_micros(NOW);
            store.check(&[newcomer.charge(1)], now, effect, &mut Vec::new())
        };
        let peeked = ask(Effect::Peek);
        assert_eq!(store.stats(), full, "{when_full:?}: nobody made way");
        match expected {
            Some(decision) => assert_eq!(peeked, decision, "{when_full:?}"),
            None => assert!(matches!(peeked, Decision::Full { .. }), "{when_full:?}"),
        }
        assert_eq!(
            ask(Effect::Look),
            Decision::Admitted,
            "to look takes no room"
        );
        assert_eq!(ask(Effect::Charge), peeked, "{when_full:?}");
    }
}

/// A log of an hour's admissions, in a store with room for 64 KiB, charged until it cannot grow any more; then once more.
fn overgrown(when_full: WhenFull) -> (MemoryStore, Rule, Timestamp, Decision) {
    let store = MemoryStore::new(MemoryBounds {
        max_bytes: 1,
        when_full,
        ..MemoryBounds::default()
    });
    let rule = Rule {
        key: b"busy".to_vec(),
        limits: hourly(100_000),
    };
    let mut decision = Decision::Admitted;
    let mut now = NOW;
    while store.stats().newcomers_allowed + store.stats().newcomers_denied == 0 {
        assert_eq!(decision, Decision::Admitted);
        now += 1;
        let now = Timestamp::from_micros(now);
        decision = store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new());
    }
    (store, rule, Timestamp::from_micros(now), decision)
}

#[test]
fn a_log_that_cannot_grow_is_denied() {
    for when_full in [WhenFull::Deny, WhenFull::Evict] {
        let (store, rule, now, decision) = overgrown(when_full);
        assert!(matches!(decision, Decision::Full { .. }), "{decision:?}");
        let mut outcomes = Vec::new();
        store.check(&[rule.charge(1)], now, Effect::Refund, &mut outcomes);
        assert!(outcomes[0].allowed, "what is given back needs no room");
        store.check(&[rule.charge(1)], now, Effect::Charge, &mut outcomes);
        assert_eq!(outcomes.len(), 1, "there is room for one again");
    }
}

/// It did not, although newcomers did.
#[test]
fn a_log_that_cannot_grow_passes_uncounted_if_told_so() {
    let (store, rule, now, decision) = overgrown(WhenFull::Allow);
    assert_eq!(decision, Decision::Admitted);
    let mut outcomes = Vec::new();
    store.check(&[rule.charge(1)], now, Effect::Look, &mut outcomes);
    let left = outcomes[0].remaining;
    assert!(left > 90_000, "{left}");
    for _ in 0..10 {
        let decision = store.check(&[rule.charge(1)], now, Effect::Charge, &mut outcomes);
        assert_eq!(
            (decision, outcomes[0].remaining),
            (Decision::Admitted, left - 1)
        );
    }
    let decision = store.check(&[rule.charge(left + 1)], now, Effect::Charge, &mut outcomes);
    assert_eq!(
        decision,
        Decision::Limited,
        "more than is left, counted or not"
    );
    assert_eq!(store.stats().newcomers_allowed, 12);
}

/// What is larger than the whole store never fits, and says so.
#[test]
fn what_fits_into_no_store_is_never_to_be_tried_again() {
    let store = MemoryStore::new(MemoryBounds {
        max_bytes: 1,
        ..MemoryBounds::default()
    });
    let minute = Rate {
        count: 60,
        period: Span::from_secs(60),
    };
    let limit =
        Limit::new(Kind::StrictBuckets.algorithm(60, minute, 1_000)).expect("8 KB of counts");
    let rule = Rule::new(b"large", vec![limit; 16], false);
    let now = Timestamp::from_micros(NOW);
    let decision = store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new());
    let retry_after = tidegate_core::Retry::Never;
    assert_eq!(decision, Decision::Full { retry_after });
}

/// Once everything has ended, decisions about one key alone empty the store, and its memory goes too.
#[test]
fn time_empties_the_store() {
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 2_000,
        ..MemoryBounds::default()
    });
    flood(&store, &hourly(10), 0..2_000);
    let full = store.stats();
    let rule = Rule::new(
        b"one",
        hourly(1_000_000).iter().take(1).cloned().collect(),
        false,
    );
    let later = Timestamp::from_micros(NOW).after(Span::from_secs(3_600));
    for _ in 0..2_000 * 16 {
        store.check(&[rule.charge(1)], later, Effect::Charge, &mut Vec::new());
    }
    let stats = store.stats();
    assert_eq!((stats.keys, stats.expired, stats.evicted), (1, 2_000, 0));
    assert!(stats.bytes * 10 < full.bytes, "{stats:?} after {full:?}");
}

/// Two keys charged together in a full store: making room for one must not lose the other, or the other
/// would never be limited.
#[test]
fn what_is_decided_together_is_kept_together() {
    let store = small(WhenFull::Evict);
    let [old, new] = [b"old", b"new"].map(|key| Rule {
        key: key.to_vec(),
        limits: hourly(10),
    });
    let now = Timestamp::from_micros(NOW);
    flood(&store, &hourly(10), 0..499);
    store.check(&[old.charge(1)], now, Effect::Charge, &mut Vec::new());
    for round in 1..=9 {
        // A few at a time, until the store looks for room where the old key lies.
        flood(&store, &hourly(10), round * 1_000..round * 1_000 + 55);
        let charges = [old.charge(1), new.charge(1)];
        let decision = store.check(&charges, now, Effect::Charge, &mut Vec::new());
        assert_eq!(decision, Decision::Admitted);
        let mut outcomes = Vec::new();
        store.check(&charges, now, Effect::Look, &mut outcomes);
        assert!(
            outcomes.iter().all(|outcome| outcome.remaining < 10),
            "{outcomes:?}"
        );
        store.reset(&new.key);
        flood(
            &store,
            &hourly(10),
            round * 1_000 + 900..round * 1_000 + 901,
        );
    }
}
