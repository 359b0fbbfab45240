//! The refund ledger, which records recent changes to each key's state. A refund to a GCRA limit
//! makes the theoretical arrival time (TAT) of later charges earlier by some time, the *shift*. The
//! ledger records the shifts, and whether the key's state was converted to other limits. A later
//! refund needs this record to find the position of its charge in the state.

use std::collections::HashMap;

use crate::{
    eval::ChargeRecord,
    hash_table::RandomState,
    time::{Span, Timestamp},
};

/// A shard's refund ledger.
///
/// The ledger has a maximum size. A full ledger drops all shifts, and the records of conversions
/// that refunds no longer need. Without the shifts, the elapsed time alone determines the refund of
/// an earlier charge; such a refund is never too large, but sometimes too small. If the ledger is
/// still more than half full, it is cleared. The store refunds no charge made before the ledger was
/// cleared, because any key's state may have been converted since.
#[derive(Debug, Default)]
pub(super) struct RefundLedger {
    keys: HashMap<Box<[u8]>, LedgerEntry, RandomState>,
    bytes: usize,
    /// When shifts were last dropped because the ledger was full.
    dropped_at: Option<Timestamp>,
    /// When the ledger was last cleared although it contained records of conversions that a refund
    /// could still need.
    cleared_at: Option<Timestamp>,
    /// The ID of the latest conversion.
    conversions: u64,
}

/// The part of a key's ledger entry that a receipt must contain for a later refund.
#[derive(Clone, Debug, Default)]
pub(super) struct KeyRefunds {
    /// The time, in microseconds, by which refunds have shifted each of the key's states since the
    /// latest conversion. A key has one state per limit, except that sliding window logs share one
    /// state.
    pub(super) shifts: Box<[u64]>,
    /// The ID of the latest conversion of the key's state to other limits; 0 for none.
    pub(super) conversion: u64,
}

/// A key's entry in the ledger.
#[derive(Clone, Debug, Default)]
struct LedgerEntry {
    refunds: KeyRefunds,
    /// The instant at which the last unit charged before the latest conversion expires. After this
    /// instant, no refund needs the record of the conversion.
    converted_until: Timestamp,
}

/// The maximum size of a shard's ledger, in bytes.
const MAX_BYTES: usize = 64 << 10;

/// The estimated overhead of an entry beyond its key and its numbers, in bytes.
const ENTRY_BYTES: usize = 72;

/// The maximum age of a charge for which the ledger reports the refunds made since that charge. The
/// Redis store keeps its refund ledgers for the same time.
const MAX_CHARGE_AGE: Span = Span::from_secs(60);

impl RefundLedger {
    /// Returns the information that a receipt for a charge on `key` must contain. Shifts beyond the
    /// end of the list are zero.
    pub(super) fn of_key(&self, key: &[u8]) -> KeyRefunds {
        let entry = self.keys.get(key);
        entry.map(|entry| entry.refunds.clone()).unwrap_or_default()
    }

    /// Returns whether the state of `key` was, or may have been, converted to other limits since
    /// the charge `charged`. Under the other limits, the charge may have drained, or the store may
    /// have dropped the charge.
    pub(super) fn is_converted_since(
        &self,
        key: &[u8],
        charged: &ChargeRecord,
        now: Timestamp,
    ) -> bool {
        let entry = self.keys.get(key);
        let conversion = entry
            .filter(|entry| entry.converted_until > now)
            .map_or(0, |entry| entry.refunds.conversion);
        conversion != 0 && conversion != charged.conversion
            || self
                .cleared_at
                .is_some_and(|cleared_at| charged.at <= cleared_at)
    }

    /// Records that the state of `key` was converted to other limits at `now`. All units charged
    /// before the conversion expire at `until` or earlier. If `until` has passed, nothing is
    /// recorded, because units that have expired can no longer be refunded.
    pub(super) fn enter_conversion(&mut self, key: &[u8], now: Timestamp, until: Timestamp) {
        if until <= now {
            return;
        }
        self.conversions += 1;
        // Units charged before an earlier conversion may expire later than `until`.
        let before = self.keys.get(key).map(|entry| entry.converted_until);
        let entry = LedgerEntry {
            refunds: KeyRefunds {
                conversion: self.conversions,
                ..KeyRefunds::default()
            },
            converted_until: until.max(before.unwrap_or_default()),
        };
        self.insert(key, entry, now);
    }

