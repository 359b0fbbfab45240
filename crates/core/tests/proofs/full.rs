//! Tests a full store's decisions on new and existing keys.

use std::collections::HashSet;

use tidegate_core::{
    Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Rate, Span, Timestamp, WhenFull,
};

use crate::{strategies::Kind, world::Rule};

const NOW: u64 = 1_700_000_000_000_000;

fn hourly(count: u64) -> Limits {
    let rate = Rate {
        count,
        period: Span::from_secs(3_600),
    };
    Limits::new(vec![
        Limit::new(Kind::Log.algorithm(count, rate, 1)).expect("a valid limit"),
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

/// Charges each of `keys` once. Returns the number of `Admitted`, `Limited` and `Full` decisions,
/// in this order.
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
fn a_full_store_evicts_barely_used_keys() {
    let store = small(WhenFull::Evict);
    assert_eq!(flood(&store, &hourly(1), 0..100), [100, 0, 0]);
    let [admitted, limited, full] = flood(&store, &hourly(10), 1_000..5_000);
    assert_eq!((admitted + full, limited), (4_000, 0));
    assert!(full < 400, "some new keys met only limited keys: {full}");
    assert_eq!(
        flood(&store, &hourly(1), 0..100),
        [0, 100, 0],
        "limited keys are kept"
    );
    let stats = store.stats();
    assert_eq!((stats.keys, stats.evicted), (500, admitted as u64 - 400));
    assert_eq!((stats.expired, stats.denied_when_full), (0, full as u64));
    assert_eq!(stats.admitted_when_full, 0);
}

#[test]
fn a_full_store_of_limited_keys_denies_new_keys() {
    let store = small(WhenFull::Evict);
    assert_eq!(flood(&store, &hourly(1), 0..600), [500, 0, 100]);
    assert_eq!(
        (store.stats().keys, store.stats().denied_when_full),
        (500, 100)
    );
}

/// The retry delay for a new key is the time until the first of a few inspected entries expires. If
/// the store inspected all entries, every new key would get the same delay.
#[test]
fn a_full_store_inspects_few_entries_for_a_new_key() {
    let store = small(WhenFull::Deny);
    let charge = |key: u32, minutes: u64| {
        let rate = Rate {
            count: 1,
            period: Span::from_secs(60 * minutes),
        };
        let limit = Limit::new(Kind::Log.algorithm(1, rate, 1)).expect("a valid limit");
        let rule = Rule {
            key: key.to_le_bytes().to_vec(),
            limits: Limits::new(vec![limit]).expect("one limit"),
        };
        let now = Timestamp::from_micros(NOW);
        store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new())
    };
    for key in 0..500 {
        assert_eq!(charge(key, 1 + u64::from(key)), Decision::Admitted);
    }
    let mut waits = HashSet::new();
    for key in 1_000..1_050 {
        let Decision::Full { retry_after } = charge(key, 1) else {
            panic!("a full store admitted a new key");
        };
        waits.insert(format!("{retry_after:?}"));
    }
    assert!(waits.len() > 10, "{waits:?}");
}

#[test]
fn the_bytes_of_long_keys_are_counted() {
    let bytes_of = |len: usize| {
        let store = small(WhenFull::Deny);
        let rule = Rule {
            key: vec![7; len],
            limits: hourly(1),
        };
        let now = Timestamp::from_micros(NOW);
        store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new());
        store.stats().bytes
    };
    assert_eq!(bytes_of(200) - bytes_of(100), 100);
}

#[test]
fn a_full_store_denies_new_keys_if_configured() {
    let store = small(WhenFull::Deny);
    assert_eq!(flood(&store, &hourly(10), 0..600), [500, 0, 100]);
    assert_eq!(
        (store.stats().keys, store.stats().denied_when_full),
        (500, 100)
    );
}

#[test]
fn a_full_store_admits_new_keys_uncounted_if_configured() {
    let store = small(WhenFull::Allow);
    assert_eq!(flood(&store, &hourly(1), 0..600), [600, 0, 0]);
    assert_eq!(flood(&store, &hourly(1), 0..600), [100, 500, 0]);
    assert_eq!(
        (store.stats().keys, store.stats().admitted_when_full),
        (500, 200)
    );
}

/// In a full store, a peek (a read-only decision) gives the same decision as the following charge.
#[test]
fn a_peek_predicts_whether_there_is_room() {
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
        assert_eq!(store.stats(), full, "{when_full:?}: nothing was evicted");
        match expected {
            Some(decision) => assert_eq!(peeked, decision, "{when_full:?}"),
            None => assert!(matches!(peeked, Decision::Full { .. }), "{when_full:?}"),
        }
        assert_eq!(
            ask(Effect::Look),
            Decision::Admitted,
            "a look needs no room"
        );
        assert_eq!(ask(Effect::Charge), peeked, "{when_full:?}");
    }
}

/// Charges a sliding window log with a window of one hour, in a store of 64 KiB, until the log
/// cannot grow. Returns the store and the decision on the first charge that did not fit.
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
    while store.stats().admitted_when_full + store.stats().denied_when_full == 0 {
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
        assert!(outcomes[0].allowed, "a refund needs no room");
        store.check(&[rule.charge(1)], now, Effect::Charge, &mut outcomes);
        assert_eq!(outcomes.len(), 1, "there is room for one more");
    }
}

