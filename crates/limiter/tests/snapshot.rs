//! Tests that counters survive a restart, and that a server starts even if the snapshot is damaged.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use futures_util::FutureExt as _;
use tidegate::{Clock, rate_limiter::SlotTurn};
use tidegate_config::{Config, ReservationsConfig};
use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore,
    Request, Scratch, Span, Timestamp, Verdict, notation,
};
use tidegate_limiter::{
    ServerLimiter,
    reservations::{Reservation, ReservationError, Reservations},
    snapshot::{self, RestoreOutcome},
};

/// The result for a snapshot of one key, without reservations.
const ONE_KEY: RestoreOutcome = RestoreOutcome::Restored {
    keys: 1,
    reservations: Vec::new(),
};

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
    snapshot::save(&before, Vec::new, &path, NOW).unwrap();

    let after = MemoryStore::new(MemoryBounds::default());
    assert_eq!(snapshot::restore(&after, &path, NOW).unwrap(), ONE_KEY);
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
    snapshot::save(&before, Vec::new, &path, ahead).unwrap();

    let after = MemoryStore::new(MemoryBounds::default());
    let restored = snapshot::restore(&after, &path, NOW).unwrap();
    assert_eq!(restored, ONE_KEY);
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
    let reservations = || vec![b"one".to_vec(), b"three".to_vec()];
    snapshot::save(&store, reservations, &path, NOW).unwrap();
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
    snapshot::save(&store, Vec::new, &path, NOW).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let unknown = [9];
    // A length of 0 marks the end of the file. Replace the end mark with an invalid part and a new
    // end mark.
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
    snapshot::save(&store, Vec::new, &path, NOW).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// A limit that a process enforces before and after a restart.
const RULES: &str =
    "rules: [{name: api, limits: [{algorithm: fixed_window, limit: 10, window: 1d}]}]";

fn limiter(store: MemoryStore, secret: Option<&str>) -> ServerLimiter {
    let rules = Config::parse(RULES).unwrap().rules;
    let reservations = Reservations::new(ReservationsConfig::default(), secret).unwrap();
    ServerLimiter::new(rules, store, Clock::manual(NOW)).with_reservations(reservations)
}

/// Reserves `cost` units for 60 s. Returns the token, and the number of remaining units.
fn reserve(limiter: &ServerLimiter, cost: u64) -> (Option<String>, u64) {
    let request = Request::new(&[], Cost::new(cost).unwrap()).unwrap();
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let (ttl, turn) = (Span::from_secs(60), SlotTurn::at_once());
    let finish = |_: &_, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
        let left = verdict.leading().unwrap().outcome.remaining;
        (reservation.map(|reservation| reservation.token), left)
    };
    let reserved = limiter.reserve(&rules, &mut scratch, &request, ttl, turn, finish);
    reserved.now_or_never().unwrap().unwrap()
}

fn left(limiter: &ServerLimiter) -> u64 {
    let (token, left) = reserve(limiter, 1);
    match token {
        Some(token) => {
            settle(limiter, &token, 0).unwrap();
            left + 1
        }
        None => left,
    }
}

fn settle(limiter: &ServerLimiter, token: &str, cost: u64) -> Result<u64, ReservationError> {
    let settled = limiter.settle_reservation(token, cost).now_or_never();
    settled.unwrap().map(|settled| settled.settled)
}

/// Restarts a server: saves the snapshot of `before`, and restores it into a new limiter.
fn restart(
    before: &ServerLimiter,
    path: &Path,
    secret: Option<&str>,
    now: Timestamp,
) -> ServerLimiter {
    before.save_snapshot(path).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let RestoreOutcome::Restored { reservations, .. } =
        snapshot::restore(&store, path, now).unwrap()
    else {
        panic!("the snapshot was not restored")
    };
    let after = limiter(store, secret);
    after.clock().set(now);
    after.restore_reservations(&reservations);
    after
}

#[test]
fn outstanding_reservations_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let secret = Some("the-secret-of-the-server");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), secret);
    let (settled, first, second) = (
        reserve(&before, 1).0.unwrap(),
        reserve(&before, 2).0.unwrap(),
        reserve(&before, 4).0.unwrap(),
    );
    settle(&before, &settled, 1).unwrap();
    let after = restart(&before, &path, secret, NOW);
    assert_eq!(left(&after), 3);
    assert!(settle(&after, &settled, 1).is_err());
    assert_eq!(settle(&after, &first, 1), Ok(1));
    assert_eq!(left(&after), 4);
    // The second restart is after the expiry of the second reservation.
    let later = NOW.after(Span::from_secs(61));
    let last = restart(&after, &path, secret, later);
    assert!(settle(&last, &first, 1).is_err());
    assert_eq!(left(&last), 4);
    last.expire_reservations().now_or_never().unwrap();
    assert_eq!(left(&last), 8);
    assert!(settle(&last, &second, 1).is_err());
}

