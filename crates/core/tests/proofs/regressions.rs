//! Regression tests: minimised former counterexamples of the property tests.

use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, FallbackShare, Limit, Limits, MemoryBounds,
    MemoryStore, Outcome, Rate, RetryAfter, Span, Timestamp,
    remote_eval::{RemoteState, Replay, Terms},
};

use crate::{
    promises::{ask, copy_of},
    strategies::Kind,
    world::{Rule, one_shard},
};

const NOW: u64 = 1_700_000_000_000_000;

fn limit(kind: Kind, count: u64, period: Span) -> Limit {
    Limit::new(kind.algorithm(count, Rate { count, period }, 6))
        .expect("numbers that a limit can have")
}

/// If a cost exceeds the limit of a sliding window log, the store evicts nothing. Previously, the
/// store reserved terabytes for such a cost, evicted other keys and reported itself as full.
#[test]
fn an_impossible_cost_on_a_log_evicts_nothing() {
    let minute = Span::from_secs(60);
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    });
    let both = vec![
        limit(Kind::Gcra, 1_000_000_000, minute),
        limit(Kind::Log, 4, minute),
    ];
    for limits in [vec![limit(Kind::Log, 4, minute)], both] {
        for key in 0..9_u8 {
            ask(
                &store,
                &Rule::new(&[key], limits.clone(), false),
                NOW,
                1,
                Effect::Charge,
            );
        }
        let rule = Rule::new(&[0], limits, false);
        let charge = [rule.charge(999_999_999)];
        let mut outcomes = Vec::new();
        let now = Timestamp::from_micros(NOW);
        let decision = store.check(&charge, now, Effect::Charge, &mut outcomes);
        assert_eq!(decision, Decision::Limited);
        assert_eq!((store.stats().keys, store.stats().evicted), (9, 0));
    }
}

/// A client that never backs off stays denied. Previously, an exhausted counter dropped denied
/// requests that should be counted, so the client got its whole limit again in each window.
#[test]
fn a_client_that_hammers_a_denial_counting_counter_stays_denied() {
    for kind in [
        Kind::StrictBuckets,
        Kind::LooseBuckets,
        Kind::Weighted,
        Kind::Log,
    ] {
        let limit = limit(kind, 6, Span::from_secs(6)).counting_denied(true);
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let second = |second: u64| NOW + second * 1_000_000;
        assert!(ask(&store, &rule, NOW, 6, Effect::Charge).allowed);
        for step in 1..100 {
            let denied = ask(&store, &rule, second(step), 6, Effect::Charge);
            assert!(!denied.allowed, "{kind:?} in second {step}");
        }
        assert!(
            ask(&store, &rule, second(120), 6, Effect::Charge).allowed,
            "{kind:?}"
        );
    }
}

/// If a limit of 0 counts denied requests, it still has no units that could become available.
#[test]
fn a_limit_of_zero_always_equals_its_initial_state() {
    let day = Span::from_secs(86_400);
    for kind in [
        Kind::EpochWindow,
        Kind::FirstRequestWindow,
        Kind::Log,
        Kind::Weighted,
    ] {
        let nothing = Limit::new(kind.algorithm(
            0,
            Rate {
                count: 1,
                period: day,
            },
            1,
        ))
        .unwrap();
        let limits = vec![
            nothing.counting_denied(true),
            limit(kind, 1, day).counting_denied(true),
        ];
        let (rule, store) = (Rule::new(b"key", limits, false), one_shard());
        let denied = ask(&store, &rule, NOW, 1, Effect::Charge);
        assert_eq!(
            (denied.retry_after, denied.reset_after),
            (RetryAfter::Never, Span::ZERO),
            "{kind:?}"
        );
    }
}

/// A look ([`Effect::Look`]) has a cost of 0 and is never denied, even if denied requests have
/// filled a sliding window log beyond its limit.
#[test]
fn a_look_is_never_denied() {
    let limit = limit(Kind::Log, 3, Span::from_secs(1)).counting_denied(true);
    let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
    ask(&store, &rule, NOW, 2, Effect::Charge);
    ask(&store, &rule, NOW + 1, 3, Effect::Charge);
    let look = ask(&store, &rule, NOW + 1, 1, Effect::Look);
    assert_eq!(
        (look.allowed, look.remaining, look.retry_after),
        (true, 0, RetryAfter::NOW)
    );
}