/// Regression test: a charge denied as `Full` evicted idle keys anyway, so a client whose sliding
/// window log could not grow evicted the counts of other clients.
#[test]
fn a_charge_that_does_not_fit_evicts_no_live_keys() {
    let store = MemoryStore::new(MemoryBounds {
        max_bytes: 1,
        when_full: WhenFull::Evict,
        ..MemoryBounds::default()
    });
    let now = Timestamp::from_micros(NOW);
    let rule = |key: Vec<u8>, count| Rule {
        key,
        limits: hourly(count),
    };
    let others: Vec<Rule> = (0..100_u32)
        .map(|key| rule(key.to_le_bytes().to_vec(), 10))
        .collect();
    let (new, large) = (rule(b"new".to_vec(), 10), larger_than_the_store());
    for other in &others {
        store.check(&[other.charge(1)], now, Effect::Charge, &mut Vec::new());
    }
    let counted = || {
        let is_counted = |other: &&Rule| {
            let mut outcomes = Vec::new();
            store.check(&[other.charge(1)], now, Effect::Look, &mut outcomes);
            outcomes[0].remaining == 9
        };
        others.iter().filter(is_counted).count()
    };
    assert_eq!(counted(), 100);
    // Charge the large key in three ways: alone, after a key that fits, and before a key that fits.
    for charges in [
        vec![large.charge(1)],
        vec![new.charge(1), large.charge(1)],
        vec![large.charge(1), new.charge(1)],
    ] {
        for _ in 0..50 {
            let decision = store.check(&charges, now, Effect::Charge, &mut Vec::new());
            assert!(matches!(decision, Decision::Full { .. }), "{decision:?}");
            assert_eq!((store.stats().evicted, store.stats().keys), (0, 100));
        }
    }
    assert_eq!(counted(), 100);
    // Expired keys are removed even if the charge does not fit.
    let later = now.after(Span::from_secs(3_601));
    store.check(&[large.charge(1)], later, Effect::Charge, &mut Vec::new());
    let stats = store.stats();
    assert!(stats.expired > 0 && stats.evicted == 0, "{stats:?}");
}

/// Regression test: under [`WhenFull::Allow`], a charge was denied if its sliding window log could
/// not grow, although new keys were admitted.
#[test]
fn a_log_that_cannot_grow_passes_uncounted_if_configured() {
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
    assert_eq!(store.stats().admitted_when_full, 12);
}

/// Returns a rule whose state takes 128 KB.
fn larger_than_the_store() -> Rule {
    let minute = Rate {
        count: 60,
        period: Span::from_secs(60),
    };
    let limit =
        Limit::new(Kind::StrictBuckets.algorithm(60, minute, 1_000)).expect("8 KB of counts");
    Rule::new(b"large", vec![limit; 16], false)
}

/// A charge that does not fit even in an empty store is denied with `RetryAfter::Never`.
#[test]
fn a_request_that_never_fits_the_store_must_not_be_retried() {
    let store = MemoryStore::new(MemoryBounds {
        max_bytes: 1,
        ..MemoryBounds::default()
    });
    let rule = larger_than_the_store();
    let now = Timestamp::from_micros(NOW);
    let decision = store.check(&[rule.charge(1)], now, Effect::Charge, &mut Vec::new());
    let retry_after = tidegate_core::RetryAfter::Never;
    assert_eq!(decision, Decision::Full { retry_after });
}

/// After all keys have expired, decisions on a single key drop them and release their memory.
#[test]
fn expired_keys_leave_the_store() {
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
    for _ in 0..2_000 * 40 {
        store.check(&[rule.charge(1)], later, Effect::Charge, &mut Vec::new());
    }
    let stats = store.stats();
    assert_eq!((stats.keys, stats.expired, stats.evicted), (1, 2_000, 0));
    assert!(stats.bytes * 10 < full.bytes, "{stats:?} after {full:?}");
}

/// Two keys are charged together in a full store. If the existing key were evicted to make room for
/// the new key, it would lose its count and would never be limited.
#[test]
fn keys_of_one_decision_do_not_evict_each_other() {
    let store = small(WhenFull::Evict);
    let [old, new] = [b"old", b"new"].map(|key| Rule {
        key: key.to_vec(),
        limits: hourly(10),
    });
    let now = Timestamp::from_micros(NOW);
    flood(&store, &hourly(10), 0..499);
    store.check(&[old.charge(1)], now, Effect::Charge, &mut Vec::new());
    for round in 1..=9 {
        // Add a few keys at a time, until the eviction scan reaches the old key.
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

/// Regression test: eviction ignored spent units of the soft allowance, and evicted a key that was
/// far over its limit.
#[test]
fn a_key_in_its_soft_allowance_is_not_evicted() {
    let store = small(WhenFull::Evict);
    let soft: Vec<Limit> = hourly(4)
        .iter()
        .map(|limit| {
            limit
                .clone()
                .with_soft_percent(300)
                .expect("16 at the most")
        })
        .collect();
    let soft = Limits::new(soft).expect("one limit");
    let over = Rule {
        key: b"over".to_vec(),
        limits: soft.clone(),
    };
    let now = Timestamp::from_micros(NOW);
    let decision = store.check(&[over.charge(13)], now, Effect::Charge, &mut Vec::new());
    assert_eq!(decision, Decision::Admitted);
    flood(&store, &soft, 0..2_000);
    let mut outcomes = Vec::new();
    store.check(&[over.charge(1)], now, Effect::Look, &mut outcomes);
    assert_eq!(outcomes[0].remaining, 3);
}
