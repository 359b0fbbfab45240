//! Tests that concurrent decisions are exact. The clock does not advance, so the number of admitted
//! units must be exactly the limit.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use tidegate_core::{
    Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Rate, Span, Timestamp,
};

use crate::{strategies::Kind, world::Rule};

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const THREADS: u64 = 4;

fn rule(key: &[u8], kind: Kind, quota: u64) -> Rule {
    let count = if kind == Kind::Queue {
        quota - 1
    } else {
        quota
    };
    let hourly = Rate {
        count,
        period: Span::from_secs(3_600),
    };
    let limit = Limit::new(kind.algorithm(count, hourly, 6)).expect("an hourly limit");
    Rule::new(key, vec![limit], false)
}

/// Returns how often `charge` returns true when every thread calls it `times` times.
fn hammer(times: u64, charge: impl Fn(u64) -> bool + Sync) -> u64 {
    let admitted = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (charge, admitted) = (&charge, &admitted);
            scope.spawn(move || {
                for _ in 0..times {
                    admitted.fetch_add(u64::from(charge(thread)), Ordering::Relaxed);
                }
            });
        }
    });
    admitted.into_inner()
}

fn admits(store: &MemoryStore, rules: &[&Rule]) -> bool {
    let charges: Vec<_> = rules.iter().map(|rule| rule.charge(1)).collect();
    store.check(&charges, NOW, Effect::Charge, &mut Vec::new()) == Decision::Admitted
}

fn remaining(store: &MemoryStore, rule: &Rule) -> u64 {
    let mut outcomes = Vec::new();
    store.check(&[rule.charge(1)], NOW, Effect::Look, &mut outcomes);
    outcomes[0].remaining
}

#[test]
fn threads_on_one_key_are_admitted_exactly_the_limit() {
    for kind in Kind::ALL {
        let (store, rule) = (
            MemoryStore::new(MemoryBounds::default()),
            rule(b"key", kind, 1_000),
        );
        let admitted = hammer(2_000, |_| admits(&store, &[&rule]));
        assert_eq!((admitted, remaining(&store, &rule)), (1_000, 0), "{kind:?}");
    }
}

/// Threads that charge the same two keys in opposite orders do not deadlock, and charge either both
/// keys or neither.
#[test]
fn threads_on_two_keys_charge_both_or_neither() {
    for pair in 0..20_u8 {
        let store = MemoryStore::new(MemoryBounds::default());
        let ample = rule(&[pair, 0], Kind::TokenBucket, 900);
        let scarce = rule(&[pair, 1], Kind::Log, 500);
        let admitted = hammer(500, |thread| {
            let forth = [&ample, &scarce];
            let back = [&scarce, &ample];
            admits(&store, if thread % 2 == 0 { &forth } else { &back })
        });
        assert_eq!(admitted, 500);
        assert_eq!(
            (remaining(&store, &ample), remaining(&store, &scarce)),
            (400, 0)
        );
    }
}

/// Three threads charge overlapping pairs of three keys, and a fourth thread looks at all three
/// keys. Each charge adds one unit to two keys, and the fourth thread never sees a partial
/// decision. Therefore, the fourth thread must always see an even sum of the three counts.
#[test]
fn decisions_are_atomic_to_readers() {
    let store = MemoryStore::new(MemoryBounds::default());
    let rules: Vec<Rule> = [b"a", b"b", b"c"]
        .map(|key| rule(key, Kind::EpochWindow, 3_000))
        .into();
    let sums = AtomicU64::new(0);
    hammer(1_000, |thread| {
        let next = usize::try_from(thread).expect("a few threads");
        if next == 3 {
            let charges: Vec<_> = rules.iter().map(|rule| rule.charge(1)).collect();
            let mut outcomes = Vec::new();
            store.check(&charges, NOW, Effect::Look, &mut outcomes);
            let spent: u64 = outcomes
                .iter()
                .map(|outcome| 3_000 - outcome.remaining)
                .sum();
            assert!(spent.is_multiple_of(2), "{spent} units of pairs");
            sums.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        admits(&store, &[&rules[next], &rules[(next + 1) % 3]])
    });
    assert_eq!(sums.into_inner(), 1_000);
    let left: Vec<u64> = rules.iter().map(|rule| remaining(&store, rule)).collect();
    assert_eq!(left, [1_000, 1_000, 1_000]);
}

/// Threads that charge, reset, block and save at the same time cause neither a deadlock nor a
/// panic, and leave valid counts.
#[test]
fn all_operations_run_concurrently() {
    let store = MemoryStore::new(MemoryBounds::default());
    let limits = Limits::new(vec![
        rule(b"x", Kind::Log, 50)
            .limits
            .iter()
            .next()
            .expect("one limit")
            .clone(),
        rule(b"x", Kind::Gcra, 70)
            .limits
            .iter()
            .next()
            .expect("one limit")
            .clone(),
    ]);
    let limits = limits.expect("two limits");
    let keys: Vec<Rule> = (0..8_u8)
        .map(|key| Rule {
            key: vec![key],
            limits: limits.clone(),
        })
        .collect();
    hammer(1_000, |thread| {
        let admitted = admits(&store, &[&keys[0], &keys[3], &keys[7]]);
        match thread {
            0 => drop(store.reset(&keys[3].key)),
            1 => drop(store.block(&keys[7].key, Some(Span::from_micros(1)), "test", NOW)),
            2 => drop(store.unblock(&keys[7].key, NOW)),
            _ => (0..store.parts()).for_each(|part| store.save(part, NOW, &mut Vec::new())),
        }
        admitted
    });
    store.unblock(&keys[7].key, NOW);
    let stats = store.stats();
    assert!(stats.keys <= 3 && stats.blocks == 0, "{stats:?}");
    let mut outcomes = Vec::new();
    store.check(&[keys[0].charge(1)], NOW, Effect::Look, &mut outcomes);
    assert_eq!(outcomes[1].remaining, outcomes[0].remaining + 20);
}