/// Previously, spent units that drain in less than a microsecond were dropped when a state was
/// converted from unknown limits.
#[test]
fn a_fraction_of_a_microsecond_is_not_dropped() {
    let fast = limit(Kind::Gcra, 1_000, Span::from_micros(1));
    let (old, store) = (Rule::new(b"key", vec![fast], false), one_shard());
    ask(&store, &old, NOW, 999, Effect::Charge);
    let slow = limit(Kind::Gcra, 1, Span::from_micros(1));
    let looked = ask(
        &store,
        &Rule::new(b"key", vec![slow], false),
        NOW,
        1,
        Effect::Look,
    );
    assert_eq!(
        (looked.remaining, looked.reset_after),
        (0, Span::from_micros(1))
    );
}

/// Previously, when two full windows were converted to a window of another length, the count
/// exceeded the maximum for a snapshot.
#[test]
fn two_converted_windows_count_at_most_one() {
    let most = tidegate_core::bounds::MAX_COUNT;
    let old = limit(Kind::Weighted, most, Span::from_secs(1));
    let (old, store) = (Rule::new(b"key", vec![old], false), one_shard());
    ask(&store, &old, 0, most, Effect::Charge);
    ask(
        &store,
        &old,
        1_999_999,
        most - 1_000_000_000,
        Effect::Charge,
    );
    let new = limit(Kind::Weighted, 5, Span::from_secs(60));
    let new = Rule::new(b"key", vec![new], false);
    assert!(!ask(&store, &new, 1_999_999, 1, Effect::Charge).allowed);
    assert!(
        !ask(
            &copy_of(&store, 1_999_999),
            &new,
            1_999_999,
            1,
            Effect::Charge
        )
        .allowed
    );
}

/// Previously, if an otherwise valid snapshot contained impossible numbers, a later decision
/// overflowed.
#[test]
fn impossible_numbers_in_a_snapshot_never_panic() {
    for kind in Kind::ALL {
        let seven = limit(kind, 7, Span::from_secs(1));
        let (rule, store) = (Rule::new(b"key", vec![seven], false), one_shard());
        ask(&store, &rule, NOW, 2, Effect::Charge);
        let (mut saved, now) = (Vec::new(), Timestamp::from_micros(NOW));
        store.save(0, now, &mut saved);
        for at in 0..saved.len().saturating_sub(8) {
            for number in [
                u64::MAX,
                u64::MAX - 1,
                1 << 53,
                1 << 40,
                u64::from(u32::MAX),
            ] {
                let mut bytes = saved.clone();
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
                let again = one_shard();
                let _ = again.restore(&bytes, now);
                for (after, effect) in [(0, Effect::Look), (1, Effect::Peek), (2, Effect::Charge)] {
                    ask(&again, &rule, NOW + after, 3, effect);
                }
            }
        }
    }
}

/// Previously, if a remote store returned more buckets than any limit can have, their sum
/// overflowed.
#[test]
fn impossible_numbers_from_a_remote_store_never_panic() {
    let counter = limit(Kind::StrictBuckets, 6, Span::from_secs(6));
    let rule = Rule::new(b"key", vec![counter], false);
    let now = Timestamp::from_micros(NOW);
    for (newest, width) in [(NOW, 1), (NOW / 1_000_000, 1_000_000), (0, 0)] {
        let counts = vec![u64::MAX; 65_535];
        let held = RemoteState::Buckets {
            newest,
            width,
            counts,
        };
        let charge = rule.charge(1);
        let mut replay = Replay::open(
            &charge,
            Some(vec![(Terms::Digest(0), held)]),
            now,
            Effect::Charge,
        );
        let admitted = replay.evaluate(now);
        replay.apply(admitted, now);
        let mut outcomes = Vec::new();
        replay.report(now, &mut outcomes);
        assert_eq!(
            outcomes[0].allowed,
            width == 0,
            "expired, or far over the limit"
        );
    }
}

