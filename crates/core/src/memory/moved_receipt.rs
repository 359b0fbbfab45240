//! Receipts that move to the store of another process, together with the snapshot.
//!
//! ```text
//! | at: 8 | cost: 8 | fingerprint: 4 | number of marks: 1 | mark | … |
//! ```
//!
//! The refund ledger does not move. A charge whose key was converted to other limits since, as the
//! ledger knows, moves with its concurrency slots only. The other store calculates the refunds of
//! GCRA limits without the ledger, so that the refunds are never too large.

use super::MemoryStore;
use crate::{
    algorithm::{ExactMicros, Mark},
    eval::{Charge, ChargeRecord, ChargeRecords, Marks, Receipt},
    hash_table::hash_with,
    limit::bounds,
    time::Timestamp,
};

const NO_MARK: u8 = 0;
const TAT_AFTER: u8 = 1;
const FULL_AT: u8 = 2;
const WINDOW_END: u8 = 3;
const STAMPED: u8 = 4;
const HELD_SINCE: u8 = 5;
const WINDOW_INDEX: u8 = 6;

impl MemoryStore {
    /// Returns the records of `receipt`, which this store has created for `charges`, in a form for
    /// [`Receipt::from_moved`]. A record is empty if the charge was not made.
    #[must_use]
    pub fn move_receipt(
        &self,
        charges: &[Charge<'_>],
        receipt: &Receipt,
        now: Timestamp,
    ) -> Vec<Vec<u8>> {
        let charged = charges.iter().zip(&receipt.charged);
        let record = |(charge, charged): (&Charge<'_>, &Option<ChargeRecord>)| {
            let Some(charged) = charged else {
                return Vec::new();
            };
            let shard = self.lock_of(hash_with(&self.hasher, charge.key));
            let is_converted = shard
                .cold
                .ledger
                .is_converted_since(charge.key, charged, now);
            encode(charged, is_converted)
        };
        charged.map(record).collect()
    }

    /// Prepares this store for receipts of another store whose refund ledger is not known.
    pub fn forget_refunds(&self, now: Timestamp) {
        for shard in &self.shards {
            shard.0.lock().cold.ledger.forget_shifts(now);
        }
    }
}

impl Receipt {
    /// Creates a receipt from the records that [`MemoryStore::move_receipt`] of another store has
    /// returned. Returns `None` if a record is not valid. This store must have restored the
    /// snapshot of the other store.
    #[must_use]
    pub fn from_moved(records: &[Vec<u8>]) -> Option<Self> {
        let decoded = records.iter().map(|record| {
            if record.is_empty() {
                return Some(None);
            }
            decode(record).map(Some)
        });
        let charged = decoded.collect::<Option<ChargeRecords>>()?;
        Some(Self { charged })
    }
}

fn encode(charged: &ChargeRecord, is_converted: bool) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(charged.at.as_micros().to_le_bytes());
    out.extend(charged.cost.to_le_bytes());
    out.extend(charged.fingerprint.to_le_bytes());
    // A rule has at most `MAX_LIMITS_PER_RULE` limits.
    out.push(u8::try_from(charged.marks.len()).unwrap_or(u8::MAX));
    for mark in &charged.marks {
        let mut put = |tag: u8, numbers: &[u64]| {
            out.push(tag);
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        };
        match mark {
            Some(Mark::HeldSince(since)) => put(HELD_SINCE, &[since.as_micros()]),
            _ if is_converted => put(NO_MARK, &[]),
            None => put(NO_MARK, &[]),
            Some(Mark::TatAfter(tat)) => put(TAT_AFTER, &[tat.whole, tat.part]),
            Some(Mark::FullAt(at)) => put(FULL_AT, &[*at]),
            Some(Mark::WindowEnd(end)) => put(WINDOW_END, &[*end]),
            Some(Mark::Stamped) => put(STAMPED, &[]),
            Some(Mark::WindowIndex(number)) => put(WINDOW_INDEX, &[*number]),
        }
    }
    out
}

fn decode(record: &[u8]) -> Option<ChargeRecord> {
    let mut input = record;
    let at = Timestamp::from_micros(number(&mut input)?);
    let cost = number(&mut input)?;
    let fingerprint = u32::from_le_bytes(take(&mut input)?);
    let [count] = take(&mut input)?;
    if usize::from(count) > bounds::MAX_LIMITS_PER_RULE {
        return None;
    }
    let marks = (0..count).map(|_| mark(&mut input));
    let marks = marks.collect::<Option<Marks>>()?;
    input.is_empty().then_some(ChargeRecord {
        at,
        cost,
        fingerprint,
        marks,
        shifts: Box::default(),
        conversion: 0,
    })
}

fn mark(input: &mut &[u8]) -> Option<Option<Mark>> {
    let [tag] = take(input)?;
    Some(Some(match tag {
        NO_MARK => return Some(None),
        TAT_AFTER => Mark::TatAfter(ExactMicros {
            whole: number(input)?,
            part: number(input)?,
        }),
        FULL_AT => Mark::FullAt(number(input)?),
        WINDOW_END => Mark::WindowEnd(number(input)?),
        STAMPED => Mark::Stamped,
        HELD_SINCE => Mark::HeldSince(Timestamp::from_micros(number(input)?)),
        WINDOW_INDEX => Mark::WindowIndex(number(input)?),
        _ => return None,
    }))
}

fn number(input: &mut &[u8]) -> Option<u64> {
    take(input).map(u64::from_le_bytes)
}

fn take<const LENGTH: usize>(input: &mut &[u8]) -> Option<[u8; LENGTH]> {
    let (taken, rest) = input.split_first_chunk()?;
    *input = rest;
    Some(*taken)
}