/// More reservations than are copied while the table is locked.
#[test]
fn many_outstanding_reservations_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    let rules = RULES.replace("limit: 10", "limit: 1000");
    let rules = Config::parse(&rules).unwrap().rules;
    before.swap_rules(rules.clone());
    for number in 0..600 {
        // Half of the reservations are due at the same time.
        let millis = u64::saturating_sub(number, 300);
        before.clock().set(NOW.after(Span::from_millis(millis)));
        assert!(reserve(&before, 1).0.is_some());
    }
    before.save_snapshot(&path).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let now = NOW.after(Span::from_secs(61));
    let RestoreOutcome::Restored { reservations, .. } =
        snapshot::restore(&store, &path, now).unwrap()
    else {
        panic!("the snapshot was not restored")
    };
    let after = limiter(store, None);
    after.swap_rules(rules);
    after.clock().set(now);
    assert_eq!(after.restore_reservations(&reservations), 600);
    assert_eq!(left(&after), 400);
    // The future yields after each batch.
    while after.expire_reservations().now_or_never().is_none() {}
    assert_eq!(left(&after), 1_000);
}

/// The snapshot is older than the settlement, so the reservation is outstanding again after a
/// crash.
#[test]
fn a_reservation_settled_after_the_snapshot_is_refunded_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    let token = reserve(&before, 4).0.unwrap();
    let after = restart(&before, &path, None, NOW);
    settle(&before, &token, 4).unwrap();
    drop(before);
    assert_eq!(left(&after), 6);
    after.clock().set(NOW.after(Span::from_secs(60)));
    after.expire_reservations().now_or_never().unwrap();
    assert_eq!(left(&after), 10);
}

/// With a random secret, nobody can settle the reservations after the restart.
#[test]
fn reservations_expire_after_a_restart_with_another_secret() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    let token = reserve(&before, 4).0.unwrap();
    let after = restart(&before, &path, None, NOW);
    let invalid = settle(&after, &token, 1);
    assert_eq!(invalid, Err(ReservationError::Invalid));
    after.clock().set(NOW.after(Span::from_secs(60)));
    after.expire_reservations().now_or_never().unwrap();
    assert_eq!(left(&after), 10);
}

/// The restored keys are moved back in this case, so the receipts do not match them.
#[test]
fn reservations_from_the_future_stay_charged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    before.clock().set(NOW.after(Span::from_secs(365 * 86_400)));
    reserve(&before, 4).0.unwrap();
    let after = restart(&before, &path, None, NOW);
    assert_eq!(left(&after), 6);
    after.clock().set(NOW.after(Span::from_secs(61)));
    after.expire_reservations().now_or_never().unwrap();
    assert_eq!(left(&after), 6);
}

/// A version that does not know reservations can read the snapshot of a server without any.
#[test]
fn the_format_changes_only_with_reservations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    let token = reserve(&before, 4).0.unwrap();
    before.save_snapshot(&path).unwrap();
    assert!(fs::read(&path).unwrap().starts_with(b"tidegate-store-3"));
    settle(&before, &token, 4).unwrap();
    before.save_snapshot(&path).unwrap();
    assert!(fs::read(&path).unwrap().starts_with(b"tidegate-store-2"));
}

/// Stops a thread. Without the guard, the thread would run forever after a failed assertion.
struct SetOnDrop<'f>(&'f AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// While a snapshot is written, reservations are made and cancelled. If the snapshot contained a
/// reservation without its charge, or after its refund, the refund after a restart would remove
/// units of other requests.
#[test]
fn a_snapshot_under_load_contains_only_charged_reservations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counters");
    let before = limiter(MemoryStore::new(MemoryBounds::default()), None);
    let charged = reserve(&before, 5).0.unwrap();
    settle(&before, &charged, 5).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let token = reserve(&before, 5).0.unwrap();
                settle(&before, &token, 0).unwrap();
            }
        });
        let _stop = SetOnDrop(&is_done);
        for _ in 0..200 {
            let after = restart(&before, &path, None, NOW);
            after.clock().set(NOW.after(Span::from_secs(61)));
            after.expire_reservations().now_or_never().unwrap();
            let left = left(&after);
            assert!(left <= 5, "{left} units are left");
        }
    });
}
