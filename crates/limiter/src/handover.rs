//! The state of a limiter that moves to another process during an upgrade.
//!
//! The state is a sequence of records. A record consists of a tag and bytes, and is sent on its
//! own. Once this process has sent a part of the memory store, it makes no decision on the part's
//! keys, so no charge is lost or made twice.

use std::{ffi::OsStr, io, os::unix::ffi::OsStrExt as _};

use tidegate_core::{SnapshotError, Span, Timestamp};

use crate::ServerLimiter;

/// The tag of a record that contains a part of the memory store, in the format of a snapshot.
const STORE_PART: u8 = 1;

/// The tag of a record that contains one override, as a JSON document.
const OVERRIDE: u8 = 2;

/// The tag of the record that contains the random key for signing reservation tokens.
const TOKEN_KEY: u8 = 3;

/// The tag of a record that contains one reservation and the receipt of its charges.
const RESERVATION: u8 = 4;

/// The tag of the record that contains the time of the sending process's clock, in microseconds (8
/// bytes, little-endian). This record is sent first.
const TIME: u8 = 5;

/// The tag of the record that contains the canonical path of the override file.
const OVERRIDE_FILE: u8 = 6;

/// The tag of a record that contains one settled reservation of counters, so that a repeated
/// settlement is recognized.
const SETTLED: u8 = 7;

/// The maximum difference between the clocks of two processes that is not corrected. The difference
/// includes the time that the record takes to arrive.
const MAX_CLOCK_DIFFERENCE: Span = Span::from_secs(1);

/// A function that sends a record, given its tag and its bytes.
pub type SendState<'f> = dyn FnMut(u8, &[u8]) -> io::Result<()> + 'f;

/// Returns whether a record is a part of the memory store. Several threads can restore such records
/// at the same time.
#[must_use]
pub const fn is_store_part(tag: u8) -> bool {
    tag == STORE_PART
}

/// The reason why the state of another process cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// A part of the memory store is not valid.
    #[error("the state of the memory store cannot be read: {0}")]
    Store(#[from] SnapshotError),
    /// An override is not valid.
    #[error("an override cannot be read: {0}")]
    Override(String),
    /// A record has an unknown tag.
    #[error("the state contains a record with the unknown tag {0}")]
    Tag(u8),
    /// The key of reservation tokens is not valid.
    #[error("the key of reservation tokens is not valid")]
    TokenKey,
    /// A reservation is not valid.
    #[error("a reservation cannot be read")]
    Reservation,
    /// The time of the other process is not valid.
    #[error("the time of the old process cannot be read")]
    Time,
    /// The override file cannot be opened.
    #[error("cannot open the override file: {0}")]
    OverrideFile(#[from] io::Error),
}

impl ServerLimiter {
    /// Sends the state of this limiter, and seals the memory store, which then makes no more
    /// decisions.
    ///
    /// With Redis, the state of the limits is in Redis. The memory store then contains only what
    /// the fallback has counted while Redis was unreachable.
    ///
    /// # Errors
    ///
    /// Returns the error of `send`. If there is an error, the caller must call
    /// [`Self::take_back_state`].
    pub fn send_state(&self, send: &mut SendState<'_>) -> io::Result<()> {
        send(TIME, &self.now().as_micros().to_le_bytes())?;
        if self.redis_store().is_none() {
            // From now on, this process makes no change to the overrides, because the new process
            // would not receive the change.
            self.set_overrides_moved(true);
            self.set_moved(true);
            if let Some(path) = self.override_file() {
                send(OVERRIDE_FILE, path.as_os_str().as_bytes())?;
            }
            for document in self.override_documents() {
                send(OVERRIDE, &document)?;
            }
        }
        if let Some(key) = self.reservations.own_key() {
            send(TOKEN_KEY, key)?;
        }
        let store = self.local_store();
        let mut part = Vec::new();
        for number in 0..store.parts() {
            part.clear();
            store.save_and_seal(number, self.now(), &mut part);
            if !part.is_empty() {
                send(STORE_PART, &part)?;
            }
        }
        for reservation in self.reservations_to_move() {
            send(RESERVATION, &reservation)?;
        }
        if self.redis_store().is_none() {
            for settled in self.settled_to_move() {
                send(SETTLED, &settled)?;
            }
        }
        Ok(())
    }

    /// Uses this process's own state again, because the other process has failed.
    pub fn take_back_state(&self) {
        self.local_store().unseal();
        self.set_moved(false);
        self.set_overrides_moved(false);
    }

    /// Prepares this limiter for the records of another process.
    pub fn begin_taking_state(&self) {
        if self.redis_store().is_none() {
            self.begin_override_restore();
        }
    }

    /// Takes a record of another process. Returns the number of keys in the record.
    ///
    /// # Errors
    ///
    /// [`HandoverError`] if the record is not valid.
    pub fn take_state(&self, tag: u8, record: &[u8]) -> Result<usize, HandoverError> {
        match tag {
            STORE_PART => Ok(self.local_store().restore(record, self.now())?),
            OVERRIDE => {
                let restored = self.restore_override(record);
                restored.map_err(HandoverError::Override)?;
                Ok(0)
            }
            OVERRIDE_FILE => {
                self.take_old_override_file(OsStr::from_bytes(record).into());
                Ok(0)
            }
            TOKEN_KEY => {
                let is_taken = self.reservations.take_key(record);
                is_taken.then_some(0).ok_or(HandoverError::TokenKey)
            }
            RESERVATION => {
                let is_taken = self.take_reservation(record);
                is_taken.then_some(0).ok_or(HandoverError::Reservation)
            }
            SETTLED => {
                let is_taken = self.take_settled(record);
                is_taken.then_some(0).ok_or(HandoverError::Reservation)
            }
            TIME => {
                let micros = record.try_into().map_err(|_| HandoverError::Time)?;
                self.continue_clock(Timestamp::from_micros(u64::from_le_bytes(micros)));
                Ok(0)
            }
            other => Err(HandoverError::Tag(other)),
        }
    }

    /// Continues with the time of the other process, if the wall clock was stepped since the other
    /// process was started. Without the correction, every deadline in the state would shift. With
    /// Redis, the correction applies to the state of the fallback, which uses the clock of the
    /// process.
    fn continue_clock(&self, old_time: Timestamp) {
        let own = self.now();
        let difference = own.since(old_time).max(old_time.since(own));
        if difference > MAX_CLOCK_DIFFERENCE {
            tracing::warn!(
                seconds = difference.as_micros() / 1_000_000,
                "the system time was stepped after the old process started; this process continues with the old process's clock until a restart"
            );
            self.clock().continue_from(old_time);
            self.metrics().set_started(self.now());
        }
    }

    /// Completes the state after the last record.
    ///
    /// # Errors
    ///
    /// [`HandoverError`] if the override file cannot be opened.
    pub fn end_taking_state(&self) -> Result<(), HandoverError> {
        if self.redis_store().is_none() {
            self.end_override_restore()?;
        }
        self.local_store().forget_refunds(self.now());
        Ok(())
    }
}