    /// Returns the size in bytes, at most [`MAX_BYTES`].
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns by how many microseconds the state with index `number` of `key` has been shifted
    /// since the charge `charged`. Returns `None` if the ledger does not contain this information.
    pub(super) fn shift_since(
        &self,
        key: &[u8],
        number: usize,
        charged: &ChargeRecord,
        now: Timestamp,
    ) -> Option<u64> {
        let is_unknown = self
            .dropped_at
            .is_some_and(|dropped_at| charged.at <= dropped_at);
        if is_unknown || now.since(charged.at) >= MAX_CHARGE_AGE {
            return None;
        }
        let shift = |shifts: &[u64]| shifts.get(number).copied().unwrap_or_default();
        let now = self
            .keys
            .get(key)
            .map_or(0, |key| shift(&key.refunds.shifts));
        now.checked_sub(shift(&charged.shifts))
    }

    /// Treats the shifts since all earlier charges as unknown, because these charges were made in
    /// another store.
    pub(super) fn forget_shifts(&mut self, now: Timestamp) {
        self.dropped_at = Some(now);
    }

    /// Removes the entry of `key`. The store calls this function when the key's state is reset.
    pub(super) fn remove(&mut self, key: &[u8]) {
        if let Some(entry) = self.keys.remove(key) {
            self.bytes -= entry_bytes(key, &entry);
        }
    }

    /// Adds `more` to the recorded shifts of the states of `key`, after a refund at `now`.
    pub(super) fn enter(&mut self, key: &[u8], more: &[u64], now: Timestamp) {
        if more.iter().all(|more| *more == 0) {
            return;
        }
        let add = |shifts: &mut [u64]| {
            for (shift, more) in shifts.iter_mut().zip(more) {
                *shift = shift.saturating_add(*more);
            }
        };
        let known = self.keys.get_mut(key);
        if let Some(LedgerEntry { refunds, .. }) = known
            && refunds.shifts.len() >= more.len()
        {
            return add(&mut refunds.shifts);
        }
        let mut entry = self.keys.get(key).cloned().unwrap_or_default();
        let mut shifts = entry.refunds.shifts.into_vec();
        shifts.resize(more.len(), 0);
        add(&mut shifts);
        entry.refunds.shifts = shifts.into();
        self.insert(key, entry, now);
    }

    /// Inserts or replaces the entry of `key`, and makes room for it.
    fn insert(&mut self, key: &[u8], entry: LedgerEntry, now: Timestamp) {
        let replaced = self.keys.get(key).map_or(0, |old| entry_bytes(key, old));
        let bytes = self.bytes - replaced + entry_bytes(key, &entry);
        if bytes <= MAX_BYTES {
            self.bytes = bytes;
            self.keys.insert(key.into(), entry);
            return;
        }
        self.keys.insert(key.into(), entry);
        self.make_room(now);
    }

    /// Drops all shifts, and the records of conversions that refunds no longer need. If the ledger
    /// is still more than half full, clears it.
    fn make_room(&mut self, now: Timestamp) {
        self.dropped_at = Some(now);
        self.keys.retain(|_, entry| entry.converted_until > now);
        self.bytes = 0;
        for (key, entry) in &mut self.keys {
            // Because `dropped_at` was set, the dropped shifts are treated as unknown, not as zero.
            entry.refunds.shifts = Box::default();
            self.bytes += entry_bytes(key, entry);
        }
        if self.bytes > MAX_BYTES / 2 {
            self.cleared_at = Some(now);
            self.keys = HashMap::default();
            self.bytes = 0;
        }
    }
}

