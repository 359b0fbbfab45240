//! The refund ledger: by how much refunds to a key's GCRA schedules have moved its later charges
//! forward, and whether the key's state was converted to other limits. A later refund needs both to
//! find its own charge again.

use std::collections::HashMap;

use super::RandomState;
use crate::{
    eval::ChargeRecord,
    time::{Span, Timestamp},
};

/// The refund ledger of one shard.
///
/// It is bounded. When it is full it is cleared. Charges made before that are then refunded by
/// elapsed time alone, which never refunds too much, but may refund less. They are not refunded at
/// all if the ledger had a conversion, because that may have been of their key.
#[derive(Debug, Default)]
pub(super) struct RefundLedger {
    keys: HashMap<Box<[u8]>, KeyRefunds, RandomState>,
    bytes: usize,
    /// When the ledger was last cleared because it was full.
    forgot: Option<Timestamp>,
    /// When a ledger with a conversion was last cleared.
    forgot_conversion: Option<Timestamp>,
    /// The number of the latest conversion.
    conversions: u64,
}

/// What later refunds to a key have to know.
#[derive(Clone, Debug, Default)]
pub(super) struct KeyRefunds {
    /// The total shift in microseconds of each kernel since the latest conversion. A rule has one
    /// kernel per limit, but sliding logs share one.
    pub(super) given: Box<[u64]>,
    /// The number of the latest conversion of the key's state to other limits; 0 for none.
    pub(super) conversion: u64,
}

/// The maximum size of one shard's ledger in bytes.
const MAX_BYTES: usize = 64 << 10;

/// The estimated overhead of an entry beyond its key and its numbers, in bytes.
const ENTRY_BYTES: usize = 64;

/// How long after a charge the refunds since then are known. The Redis store keeps its ledgers for
/// the same time.
const REMEMBERED: Span = Span::from_secs(60);

impl RefundLedger {
    /// Returns what a receipt for a charge to `key` has to remember. Missing shifts are zero.
    pub(super) fn of_key(&self, key: &[u8]) -> KeyRefunds {
        self.keys.get(key).cloned().unwrap_or_default()
    }

    /// Returns whether the state of `key` was, or may have been, converted since `charged` was
    /// made. The other limits may have drained or dropped the charge.
    pub(super) fn is_converted_since(&self, key: &[u8], charged: &ChargeRecord) -> bool {
        let conversion = self.keys.get(key).map_or(0, |key| key.conversion);
        conversion != 0 && conversion != charged.conversion
            || self
                .forgot_conversion
                .is_some_and(|forgot| charged.at <= forgot)
    }

    /// Records that the state of `key` was converted to other limits at `now`.
    pub(super) fn enter_conversion(&mut self, key: &[u8], now: Timestamp) {
        self.conversions += 1;
        let entry = KeyRefunds {
            conversion: self.conversions,
            ..KeyRefunds::default()
        };
        self.insert(key, entry, now);
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
        let now = self.keys.get(key).map_or(0, |key| given(&key.given));
        now.checked_sub(given(&charged.given))
    }

    /// Removes the entry of `key`, because its state was reset.
    pub(super) fn forget(&mut self, key: &[u8]) {
        if let Some(entry) = self.keys.remove(key) {
            self.bytes -= entry_bytes(key, &entry);
        }
    }

    /// Adds the shift of each kernel of `key`, caused by a refund at `now`.
    pub(super) fn enter(&mut self, key: &[u8], more: &[u64], now: Timestamp) {
        if more.iter().all(|more| *more == 0) {
            return;
        }
        let KeyRefunds { given, conversion } = self.of_key(key);
        let mut given = given.into_vec();
        given.resize(given.len().max(more.len()), 0);
        for (given, more) in given.iter_mut().zip(more) {
            *given = given.saturating_add(*more);
        }
        let given = given.into();
        self.insert(key, KeyRefunds { given, conversion }, now);
    }

    /// Inserts or replaces the entry of `key`. Clears the ledger instead if it is full.
    fn insert(&mut self, key: &[u8], entry: KeyRefunds, now: Timestamp) {
        let replaced = self.keys.get(key).map_or(0, |old| entry_bytes(key, old));
        let bytes = self.bytes - replaced + entry_bytes(key, &entry);
        if bytes > MAX_BYTES {
            let had_conversion =
                entry.conversion > 0 || self.keys.values().any(|entry| entry.conversion > 0);
            *self = Self {
                forgot: Some(now),
                forgot_conversion: if had_conversion {
                    Some(now)
                } else {
                    self.forgot_conversion
                },
                conversions: self.conversions,
                ..Self::default()
            };
            return;
        }
        self.bytes = bytes;
        self.keys.insert(key.into(), entry);
    }
}

/// Returns the estimated size of an entry.
fn entry_bytes(key: &[u8], entry: &KeyRefunds) -> usize {
    key.len() + ENTRY_BYTES + size_of_val(&*entry.given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charged(ledger: &RefundLedger, at: u64) -> ChargeRecord {
        let KeyRefunds { given, conversion } = ledger.of_key(b"key");
        ChargeRecord {
            at: Timestamp::from_micros(at),
            cost: 1,
            fingerprint: 0,
            marks: Box::default(),
            given,
            conversion,
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

    #[test]
    fn charges_from_before_a_conversion_are_known() {
        let mut ledger = RefundLedger::default();
        let before = charged(&ledger, 1);
        ledger.enter_conversion(b"key", Timestamp::from_micros(1));
        let between = charged(&ledger, 1);
        assert!(ledger.is_converted_since(b"key", &before));
        assert!(!ledger.is_converted_since(b"key", &between));
        ledger.enter(b"key", &[5], Timestamp::from_micros(1));
        assert!(!ledger.is_converted_since(b"key", &between));
        assert!(!ledger.is_converted_since(b"other", &before));
        ledger.enter_conversion(b"key", Timestamp::from_micros(1));
        assert!(ledger.is_converted_since(b"key", &between));
        // A reset forgets the key, as a new one.
        ledger.forget(b"key");
        assert_eq!(ledger.bytes(), 0);
        assert!(!ledger.is_converted_since(b"key", &between));
    }

    /// After a ledger with a conversion was cleared, each key may be the one that was converted.
    #[test]
    fn a_full_ledger_with_a_conversion_refunds_no_earlier_charge() {
        for converted in [false, true] {
            let mut ledger = RefundLedger::default();
            let before = charged(&ledger, 1);
            if converted {
                ledger.enter_conversion(b"key", Timestamp::from_micros(2));
            }
            for number in 0..2_000_u64 {
                ledger.enter(&number.to_le_bytes(), &[1], Timestamp::from_micros(3));
                assert!(ledger.bytes <= MAX_BYTES);
            }
            assert!(ledger.forgot.is_some());
            assert_eq!(ledger.is_converted_since(b"key", &before), converted);
            assert!(!ledger.is_converted_since(b"key", &charged(&ledger, 4)));
        }
    }
}
