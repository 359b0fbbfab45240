//! The refund ledger: by how much refunds to a key's GCRA schedules have moved its later charges
//! forward. A later refund needs that shift to find its own charge again.

use std::collections::HashMap;

use super::RandomState;
use crate::{
    eval::ChargeRecord,
    time::{Span, Timestamp},
};

/// The refund ledger of one shard.
///
/// It is bounded. When it is full it is cleared. Charges made before that are then refunded by
/// elapsed time alone, which never refunds too much, but may refund less.
#[derive(Debug, Default)]
pub(super) struct RefundLedger {
    /// For each key, the total shift in microseconds of each of its kernels. A rule has one kernel
    /// per limit, but sliding logs share one.
    given: HashMap<Box<[u8]>, Box<[u64]>, RandomState>,
    bytes: usize,
    /// When the ledger was last cleared because it was full.
    forgot: Option<Timestamp>,
}

/// The maximum size of one shard's ledger in bytes.
const MAX_BYTES: usize = 64 << 10;

/// The estimated overhead of an entry beyond its key and its numbers, in bytes.
const ENTRY_BYTES: usize = 64;

/// How long after a charge the refunds since then are known. The Redis store keeps its ledgers for
/// the same time.
const REMEMBERED: Span = Span::from_secs(60);

impl RefundLedger {
    /// Returns the total shift of each kernel of `key` so far. Missing elements are zero.
    pub(super) fn given(&self, key: &[u8]) -> Box<[u64]> {
        self.given.get(key).cloned().unwrap_or_default()
    }

    /// Returns the size in bytes, at most [`MAX_BYTES`].
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the shift of kernel `number` of `key` since `charged` was made; `None` if that is
    /// unknown.
    pub(super) fn since(
        &self,
        key: &[u8],
        number: usize,
        charged: &ChargeRecord,
        now: Timestamp,
    ) -> Option<u64> {
        let is_forgotten = self.forgot.is_some_and(|forgot| charged.at <= forgot);
        if is_forgotten || now.since(charged.at) >= REMEMBERED {
            return None;
        }
        let given = |given: &[u64]| given.get(number).copied().unwrap_or_default();
        let now = self.given.get(key).map_or(0, |all| given(all));
        now.checked_sub(given(&charged.given))
    }

    /// Removes the entry of `key`, because its state was reset.
    pub(super) fn forget(&mut self, key: &[u8]) {
        if let Some(given) = self.given.remove(key) {
            self.bytes -= key.len() + ENTRY_BYTES + size_of_val(&*given);
        }
    }

    /// Adds the shift of each kernel of `key`, caused by a refund at `now`.
    pub(super) fn enter(&mut self, key: &[u8], more: &[u64], now: Timestamp) {
        if more.iter().all(|more| *more == 0) {
            return;
        }
        let mut given = self.given(key).into_vec();
        let longer = more.len().saturating_sub(given.len());
        given.resize(given.len() + longer, 0);
        for (given, more) in given.iter_mut().zip(more) {
            *given = given.saturating_add(*more);
        }
        let is_new = !self.given.contains_key(key);
        let entry = if is_new { key.len() + ENTRY_BYTES } else { 0 };
        let bytes = entry + longer * size_of::<u64>();
        if self.bytes + bytes > MAX_BYTES {
            *self = Self {
                forgot: Some(now),
                ..Self::default()
            };
            return;
        }
        self.bytes += bytes;
        self.given.insert(key.into(), given.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charged(ledger: &RefundLedger, at: u64) -> ChargeRecord {
        ChargeRecord {
            at: Timestamp::from_micros(at),
            cost: 1,
            fingerprint: 0,
            marks: Box::default(),
            given: ledger.given(b"key"),
        }
    }

    #[test]
    fn a_full_ledger_reports_unknown_refunds() {
        let mut ledger = RefundLedger::default();
        ledger.enter(b"key", &[5, 0], Timestamp::from_micros(1));
        let before = charged(&ledger, 2);
        ledger.enter(b"key", &[0, 7], Timestamp::from_micros(3));
        let now = Timestamp::from_micros(4);
        assert_eq!(ledger.since(b"key", 0, &before, now), Some(0));
        assert_eq!(ledger.since(b"key", 1, &before, now), Some(7));
        let later = now.after(REMEMBERED);
        assert_eq!(ledger.since(b"key", 1, &before, later), None);
        for number in 0..2_000_u64 {
            ledger.enter(&number.to_le_bytes(), &[1], now);
            assert!(ledger.bytes <= MAX_BYTES);
        }
        assert_eq!(ledger.since(b"key", 1, &before, now), None);
        let after = charged(&ledger, 5);
        ledger.enter(b"key", &[2], Timestamp::from_micros(6));
        let now = Timestamp::from_micros(7);
        assert_eq!(ledger.since(b"key", 0, &after, now), Some(2));
    }

    #[test]
    fn a_reset_key_has_no_refunds() {
        let mut ledger = RefundLedger::default();
        let before = charged(&ledger, 1);
        ledger.enter(b"key", &[5], Timestamp::from_micros(2));
        let between = charged(&ledger, 3);
        ledger.forget(b"key");
        let now = Timestamp::from_micros(4);
        assert_eq!(ledger.bytes(), 0);
        assert_eq!(ledger.since(b"key", 0, &before, now), Some(0));
        assert_eq!(ledger.since(b"key", 0, &between, now), None);
    }
}