/// Returns the estimated size of an entry.
fn entry_bytes(key: &[u8], entry: &LedgerEntry) -> usize {
    key.len() + ENTRY_BYTES + size_of_val(&*entry.refunds.shifts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::Marks;

    const NOW: Timestamp = Timestamp::from_micros(5);
    const LATER: Timestamp = Timestamp::from_micros(1_000);

    fn charged(ledger: &RefundLedger, at: u64) -> ChargeRecord {
        let KeyRefunds { shifts, conversion } = ledger.of_key(b"key");
        ChargeRecord {
            at: Timestamp::from_micros(at),
            cost: 1,
            fingerprint: 0,
            marks: Marks::default(),
            shifts,
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
        assert_eq!(ledger.shift_since(b"key", 0, &before, now), Some(0));
        assert_eq!(ledger.shift_since(b"key", 1, &before, now), Some(7));
        let later = now.after(MAX_CHARGE_AGE);
        assert_eq!(ledger.shift_since(b"key", 1, &before, later), None);
        for number in 0..2_000_u64 {
            ledger.enter(&number.to_le_bytes(), &[1], now);
            assert!(ledger.bytes <= MAX_BYTES);
        }
        assert_eq!(ledger.shift_since(b"key", 1, &before, now), None);
        let after = charged(&ledger, 5);
        ledger.enter(b"key", &[2], Timestamp::from_micros(6));
        let now = Timestamp::from_micros(7);
        assert_eq!(ledger.shift_since(b"key", 0, &after, now), Some(2));
    }

    #[test]
    fn a_reset_key_has_no_refunds() {
        let mut ledger = RefundLedger::default();
        let before = charged(&ledger, 1);
        ledger.enter(b"key", &[5], Timestamp::from_micros(2));
        let between = charged(&ledger, 3);
        ledger.remove(b"key");
        let now = Timestamp::from_micros(4);
        assert_eq!(ledger.bytes(), 0);
        assert_eq!(ledger.shift_since(b"key", 0, &before, now), Some(0));
        assert_eq!(ledger.shift_since(b"key", 0, &between, now), None);
    }

    #[test]
    fn charges_from_before_a_conversion_are_known() {
        let mut ledger = RefundLedger::default();
        let before = charged(&ledger, 1);
        ledger.enter_conversion(b"key", Timestamp::from_micros(1), LATER);
        let between = charged(&ledger, 1);
        assert!(ledger.is_converted_since(b"key", &before, NOW));
        assert!(!ledger.is_converted_since(b"key", &between, NOW));
        ledger.enter(b"key", &[5], Timestamp::from_micros(1));
        assert!(!ledger.is_converted_since(b"key", &between, NOW));
        assert!(!ledger.is_converted_since(b"other", &before, NOW));
        ledger.enter_conversion(b"key", Timestamp::from_micros(1), LATER);
        assert!(ledger.is_converted_since(b"key", &between, NOW));
        // After a reset, the ledger treats the key like a new key.
        ledger.remove(b"key");
        assert_eq!(ledger.bytes(), 0);
        assert!(!ledger.is_converted_since(b"key", &between, NOW));
    }

    /// After a ledger with a recorded conversion is cleared, it no longer knows which key was
    /// converted, so it reports every key as converted.
    #[test]
    fn a_full_ledger_with_a_conversion_refunds_no_earlier_charge() {
        for converted in [false, true] {
            let mut ledger = RefundLedger::default();
            let before = charged(&ledger, 1);
            if converted {
                ledger.enter_conversion(b"key", Timestamp::from_micros(2), LATER);
            }
            for number in 0..2_000_u64 {
                ledger.enter(&number.to_le_bytes(), &[1], Timestamp::from_micros(3));
                assert!(ledger.bytes <= MAX_BYTES);
            }
            assert!(ledger.dropped_at.is_some());
            assert_eq!(ledger.is_converted_since(b"key", &before, NOW), converted);
            assert!(!ledger.is_converted_since(b"key", &charged(&ledger, 4), NOW));
        }
    }

    /// If the other keys' conversions caused the ledger to be cleared, the charge on `key` would
    /// not be refunded.
    #[test]
    fn conversions_without_units_left_cancel_no_refund_of_other_keys() {
        let (mut ledger, before) = (RefundLedger::default(), 1);
        let before = charged(&ledger, before);
        for number in 0..20_000_u64 {
            let now = Timestamp::from_micros(2 + number);
            // Unless its units have already expired, each conversion must stay recorded for a
            // while.
            let until = Timestamp::from_micros(2 + number + number % 200);
            ledger.enter_conversion(&number.to_le_bytes(), now, until);
            assert!(ledger.bytes <= MAX_BYTES);
        }
        assert!(!ledger.is_converted_since(b"key", &before, NOW));
    }

    /// If a key's state is converted twice, the second conversion can have an earlier `until`. The
    /// first conversion must remain recorded until its own `until`.
    #[test]
    fn a_conversion_is_known_until_the_last_unit_from_before_it_expires() {
        let mut ledger = RefundLedger::default();
        let before = charged(&ledger, 1);
        let at = Timestamp::from_micros;
        ledger.enter_conversion(b"key", at(2), LATER);
        ledger.enter_conversion(b"key", at(3), at(4));
        let fill = |ledger: &mut RefundLedger, now| {
            for number in 0..2_000_u64 {
                ledger.enter(&number.to_le_bytes(), &[1], now);
            }
        };
        fill(&mut ledger, at(5));
        assert!(ledger.is_converted_since(b"key", &before, NOW));
        assert!(!ledger.is_converted_since(b"key", &before, LATER));
        fill(&mut ledger, LATER);
        assert_eq!(ledger.of_key(b"key").conversion, 0, "not needed any more");
        assert_eq!(ledger.cleared_at, None);
    }
}
