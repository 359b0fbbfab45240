//! After a restart from its snapshot, a store makes the same decisions as without a restart.
//! Invalid snapshots are rejected and never cause a panic.

use proptest::{prelude::*, sample::Index};
use tidegate_core::{
    BlockNote, BlockedRule, Effect, Limit, MemoryBounds, MemoryStore, Rate, Span, Timestamp,
    WhenFull, former_key,
};

use crate::{
    promises::{ask, walk},
    strategies::{self, Ask, Kind, any_kind},
    world::{Rule, one_shard},
};

fn saved(store: &MemoryStore, now: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in 0..store.parts() {
        store.save(part, Timestamp::from_micros(now), &mut bytes);
    }
    bytes
}

/// Creates a store with many shards. In the restart tests, the stores that write snapshots have one
/// shard.
fn many_shards() -> MemoryStore {
    MemoryStore::new(MemoryBounds::default())
}

fn rule() -> impl Strategy<Value = Rule> {
    let kind = prop_oneof![2 => any_kind(), 1 => Just(Kind::Log)];
    let limits = prop::collection::vec(kind.prop_flat_map(strategies::limit), 1..=4);
    limits.prop_map(|limits| Rule::new(b"a key of more than twenty-two bytes", limits, false))
}

/// Regression test: the records before an invalid record were restored.
#[test]
fn an_invalid_record_restores_nothing() {
    let limit = Limit::new(Kind::Log.algorithm(
        10,
        Rate {
            count: 10,
            period: Span::from_secs(60),
        },
        1,
    ));
    let rule = Rule::new(b"key", vec![limit.unwrap()], false);
    let store = one_shard();
    ask(&store, &rule, 1_000_000, 1, Effect::Charge);
    let now = Timestamp::from_micros(1_000_000);
    store.block(b"blocked", None, "why", now);
    let whole = saved(&store, 1_000_000);
    let mut invalid = whole.clone();
    invalid.push(9);
    let again = many_shards();
    let offset = whole.len();
    let error = again.restore(&invalid, now).unwrap_err();
    assert_eq!(error.offset, offset);
    let error = again.restore_parts(&[&whole, &[9]], now).unwrap_err();
    assert_eq!(error.offset, 0);
    let stats = again.stats();
    assert_eq!((stats.keys, stats.blocks), (0, 0));
    assert_eq!(again.restore_parts(&[&whole, &whole], now), Ok(1));
}

/// After a restart with other rules, an operator can still see which rule a block belonged to.
#[test]
fn a_block_keeps_the_name_of_its_rule() {
    let rule = BlockedRule {
        name: "login".into(),
        key: ["ip".into(), "user".into()].into(),
    };
    let note = BlockNote {
        reason: "why",
        rule: Some(&rule),
    };
    let (store, now) = (one_shard(), Timestamp::from_micros(1_000_000));
    let key = former_key("login", &["a", "b"]);
    assert!(store.block(&key, None, note, now));
    let again = many_shards();
    again.restore(&saved(&store, 1_000_000), now).unwrap();
    let block = again.block_on(&key, now).unwrap();
    assert_eq!(
        (block.reason.as_str(), &block.rule),
        ("why", &Some(rule.clone()))
    );
    assert_eq!(block.values(), Some(vec!["a", "b"]));
    assert!(block.is_of_rule());
}

/// A snapshot is invalid if it contains a block with a rule that [`MemoryStore::block`] would
/// reject.
#[test]
fn a_block_of_a_rule_that_cannot_exist_is_invalid() {
    let text = |bytes: usize| [&(bytes as u64).to_le_bytes()[..], &vec![b'x'; bytes]].concat();
    let block = |rule_bytes: usize, entries: usize, entry_bytes: usize| {
        [
            // A record with a tag, a key of one byte, no expiry time, and no reason.
            vec![4_u8],
            text(1),
            u64::MAX.to_le_bytes().to_vec(),
            text(0),
            text(rule_bytes),
            (entries as u64).to_le_bytes().to_vec(),
            text(entry_bytes).repeat(entries),
        ]
        .concat()
    };
    let now = Timestamp::from_micros(1_000_000);
    let restored = |bytes: &[u8]| {
        let store = one_shard();
        let result = store.restore(bytes, now);
        result.map(|_| store.stats().blocks)
    };
    assert_eq!(restored(&block(128, 16, 256)), Ok(1));
    for invalid in [
        block(129, 16, 256),
        block(128, 17, 256),
        block(128, 16, 257),
    ] {
        assert!(restored(&invalid).is_err());
    }
}

/// A block without a rule, as written by earlier versions, is restored.
#[test]
fn a_block_without_a_rule_is_restored() {
    // A record with a tag, a key of three bytes, no expiry time, and a reason of one byte.
    let bytes = [
        &[2_u8][..],
        &3_u64.to_le_bytes(),
        b"key",
        &u64::MAX.to_le_bytes(),
        &1_u64.to_le_bytes(),
        b"r",
    ];
    let (store, now) = (one_shard(), Timestamp::from_micros(1_000_000));
    store.restore(&bytes.concat(), now).unwrap();
    let block = store.block_on(b"key", now).unwrap();
    assert_eq!((block.reason.as_str(), &block.rule), ("r", &None));
    assert_eq!(block.values(), None);
    assert!(!block.is_of_rule());
}

