//! Tests that counters survive a restart, and that a server starts even if the snapshot is damaged.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;

use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore,
    Span, Timestamp, notation,
};
use tidegate_limiter::snapshot::{self, RestoreOutcome};

const NOW: Timestamp = Timestamp::from_micros(1_767_225_600_000_000);

fn limits() -> Limits {
    let rate = notation::rate("3/h").unwrap();
    // Without a burst, GCRA would deny the second of three requests sent at the same instant.
    let names = AlgorithmName::ALL
        .map(|(_, name)| name)
        .into_iter()
        .filter(|name| *name != AlgorithmName::Gcra);
    let limits: Vec<_> = names
        .map(|name| LimitSpec::shorthand(rate, name).build().unwrap())
        .collect();
    Limits::new(limits).unwrap()
}

fn spend(store: &MemoryStore, limits: &Limits, key: &[u8]) -> Decision {
    let charge = Charge::new(key, limits, Cost::ONE).unwrap();
    store.check(&[charge], NOW, Effect::Charge, &mut Vec::new())
}

#[test]
fn counters_and_blocks_survive_a_restart() {
    let (folder, limits) = (tempfile::tempdir().unwrap(), limits());
    let path = folder.path().join("counters");
    let before = MemoryStore::new(MemoryBounds::default());
    for _ in 0..3 {
        assert_eq!(spend(&before, &limits, b"spent"), Decision::Admitted);
    }
    before.block(b"blocked", Some(Span::from_secs(60)), "abuse", NOW);
    snapshot::save(&before, &path, NOW).unwrap();

    let after = MemoryStore::new(MemoryBounds::default());
    assert_eq!(
        snapshot::restore(&after, &path, NOW).unwrap(),
        RestoreOutcome::Keys(1)
    );
    assert_eq!(spend(&after, &limits, b"spent"), Decision::Limited);
    assert_eq!(spend(&after, &limits, b"other"), Decision::Admitted);
    assert_eq!(after.blocks(NOW), before.blocks(NOW));
}

/// Regression test: after a snapshot was written with the clock a year ahead, requests were denied
/// for a year after the clock was corrected.
#[test]
fn a_file_from_the_future_denies_no_longer_than_its_limits() {
    let (folder, limits) = (tempfile::tempdir().unwrap(), limits());
    let path = folder.path().join("counters");
    let ahead = NOW.after(Span::from_secs(365 * 86_400));
    let charge = Charge::new(b"spent", &limits, Cost::new(3).unwrap()).unwrap();
    let check = |store: &MemoryStore, now| {
        let mut outcomes = Vec::new();
        store.check(&[charge], now, Effect::Charge, &mut outcomes)
    };
    let before = MemoryStore::new(MemoryBounds::default());
    assert_eq!(check(&before, ahead), Decision::Admitted);
    before.block(b"blocked", Some(Span::from_secs(60)), "abuse", ahead);
    snapshot::save(&before, &path, ahead).unwrap();

    let after = MemoryStore::new(MemoryBounds::default());
    let restored = snapshot::restore(&after, &path, NOW).unwrap();
    assert_eq!(restored, RestoreOutcome::Keys(1));
    assert_eq!(check(&after, NOW), Decision::Limited);
    let minute = NOW.after(Span::from_secs(60));
    assert_eq!(after.blocks(NOW)[0].until, Some(minute));
    // The weighted counter takes two windows to recover, longer than all other limits.
    let two_hours = NOW.after(Span::from_secs(2 * 3_600));
    assert_eq!(check(&after, two_hours), Decision::Admitted);
}

#[test]
fn a_missing_file_is_an_empty_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    assert_eq!(
        snapshot::restore(&store, &folder.path().join("none"), NOW).unwrap(),
        RestoreOutcome::Nothing
    );
}

#[test]
fn a_file_cut_anywhere_or_with_any_byte_changed_is_set_aside() {
    let (folder, limits) = (tempfile::tempdir().unwrap(), limits());
    let path = folder.path().join("counters");
    let store = MemoryStore::new(MemoryBounds::default());
    spend(&store, &limits, b"user");
    snapshot::save(&store, &path, NOW).unwrap();
    let whole = fs::read(&path).unwrap();
    let cut = (0..whole.len()).map(|len| whole[..len].to_vec());
    let changed = (0..whole.len()).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        bytes
    });
    for damaged in cut.chain(changed) {
        fs::write(&path, &damaged).unwrap();
        let empty = MemoryStore::new(MemoryBounds::default());
        let restored = snapshot::restore(&empty, &path, NOW).unwrap();
        let RestoreOutcome::SetAside(aside) = restored else {
            panic!("{restored:?}")
        };
        assert_eq!(fs::read(aside).unwrap(), damaged);
        assert!(!path.exists());
        assert_eq!(empty.stats().keys, 0);
    }
}

/// Regression test: if a snapshot contained an invalid record with a valid checksum, the records
/// before it were restored.
#[test]
fn a_file_with_an_invalid_record_is_set_aside_as_a_whole() {
    let (folder, limits) = (tempfile::tempdir().unwrap(), limits());
    let path = folder.path().join("counters");
    let store = MemoryStore::new(MemoryBounds::default());
    spend(&store, &limits, b"user");
    snapshot::save(&store, &path, NOW).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let unknown = [9];
    // A length of 0 marks the end of the file. Replace it with an invalid part and a new end mark.
    bytes.truncate(bytes.len() - 8);
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(crc32fast::hash(&unknown).to_le_bytes());
    bytes.extend(unknown);
    bytes.extend(0_u64.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let empty = MemoryStore::new(MemoryBounds::default());
    let restored = snapshot::restore(&empty, &path, NOW).unwrap();
    assert!(
        matches!(restored, RestoreOutcome::SetAside(_)),
        "{restored:?}"
    );
    assert_eq!(empty.stats().keys, 0);
}

#[test]
fn a_snapshot_is_for_its_owner_alone_whatever_was_left_behind() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let draft = folder.path().join("counters.draft");
    fs::write(&draft, "left behind by a crash").unwrap();
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o666)).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    snapshot::save(&store, &path, NOW).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
