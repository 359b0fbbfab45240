//! Snapshots: files with the contents of the memory store, so that counters survive a restart.
//!
//! ```text
//! magic number │ length, checksum, bytes of part 0 │ … of part 1 │ … │ length 0
//! ```
//!
//! If there are outstanding reservations, the file begins with a different magic number and has
//! further parts, which end with another length 0. A part with reservations consists of the time at
//! which it was written (8 bytes), and the reservations, each after its length (4 bytes). Versions
//! that do not know the part type can read a file without reservations.
//!
//! A snapshot is written to a temporary file and renamed into place. A reader therefore sees either
//! the old or the new snapshot, never a partial file. Each part has a CRC-32 checksum. All
//! checksums and records are verified before the first record is restored. A truncated or corrupted
//! file is renamed and kept, and the store starts empty.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tidegate_core::{CLOCK_JUMP, MemoryStore, Span, Timestamp};

use crate::date::date;

/// The first bytes of a snapshot file without reservations.
const MAGIC: &[u8; 16] = b"tidegate-store-2";

/// The first bytes of a snapshot file with reservations.
const MAGIC_WITH_RESERVATIONS: &[u8; 16] = b"tidegate-store-3";

/// The result of restoring the snapshot at startup.
#[derive(Debug, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// There was no snapshot.
    Nothing,
    /// The snapshot was restored.
    Restored {
        /// The number of keys.
        keys: usize,
        /// The outstanding reservations, for [`ServerLimiter::restore_reservations`].
        ///
        /// [`ServerLimiter::restore_reservations`]: crate::ServerLimiter::restore_reservations
        reservations: Vec<Vec<u8>>,
    },
    /// The file was corrupt and was renamed to this path.
    SetAside(PathBuf),
}

/// The interval between log records for a failure that persists.
const REMIND_EVERY: Span = Span::from_secs(3_600);

/// The advice for a snapshot that cannot be written. The advice lists several causes, because some
/// file system errors do not identify the cause.
const ADVICE: &str = "check that the folder exists, that the server is allowed to write to it and that the disk has space; \
    the server retries, so no restart is needed";

/// Whether snapshots are configured, and the current error if they cannot be written. With
/// snapshots, the counters of this process survive a restart.
#[derive(Debug, Default)]
pub struct SnapshotHealth(Mutex<SnapshotState>);

#[derive(Debug, Default)]
struct SnapshotState {
    is_configured: bool,
    failure: Option<SnapshotFailure>,
}

/// A series of failed attempts to write the snapshot.
#[derive(Debug)]
struct SnapshotFailure {
    error: String,
    since: Timestamp,
    attempts: u64,
    logged_at: Timestamp,
    /// Whether only the check at startup has failed, and no write has failed yet.
    is_startup_check: bool,
}

/// The log record to write about a failed snapshot.
#[derive(Debug, PartialEq, Eq)]
enum FailureRecord {
    /// The first failure, or an error that differs from the previous error.
    NewError,
    /// The same error has persisted for an hour since it was last logged.
    Reminder { attempts: u64, since: Timestamp },
}

impl SnapshotHealth {
    /// Records that snapshots are configured.
    pub fn mark_configured(&self) {
        self.lock().is_configured = true;
    }

    /// Records a failure to write the snapshot at `now`. Logs the failure if the error is new, and
    /// once an hour while the error persists.
    pub fn fail(&self, error: &str, now: Timestamp) {
        match self.record_failure(error, now) {
            Some(FailureRecord::NewError) => tracing::error!(
                "{error}; keeping the previous snapshot; a restart now would lose the changes since that snapshot; next report in an hour"
            ),
            Some(FailureRecord::Reminder { attempts, since }) => {
                let failing_for_s = seconds(now.since(since));
                tracing::error!(attempts, failing_for_s, "{error}; still failing");
            }
            None => {}
        }
    }

    /// Records that the check at startup failed. This method does not log the failure: the caller
    /// must have logged it. The first failed write is logged nevertheless.
    pub fn fail_startup_check(&self, error: String, now: Timestamp) {
        self.lock().failure = Some(SnapshotFailure {
            error,
            since: now,
            attempts: 1,
            logged_at: now,
            is_startup_check: true,
        });
    }

    fn record_failure(&self, error: &str, now: Timestamp) -> Option<FailureRecord> {
        let mut state = self.lock();
        let failure = state.failure.get_or_insert_with(|| SnapshotFailure {
            error: String::new(),
            since: now,
            attempts: 0,
            logged_at: now,
            is_startup_check: false,
        });
        failure.attempts = failure.attempts.saturating_add(1);
        let is_first = std::mem::take(&mut failure.is_startup_check);
        if is_first || failure.error != error {
            error.clone_into(&mut failure.error);
            failure.logged_at = now;
            return Some(FailureRecord::NewError);
        }
        if now.since(failure.logged_at) < REMIND_EVERY {
            return None;
        }
        failure.logged_at = now;
        let (attempts, since) = (failure.attempts, failure.since);
        Some(FailureRecord::Reminder { attempts, since })
    }

