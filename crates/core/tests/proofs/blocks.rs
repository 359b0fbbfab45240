//! Tests manual blocks: their number is limited and counted, and expired blocks are removed.

use std::{sync::Barrier, thread};

use tidegate_core::{BlockNote, BlockedRule, MemoryBounds, MemoryStore, Span, Timestamp, bounds};

use crate::world::one_shard;

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const SECOND: Span = Span::from_secs(1);

fn bytes(store: &MemoryStore) -> usize {
    store.stats().bytes
}

#[test]
fn the_bytes_of_blocks_are_counted() {
    let store = one_shard();
    let empty = bytes(&store);
    assert!(store.block(b"key", None, "why", NOW));
    let one = bytes(&store);
    assert!(one >= empty + 6, "{one} with one block, {empty} without");
    assert!(store.block(b"key", Some(SECOND), "for good reason", NOW));
    assert_eq!(bytes(&store), one + "for good reason".len() - "why".len());
    assert!(store.unblock(b"key", NOW));
    assert_eq!(bytes(&store), empty);

    assert!(store.block(b"key", Some(SECOND), "why", NOW));
    assert!(store.blocks(NOW.after(SECOND)).is_empty());
    assert_eq!(
        (bytes(&store), store.stats().blocks),
        (empty, 0),
        "it has ended"
    );
}

#[test]
fn the_bytes_of_an_expired_block_are_released_while_another_remains() {
    let store = one_shard();
    assert!(store.block(b"kept", None, "why", NOW));
    let one = bytes(&store);
    assert!(store.block(b"ended", Some(SECOND), "a longer reason", NOW));
    assert!(bytes(&store) > one);
    assert_eq!(store.blocks(NOW.after(SECOND)).len(), 1);
    let table_growth = 256;
    assert!(
        bytes(&store) <= one + table_growth,
        "{one} {}",
        bytes(&store)
    );
}

#[test]
fn blocked_keys_are_those_with_a_block() {
    let store = MemoryStore::new(MemoryBounds::default());
    for key in [b"a", b"b", b"c"] {
        assert!(store.block(key, None, "", NOW));
    }
    assert!(store.unblock(b"b", NOW));
    let mut keys = store.blocked_keys();
    keys.sort_unstable();
    assert_eq!(keys, [b"a".as_slice().into(), b"c".as_slice().into()]);
}

/// Regression test: expired blocks counted towards the maximum until the blocks were listed, so
/// that eventually no new block could be set.
#[test]
fn expired_blocks_make_room_for_others() {
    let store = one_shard();
    for key in 0..bounds::MAX_BLOCKS {
        assert!(store.block(&key.to_le_bytes(), Some(SECOND), "", NOW));
    }
    assert!(!store.block(b"one more", None, "", NOW));
    assert!(store.block_on(b"one more", NOW).is_none());
    assert!(
        store.block(&0_usize.to_le_bytes(), Some(SECOND), "again", NOW),
        "it stands already"
    );
    assert!(store.block(b"one more", None, "", NOW.after(SECOND)));
    assert_eq!(store.stats().blocks, 1);
}

/// Regression test: the store counted blocks before it locked the shard, so that concurrent callers
/// could exceed the maximum number of blocks.
#[test]
fn concurrent_blocks_do_not_exceed_the_maximum() {
    let store = MemoryStore::new(MemoryBounds::default());
    let key = |number: usize| number.to_le_bytes();
    for number in 0..bounds::MAX_BLOCKS - 3 {
        assert!(store.block(&key(number), None, "", NOW));
    }
    for round in 1..=200 {
        let (store, barrier) = (&store, &Barrier::new(4));
        let block = |thread: usize| {
            barrier.wait();
            let added =
                |extra: &usize| store.block(&key(usize::MAX - thread - extra * 4), None, "", NOW);
            (0..3).filter(added).count()
        };
        let added: usize = thread::scope(|scope| {
            let threads = [0, 1, 2, 3].map(|thread| scope.spawn(move || block(thread)));
            threads
                .map(|thread| thread.join().expect("no panic"))
                .iter()
                .sum()
        });
        assert_eq!(
            (added, store.stats().blocks),
            (3, bounds::MAX_BLOCKS),
            "round {round}"
        );
        assert!(store.block(&key(0), None, "replaced", NOW));
        for extra in 0..12 {
            store.unblock(&key(usize::MAX - extra), NOW);
        }
        assert_eq!(store.stats().blocks, bounds::MAX_BLOCKS - 3);
    }
}

#[test]
fn expired_blocks_do_not_accumulate() {
    let (store, mut now) = (one_shard(), NOW);
    for key in 0..10_000_u64 {
        now = now.after(SECOND);
        assert!(store.block(&key.to_le_bytes(), Some(SECOND), "", now));
    }
    let held = store.stats().blocks;
    assert!(
        held < 10,
        "{held} blocks are held although only one is in effect"
    );
}

#[test]
fn an_invalid_key_and_a_long_reason_are_refused() {
    let store = one_shard();
    let (key, reason) = (
        vec![7; bounds::MAX_KEY_BYTES],
        "y".repeat(bounds::MAX_REASON_BYTES),
    );
    assert!(store.block(&key, None, reason.as_str(), NOW));
    assert!(!store.block(&[key.as_slice(), &[7]].concat(), None, "", NOW));
    assert!(!store.block(b"key", None, format!("{reason}.").as_str(), NOW));
    assert_eq!(store.stats().blocks, 1);
}

/// Regression test: a block with a rule that exceeds the bounds made the whole snapshot invalid.
#[test]
fn a_rule_that_cannot_exist_is_refused() {
    let store = one_shard();
    let name = |bytes: usize| "x".repeat(bytes).into_boxed_str();
    let block = |rule_bytes: usize, entries: usize, entry_bytes: usize| {
        let rule = BlockedRule {
            name: name(rule_bytes),
            key: vec![name(entry_bytes); entries].into(),
        };
        let note = BlockNote {
            reason: "",
            rule: Some(&rule),
        };
        store.block(b"key", None, note, NOW)
    };
    let (rule, entries, entry) = (
        bounds::MAX_RULE_NAME_BYTES,
        bounds::MAX_KEY_ENTRIES,
        bounds::MAX_ENTRY_NAME_BYTES,
    );
    assert!(!block(rule + 1, entries, entry));
    assert!(!block(rule, entries + 1, entry));
    assert!(!block(rule, entries, entry + 1));
    assert_eq!(store.stats().blocks, 0);
    assert!(block(rule, entries, entry));
    let mut snapshot = Vec::new();
    store.save(0, NOW, &mut snapshot);
    let again = one_shard();
    again.restore(&snapshot, NOW).expect("a valid snapshot");
    assert_eq!(again.blocks(NOW), store.blocks(NOW));
    assert_eq!(again.stats().blocks, 1);
}
