//! Snapshots: a store's keys and manual blocks as bytes, so that counts survive a restart.
//!
//! This crate does no file I/O. This module returns the bytes of one shard at a time, and restores
//! a store from the bytes of any number of shards. A shard's lock is held only while its bytes are
//! copied. The caller writes the bytes to a file and adds a checksum. Nevertheless, this module
//! checks every length in the bytes.

use super::{BlockNote, MemoryStore, key_entry::KeyEntry, shard::Shard};
use crate::{
    algorithm::{KernelState, is_instant},
    eval::KeyState,
    hash_table::hash_with,
    limit::bounds,
    rules::BlockedRule,
    time::{CLOCK_JUMP, Span, Timestamp},
};

/// An invalid snapshot, with the position of the first invalid record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotError {
    /// The offset in bytes of the first invalid record.
    pub offset: usize,
}

impl std::fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the snapshot is invalid from byte {} on", self.offset)
    }
}

impl std::error::Error for SnapshotError {}

/// The tag of a record that contains a key and its state.
const KEY: u8 = 1;
/// The tag of a record that contains a manual block.
const BLOCK: u8 = 2;
/// The tag of a time record: when the following records were written. Each part of a snapshot
/// starts with a time record.
const TIME: u8 = 3;
/// The tag of a block that is stored with its rule. Blocks without a rule, and all blocks written
/// by earlier versions, have the tag [`BLOCK`].
const BLOCK_OF_RULE: u8 = 4;

impl MemoryStore {
    /// Returns the number of parts for [`Self::save`].
    #[must_use]
    pub fn parts(&self) -> usize {
        self.shards.len()
    }

    /// Appends the snapshot part with the index `part`, taken at `now`, to `out`. Parts are
    /// numbered from 0 to [`Self::parts`] - 1.
    ///
    /// # Panics
    ///
    /// Panics if `part` is not below [`Self::parts`].
    pub fn save(&self, part: usize, now: Timestamp, out: &mut Vec<u8>) {
        save_shard(&mut self.shards[part].0.lock(), now, out);
    }

    /// Like [`Self::save`], but also seals the part: from then on, decisions on its keys are
    /// [`Decision::SEALED`](crate::Decision::SEALED). Therefore, only another store that restores
    /// the snapshot decides on these keys, and no charge is lost or made twice.
    ///
    /// # Panics
    ///
    /// Panics if `part` is not below [`Self::parts`].
    pub fn save_and_seal(&self, part: usize, now: Timestamp, out: &mut Vec<u8>) {
        let mut shard = self.shards[part].0.lock();
        shard.is_sealed = true;
        save_shard(&mut shard, now, out);
    }

    /// Lets this store decide on all keys again, because no other store has taken over the keys.
    pub fn unseal(&self) {
        for shard in &self.shards {
            shard.0.lock().is_sealed = false;
        }
    }

    /// Restores any number of parts written by [`Self::save`], in any order. Returns the number of
    /// restored keys. For parts that are not adjacent in memory, use [`Self::restore_parts`].
    ///
    /// If the snapshot's time is more than 10 seconds after `now`, the clock was ahead when the
    /// snapshot was written, or has been set back since. The instants of all keys and blocks are
    /// then moved back by the difference. Each key keeps its spent units from the time of the
    /// snapshot, but at most as many as its limits allow now.
    ///
    /// A key is skipped if it is already in the store, has expired, or does not fit. A block is
    /// skipped if it has expired or does not fit. A full store evicts keys as for any new key,
    /// possibly including keys that were just restored.
    ///
    /// # Errors
    ///
    /// Returns a [`SnapshotError`] if the bytes are invalid. Restores nothing if there is an error.
    pub fn restore(&self, bytes: &[u8], now: Timestamp) -> Result<usize, SnapshotError> {
        self.restore_parts(&[bytes], now)
    }

    /// Restores `parts` like [`Self::restore`], but each part can be in a slice of its own.
    ///
    /// # Errors
    ///
    /// Returns a [`SnapshotError`] if a part is invalid, with the offset in that part. Restores
    /// nothing if there is an error, not even the valid parts.
    pub fn restore_parts(&self, parts: &[&[u8]], now: Timestamp) -> Result<usize, SnapshotError> {
        // Validate all parts before restoring anything.
        for part in parts {
            read(part, now, |_| ())?;
        }
        let mut restored = 0;
        for part in parts {
            read(part, now, |record| {
                restored += usize::from(self.take_in(record, now));
            })?;
        }
        Ok(restored)
    }

    fn take_in(&self, record: SnapshotRecord<'_>, now: Timestamp) -> bool {
        match record {
            SnapshotRecord::Key(entry) => {
                let hash = hash_with(&self.hasher, entry.key());
                self.lock_of(hash).restore(hash, entry, now)
            }
            SnapshotRecord::Time(_) => false,
            SnapshotRecord::Block {
                key,
                until,
                reason,
                rule,
            } => {
                let stands = until.is_none_or(|until| until > now);
                let span = until.map(|until| until.since(now));
                // Skip a block that does not fit, like a key that does not fit.
                let note = BlockNote {
                    reason,
                    rule: rule.as_ref(),
                };
                let _ = stands && self.block(key, span, note, now);
                false
            }
        }
    }
}