    /// Records that the snapshot was written.
    pub fn record_success(&self) {
        if let Some(failure) = self.lock().failure.take() {
            let failures = failure.attempts;
            tracing::info!(
                failures,
                "the snapshot was written after earlier attempts had failed"
            );
        }
    }

    /// Describes the current snapshot failure, if there is one: the error, when it began, and how
    /// to fix it.
    #[must_use]
    pub fn problem(&self, now: Timestamp) -> Option<String> {
        let state = self.lock();
        let SnapshotFailure {
            error,
            since,
            attempts,
            ..
        } = state.failure.as_ref()?;
        let secs = seconds(now.since(*since));
        let begun = date(*since).map(|date| format!("since {date}, "));
        let begun = begun.unwrap_or_default();
        Some(format!(
            "{error} ({begun}{attempts} attempts in {secs} s); a restart would lose the changes since the last snapshot; {ADVICE}"
        ))
    }

    /// Returns whether snapshots are configured and the last snapshot was written.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        let state = self.lock();
        state.is_configured && state.failure.is_none()
    }

    /// Returns whether snapshots are configured.
    #[must_use]
    pub fn is_configured(&self) -> bool {
        self.lock().is_configured
    }

    fn lock(&self) -> MutexGuard<'_, SnapshotState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn seconds(span: Span) -> u64 {
    span.as_micros() / 1_000_000
}

/// Atomically writes the contents of `store` at `now` to the file at `path`, together with the
/// outstanding reservations. `reservations` is called after the contents of the store were copied.
/// `reservations` must return only reservations whose charges are in the copy.
///
/// Each shard of the store is locked only while the shard is copied.
///
/// # Errors
///
/// Returns the file system error. If writing fails, the previous snapshot is kept.
pub fn save(
    store: &MemoryStore,
    reservations: impl FnOnce() -> Vec<Vec<u8>>,
    path: &Path,
    now: Timestamp,
) -> io::Result<()> {
    let draft = beside(path, ".draft");
    let written = write_all(store, reservations, &draft, now);
    let written = written.and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        // A cleanup error is ignored, because the first error is reported.
        let _ = fs::remove_file(&draft);
    }
    written
}

/// Checks whether [`save`] could write to `path` now, by creating and deleting a file next to it.
///
/// # Errors
///
/// Returns the file system error.
pub fn check_writable(path: &Path) -> io::Result<()> {
    let probe = beside(path, ".trial");
    create_private(&probe)?;
    fs::remove_file(probe)
}

/// Restores the file at `path` into `store`. If the clock was far ahead of `now` when the file was
/// written, the times stored with keys and blocks are moved back by the difference.
///
/// # Errors
///
/// Returns the file system error. For a corrupt file, returns [`RestoreOutcome::SetAside`] instead
/// of an error.
pub fn restore(store: &MemoryStore, path: &Path, now: Timestamp) -> io::Result<RestoreOutcome> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(RestoreOutcome::Nothing);
        }
        Err(error) => return Err(error),
    };
    let restored = parse(&bytes).and_then(|contents| {
        let reservations = decode_reservations(&contents.reservations, now)?;
        let keys = store.restore_parts(&contents.store, now).ok()?;
        Some(RestoreOutcome::Restored { keys, reservations })
    });
    restored.map_or_else(|| set_aside(path, now), Ok)
}

fn write_all(
    store: &MemoryStore,
    reservations: impl FnOnce() -> Vec<Vec<u8>>,
    draft: &Path,
    now: Timestamp,
) -> io::Result<()> {
    let mut out = BufWriter::new(create_private(draft)?);
    out.write_all(MAGIC)?;
    let mut part = Vec::new();
    for number in 0..store.parts() {
        part.clear();
        store.save(number, now, &mut part);
        write_part(&mut out, &part)?;
    }
    out.write_all(&0_u64.to_le_bytes())?;
    let reservations = reservations();
    if !reservations.is_empty() {
        write_part(&mut out, &encode_reservations(&reservations, now))?;
        out.write_all(&0_u64.to_le_bytes())?;
        out.rewind()?;
        out.write_all(MAGIC_WITH_RESERVATIONS)?;
    }
    out.into_inner()
        .map_err(io::IntoInnerError::into_error)?
        .sync_all()
}