/// Previously, if a limit counted denied requests, a denied request held concurrency slots, and no
/// receipt could release these slots. The memory store and the Redis store also differed in how
/// they released the slots of denied requests.
#[test]
fn a_denied_request_holds_no_concurrency_slot() {
    let lease = Span::from_secs(60);
    let limit = Limit::new(Algorithm::Concurrency { limit: 2, lease }).unwrap();
    let limit = limit.counting_denied(true);
    assert!(!limit.count_denied());
    let limits = Limits::new(vec![limit]).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let (now, mut outcomes) = (Timestamp::from_micros(1_000_000), Vec::new());
    let ask = |cost: u64, outcomes: &mut Vec<Outcome>| {
        let charge = Charge::new(b"k", &limits, Cost::new(cost).unwrap()).unwrap();
        store.check(&[charge], now, Effect::Charge, outcomes)
    };
    assert_eq!(ask(3, &mut outcomes), Decision::Limited);
    assert_eq!(ask(2, &mut outcomes), Decision::Admitted);
}

/// Previously, the fast path for plain GCRA limits ignored shadow mode for two kinds of derived
/// limits: local shares and stretched (elastic) limits.
#[test]
fn shadow_limits_never_deny_as_shares_or_stretched() {
    let (now, mut outcomes) = (Timestamp::from_micros(NOW), Vec::new());
    for kind in [Kind::Gcra, Kind::TokenBucket, Kind::Meter] {
        let limits = Limits::new(vec![limit(kind, 5, Span::from_secs(1))]).unwrap();
        // Ten percent of 5 is less than one unit, so the stretched limits have no soft allowance
        // and could take the fast path.
        let limits = limits.in_shadow(true).stretching(10).unwrap();
        let share = limits.share(FallbackShare::default());
        let stretched = limits.stretched().expect("they stretch");
        for limits in [&*share, stretched, &limits] {
            let store = one_shard();
            let charge = Charge::new(b"k", limits, Cost::ONE).unwrap();
            for _ in 0..20 {
                let decision = store.check(&[charge], now, Effect::Charge, &mut outcomes);
                assert_eq!(decision, Decision::Admitted, "{kind:?}");
            }
            assert!(
                !outcomes[0].allowed,
                "their outcomes show what they would do"
            );
        }
    }
}

/// Previously, if a call contained the same key twice, the second write overwrote the first write,
/// so that a limit of 5 admitted 40 units. Only a debug assertion checked for repeated keys.
#[test]
fn one_key_twice_in_one_call_is_refused() {
    let five = |kind| Limits::new(vec![limit(kind, 5, Span::from_secs(60))]).unwrap();
    let (limits, others) = (five(Kind::EpochWindow), five(Kind::Gcra));
    let (now, mut outcomes) = (Timestamp::from_micros(NOW), Vec::new());
    // The first store has many shards, and the second store has a single shard.
    for store in [MemoryStore::new(MemoryBounds::default()), one_shard()] {
        let charge = |key, limits| Charge::new(key, limits, Cost::ONE).unwrap();
        let repeated = [
            charge(b"k", &limits),
            charge(b"other", &limits),
            charge(b"k", &others),
        ];
        for effect in [Effect::Charge, Effect::Peek, Effect::Look, Effect::Refund] {
            let decision = store.check(&repeated, now, effect, &mut outcomes);
            assert_eq!((decision, outcomes.len()), (Decision::UNDECIDABLE, 0));
        }
        let (decision, receipt) = store.reserve(&repeated, now, &mut outcomes);
        assert_eq!(decision, Decision::UNDECIDABLE);
        assert!(receipt.is_empty() && outcomes.is_empty());
        assert_eq!(store.stats().keys, 0, "nothing is charged");
        let apart = [charge(b"k", &limits), charge(b"other", &limits)];
        let decision = store.check(&apart, now, Effect::Charge, &mut outcomes);
        assert_eq!(decision, Decision::Admitted);
    }
}