proptest! {
    #![proptest_config(strategies::cases(1_000))]

    #[test]
    fn a_restart_changes_nothing(
        rule in rule(),
        start in strategies::start(),
        before in strategies::asks(20),
        after in strategies::asks(20),
        wait in 0..1_000_u64,
    ) {
        let (store, again) = (one_shard(), many_shards());
        let end = walk(&rule, &store, start, &before, |_, _, _| Ok(()))? + wait;
        let key = b"blocked".as_slice();
        store.block(key, Some(Span::from_secs(5)), "why", Timestamp::from_micros(end));
        again.restore(&saved(&store, end), Timestamp::from_micros(end)).expect("a valid snapshot");
        let end_of_time = Timestamp::from_micros(end);
        prop_assert_eq!(again.block_on(key, end_of_time), store.block_on(key, end_of_time));
        walk(&rule, &store, end, &after, |now, cost, outcome| {
            prop_assert_eq!(ask(&again, &rule, now, cost, Effect::Charge), *outcome);
            Ok(())
        })?;
    }

    /// Restoring never panics, whether the bytes are random or a valid snapshot that was truncated,
    /// modified or duplicated. Decisions on the restored state also do not panic.
    #[test]
    fn no_bytes_make_it_panic(
        rule in rule(),
        start in strategies::start(),
        asks in strategies::asks(10),
        noise in prop::collection::vec(any::<u8>(), 0..200),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..12),
        end in any::<Index>(),
    ) {
        let store = one_shard();
        let now = Timestamp::from_micros(start);
        let refused = store.restore(&noise, now);
        prop_assert!(refused.is_err() || noise.is_empty() || noise[0] <= 4);
        let store = one_shard();
        let latest = walk(&rule, &store, start, &asks, |_, _, _| Ok(()))?;
        let mut bytes = saved(&store, latest);
        if bytes.is_empty() {
            return Ok(());
        }
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1).max(bytes.len() / 2));
        let again = one_shard();
        // Make decisions on the restored state, even if the snapshot was rejected.
        let _ = again.restore(&bytes, now);
        let (mut time, mut last, mut outcomes) = (latest, None, Vec::new());
        for Ask { step, price, .. } in &asks {
            time = step.from(time, last.as_ref()).max(time);
            let charge = rule.charge(price.units(last.as_ref()));
            again.check(&[charge], Timestamp::from_micros(time), Effect::Charge, &mut outcomes);
            // A modified byte can turn a count into a block, which has no outcome.
            last = outcomes.first().copied();
        }
        let _ = again.restore(&saved(&again, latest), now);
    }
}

/// If a snapshot does not fit, the store restores the keys for which it has room.
#[test]
fn a_smaller_store_restores_what_fits() {
    let hourly = Rate {
        count: 10,
        period: Span::from_secs(3_600),
    };
    let limit = Limit::new(Kind::Log.algorithm(10, hourly, 1)).unwrap();
    let (large, now) = (many_shards(), 1_700_000_000_000_000);
    for key in 0..500_u16 {
        let rule = Rule::new(&key.to_le_bytes(), vec![limit.clone()], false);
        assert!(ask(&large, &rule, now, 6, Effect::Charge).allowed);
    }
    let bounds = MemoryBounds {
        max_keys: 100,
        when_full: WhenFull::Deny,
        ..MemoryBounds::default()
    };
    let small = MemoryStore::new(bounds);
    assert_eq!(
        small.restore(&saved(&large, now), Timestamp::from_micros(now)),
        Ok(100)
    );
    assert_eq!(small.stats().keys, 100);
    // Keys that are already in the store are not replaced.
    assert_eq!(
        small.restore(&saved(&large, now), Timestamp::from_micros(now)),
        Ok(0)
    );
}

#[test]
fn expired_entries_are_not_restored() {
    let hourly = Rate {
        count: 10,
        period: Span::from_secs(3_600),
    };
    let limit = Limit::new(Kind::Gcra.algorithm(10, hourly, 1)).unwrap();
    let (store, rule) = (one_shard(), Rule::new(b"key", vec![limit], false));
    ask(&store, &rule, 0, 1, Effect::Charge);
    store.block(
        b"key",
        Some(Span::from_secs(1)),
        "",
        Timestamp::from_micros(0),
    );
    store.block(b"other", None, "for good", Timestamp::from_micros(0));
    let (bytes, again) = (saved(&store, 0), one_shard());
    let later = Timestamp::from_micros(3_600_000_000);
    assert_eq!(again.restore(&bytes, later), Ok(0));
    assert_eq!(again.stats().keys, 0);
    let blocks = again.blocks(later);
    assert_eq!(blocks.len(), 1);
    assert_eq!(
        (&*blocks[0].key, blocks[0].until),
        (b"other".as_slice(), None)
    );
}