fn write_part(out: &mut impl Write, part: &[u8]) -> io::Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    out.write_all(&(part.len() as u64).to_le_bytes())?;
    out.write_all(&crc32fast::hash(part).to_le_bytes())?;
    out.write_all(part)
}

fn encode_reservations(reservations: &[Vec<u8>], now: Timestamp) -> Vec<u8> {
    let mut part = now.as_micros().to_le_bytes().to_vec();
    for reservation in reservations {
        // A reservation has a bounded number of charges, each with a key of bounded length.
        let length = u32::try_from(reservation.len()).expect("a reservation is below 4 GiB");
        part.extend(length.to_le_bytes());
        part.extend(reservation);
    }
    part
}

/// Returns the reservations of a snapshot; `None` if a part is not valid. Returns no reservations
/// if the clock was far ahead when the snapshot was written: the instants of the keys are then
/// moved back, so the receipts of the reservations no longer match.
fn decode_reservations(parts: &[&[u8]], now: Timestamp) -> Option<Vec<Vec<u8>>> {
    let mut reservations = Vec::new();
    for part in parts {
        let (time, mut rest) = part.split_first_chunk()?;
        let is_from_ahead =
            Timestamp::from_micros(u64::from_le_bytes(*time)).since(now) > CLOCK_JUMP;
        while let Some((length, after)) = rest.split_first_chunk() {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            let (reservation, after) = after.split_at_checked(length)?;
            if !is_from_ahead {
                reservations.push(reservation.to_vec());
            }
            rest = after;
        }
        if !rest.is_empty() {
            return None;
        }
    }
    Some(reservations)
}

/// Creates a file that only this user can read, because keys contain client addresses and customer
/// names.
fn create_private(path: &Path) -> io::Result<File> {
    // A file left over from an earlier attempt may have other permissions.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// The parts of a snapshot.
struct Contents<'b> {
    store: Vec<&'b [u8]>,
    reservations: Vec<&'b [u8]>,
}

/// Returns the parts of a file if it is complete and all checksums match.
fn parse(bytes: &[u8]) -> Option<Contents<'_>> {
    let (magic, rest) = bytes.split_first_chunk()?;
    let (store, rest) = sound_parts(rest)?;
    let (reservations, rest) = match magic {
        MAGIC => (Vec::new(), rest),
        MAGIC_WITH_RESERVATIONS => sound_parts(rest)?,
        _ => return None,
    };
    rest.is_empty().then_some(Contents {
        store,
        reservations,
    })
}

/// Returns the parts up to the next length 0 if all checksums match, and the bytes behind them.
fn sound_parts(mut rest: &[u8]) -> Option<(Vec<&[u8]>, &[u8])> {
    let mut parts = Vec::new();
    loop {
        let (length, after) = rest.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        if length == 0 {
            return Some((parts, after));
        }
        let (checksum, after) = after.split_first_chunk::<4>()?;
        let (part, after) = after.split_at_checked(length)?;
        if crc32fast::hash(part) != u32::from_le_bytes(*checksum) {
            return None;
        }
        parts.push(part);
        rest = after;
    }
}

fn set_aside(path: &Path, now: Timestamp) -> io::Result<RestoreOutcome> {
    let aside = beside(path, &format!(".damaged-{}", now.as_micros()));
    fs::rename(path, &aside)?;
    Ok(RestoreOutcome::SetAside(aside))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_failure_is_logged_on_change_and_once_an_hour() {
        let health = SnapshotHealth::default();
        assert!(!health.is_healthy());
        health.mark_configured();
        assert!(health.is_healthy());
        let at = |secs: u64| Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000);
        assert_eq!(
            health.record_failure("full", at(0)),
            Some(FailureRecord::NewError)
        );
        assert_eq!(health.record_failure("full", at(30)), None);
        assert_eq!(
            health.record_failure("gone", at(60)),
            Some(FailureRecord::NewError)
        );
        assert_eq!(health.record_failure("gone", at(3_659)), None);
        let reminder = FailureRecord::Reminder {
            attempts: 5,
            since: at(0),
        };
        assert_eq!(health.record_failure("gone", at(3_660)), Some(reminder));
        assert_eq!(health.record_failure("gone", at(3_690)), None);
        let problem = health.problem(at(3_700)).unwrap();
        assert!(
            problem.starts_with("gone (since 2023-11-14T22:13:20Z, 6 attempts in 3700 s)"),
            "{problem}"
        );
        assert!(!health.is_healthy());
        health.record_success();
        assert!(health.is_healthy() && health.problem(at(3_700)).is_none());
        assert_eq!(
            health.record_failure("full", at(3_720)),
            Some(FailureRecord::NewError)
        );
    }
}