/// Appends the snapshot of `shard`, taken at `now`, to `out`.
fn save_shard(shard: &mut Shard, now: Timestamp, out: &mut Vec<u8>) {
    let now = shard.latest(now);
    let start = out.len();
    out.push(TIME);
    put(out, now.as_micros());
    let empty = out.len();
    for entry in shard.entries().filter(|entry| entry.expires() > now) {
        if let Some(key_state) = entry.key_state() {
            out.push(KEY);
            put_bytes(out, entry.key());
            out.extend(entry.fingerprint().to_le_bytes());
            out.push(u8::from(entry.is_hot()));
            put_key_state(out, &key_state);
        }
    }
    for block in shard.blocks(now) {
        out.push(block.rule.as_ref().map_or(BLOCK, |_| BLOCK_OF_RULE));
        put_bytes(out, &block.key);
        put(out, block.until.map_or(u64::MAX, Timestamp::as_micros));
        put_bytes(out, block.reason.as_bytes());
        if let Some(rule) = &block.rule {
            put_bytes(out, rule.name.as_bytes());
            put(out, rule.key.len() as u64);
            for entry in &rule.key {
                put_bytes(out, entry.as_bytes());
            }
        }
    }
    if out.len() == empty {
        out.truncate(start);
    }
}

/// Reads all records of `bytes`. Moves the instants of the records back if the snapshot was written
/// later than `now`.
fn read<'b>(
    bytes: &'b [u8],
    now: Timestamp,
    mut take: impl FnMut(SnapshotRecord<'b>),
) -> Result<(), SnapshotError> {
    let mut input = SnapshotReader { bytes, at: 0 };
    let mut ahead = Span::ZERO;
    while input.at < bytes.len() {
        let offset = input.at;
        let record = input.record(ahead).ok_or(SnapshotError { offset })?;
        if let SnapshotRecord::Time(written) = record {
            let lead = written.since(now);
            // A difference of up to 10 seconds is normal clock skew between machines. The store
            // does not correct this difference: until `now` has caught up, the store acts as if
            // time stood still.
            ahead = if lead > CLOCK_JUMP { lead } else { Span::ZERO };
        }
        take(record);
    }
    Ok(())
}

enum SnapshotRecord<'b> {
    Time(Timestamp),
    Key(KeyEntry),
    Block {
        key: &'b [u8],
        until: Option<Timestamp>,
        reason: &'b str,
        rule: Option<BlockedRule>,
    },
}

fn put(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_key_state(out: &mut Vec<u8>, key_state: &KeyState) {
    let states = key_state.states();
    put(out, states.len() as u64);
    for state in states {
        state.write(&mut |number| put(out, number));
    }
}

struct SnapshotReader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> SnapshotReader<'b> {
    /// Returns the next record with its instants moved back by `ahead`; `None` if the record is
    /// invalid.
    fn record(&mut self, ahead: Span) -> Option<SnapshotRecord<'b>> {
        match self.take(1)? {
            [TIME] => {
                let written = self.number().filter(is_instant)?;
                Some(SnapshotRecord::Time(Timestamp::from_micros(written)))
            }
            [KEY] => {
                let key = self
                    .counted_bytes()
                    .filter(|key| (1..=bounds::MAX_KEY_BYTES).contains(&key.len()))?;
                let fingerprint = u32::from_le_bytes(self.take(4)?.try_into().ok()?);
                let is_hot = self.take(1)? != [0];
                let mut key_state = self.key_state()?;
                if ahead == Span::ZERO {
                    let entry = KeyEntry::new(key, key_state, fingerprint, is_hot);
                    return Some(SnapshotRecord::Key(entry));
                }
                let states = key_state.states_mut().iter_mut();
                states.for_each(|state| state.move_back(ahead));
                let mut entry = KeyEntry::new(key, key_state, fingerprint, is_hot);
                // A window aligned to the epoch or to a calendar cannot be moved back exactly, so
                // the next load of the state also clamps the state.
                entry.mark_unclamped();
                Some(SnapshotRecord::Key(entry))
            }
            [tag @ (BLOCK | BLOCK_OF_RULE)] => {
                let key = self.counted_bytes()?;
                let until = Some(self.number()?)
                    .filter(|micros| *micros != u64::MAX)
                    .map(|micros| Timestamp::from_micros(micros).before(ahead));
                let reason = self.text()?;
                let rule = match *tag {
                    BLOCK_OF_RULE => Some(self.blocked_rule()?),
                    _ => None,
                };
                Some(SnapshotRecord::Block {
                    key,
                    until,
                    reason,
                    rule,
                })
            }
            _ => None,
        }
    }

    fn blocked_rule(&mut self) -> Option<BlockedRule> {
        let name = self.text()?.into();
        // Check the count before allocating memory for the entries.
        let entries = self
            .number()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| *count <= bounds::MAX_KEY_ENTRIES)?;
        let key: Option<Box<[Box<str>]>> =
            (0..entries).map(|_| self.text().map(Box::from)).collect();
        Some(BlockedRule { name, key: key? }).filter(BlockedRule::is_within_bounds)
    }

    fn text(&mut self) -> Option<&'b str> {
        std::str::from_utf8(self.counted_bytes()?).ok()
    }

    fn key_state(&mut self) -> Option<KeyState> {
        let states = self
            .number()
            .and_then(|count| usize::try_from(count).ok())?;
        if !(1..=bounds::MAX_LIMITS_PER_RULE).contains(&states) {
            return None;
        }
        let states: Option<Vec<KernelState>> = (0..states)
            .map(|_| KernelState::read(&mut || self.number()))
            .collect();
        states.map(KeyState::from_states)
    }

    fn take(&mut self, len: usize) -> Option<&'b [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn counted_bytes(&mut self) -> Option<&'b [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        self.take(len)
    }
}
