//! Tests the memory store under loom, which explores all interleavings of threads that use the
//! store's locks. The script `scripts/loom` runs the loom tests.

#![cfg(loom)]

use loom::{sync::Arc, thread};
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Span,
    Timestamp, Window,
};

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn one_an_hour() -> Limits {
    let window = Window::FirstRequest(Span::from_secs(3_600));
    let limit = Limit::new(Algorithm::FixedWindow { limit: 1, window }).expect("a valid limit");
    Limits::new(vec![limit]).expect("one limit")
}

/// Creates a store with two shards, the smallest number with more than one lock.
fn two_shards() -> MemoryStore {
    MemoryStore::new(MemoryBounds {
        max_keys: 2_048,
        ..MemoryBounds::default()
    })
}

fn admits(store: &MemoryStore, keys: &[&[u8]]) -> bool {
    let limits = one_an_hour();
    let charge = |key| Charge::new(key, &limits, Cost::ONE).expect("a short key");
    let charges: Vec<_> = keys.iter().map(|key| charge(*key)).collect();
    store.check(&charges, NOW, Effect::Charge, &mut Vec::new()) == Decision::Admitted
}

/// Returns two keys in different shards.
fn keys_apart() -> ([u8; 1], [u8; 1]) {
    let part_of = |key: &[u8]| {
        let store = two_shards();
        admits(&store, &[key]);
        let mut first = Vec::new();
        store.save(0, NOW, &mut first);
        first.is_empty()
    };
    let other = (1..=u8::MAX).find(|key| part_of(&[*key]) != part_of(&[0]));
    ([0], [other.expect("keys spread over the shards")])
}

#[test]
fn two_threads_on_one_key_with_a_limit_of_one() {
    loom::model(|| {
        let store = Arc::new(two_shards());
        let other = Arc::clone(&store);
        let there = thread::spawn(move || admits(&other, &[b"key"]));
        let here = admits(&store, &[b"key"]);
        let there = there.join().expect("no panic");
        assert!(here != there, "exactly one is admitted: {here}, {there}");
    });
}

/// Two threads that charge the same two keys in opposite orders do not deadlock, and each thread
/// charges either both keys or neither.
#[test]
fn two_threads_on_two_keys_in_opposite_order() {
    loom::model(|| {
        let (a, b) = keys_apart();
        let store = Arc::new(two_shards());
        let other = Arc::clone(&store);
        let there = thread::spawn(move || admits(&other, &[&b, &a]));
        let here = admits(&store, &[&a, &b]);
        let there = there.join().expect("no panic");
        assert!(here != there, "exactly one is admitted: {here}, {there}");
        assert!(
            !admits(&store, &[&a]) && !admits(&store, &[&b]),
            "both are spent"
        );
    });
}

/// One thread charges two keys, and another thread only the second key. Regardless of the order of
/// the threads, a denied request charges nothing.
#[test]
fn a_denied_pair_spends_nothing() {
    loom::model(|| {
        let (a, b) = keys_apart();
        let store = Arc::new(two_shards());
        let other = Arc::clone(&store);
        let single = thread::spawn(move || admits(&other, &[&b]));
        let pair = admits(&store, &[&a, &b]);
        let single = single.join().expect("no panic");
        assert!(pair != single, "exactly one is admitted: {pair}, {single}");
        assert_eq!(
            admits(&store, &[&a]),
            single,
            "the first key is spent only by the pair"
        );
    });
}

/// One thread resets, blocks and inspects a key while another thread charges the key.
#[test]
fn an_operator_and_a_request() {
    loom::model(|| {
        let store = Arc::new(two_shards());
        let other = Arc::clone(&store);
        let operator = thread::spawn(move || {
            other.block(b"key", Some(Span::from_secs(1)), "by hand", NOW);
            other.reset(b"key");
            other.unblock(b"key", NOW)
        });
        admits(&store, &[b"key"]);
        assert!(operator.join().expect("no panic"), "its own block stood");
        let stats = store.stats();
        assert!(stats.keys <= 1 && stats.blocks == 0, "{stats:?}");
    });
}
