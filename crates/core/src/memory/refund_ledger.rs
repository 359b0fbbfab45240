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
/// It is bounded. When it is full, the shifts are dropped, and the conversions that concern no
/// refund any more. Charges made before that are then refunded by elapsed time alone, which never
/// refunds too much, but may refund less. If more than half of the ledger is left even so, it is
/// cleared. Charges made before that are not refunded at all, because each of their keys may be one
/// that was converted.
#[derive(Debug, Default)]
pub(super) struct RefundLedger {
    keys: HashMap<Box<[u8]>, LedgerEntry, RandomState>,
    bytes: usize,
    /// When shifts were last dropped because the ledger was full.
    forgot: Option<Timestamp>,
    /// When conversions were last dropped that may still concern a refund.
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

/// What the ledger knows about a key.
#[derive(Clone, Debug, Default)]
struct LedgerEntry {
    refunds: KeyRefunds,
    /// When the last unit charged before the latest conversion expires. From then on, the
    /// conversion concerns no refund.
    converted_until: Timestamp,
}

/// The maximum size of one shard's ledger in bytes.
const MAX_BYTES: usize = 64 << 10;

/// The estimated overhead of an entry beyond its key and its numbers, in bytes.
const ENTRY_BYTES: usize = 72;

/// How long after a charge the refunds since then are known. The Redis store keeps its ledgers for
/// the same time.
const REMEMBERED: Span = Span::from_secs(60);

impl RefundLedger {
    /// Returns what a receipt for a charge to `key` has to remember. Missing shifts are zero.
    pub(super) fn of_key(&self, key: &[u8]) -> KeyRefunds {
        let entry = self.keys.get(key);
        entry.map(|entry| entry.refunds.clone()).unwrap_or_default()
    }

    /// Returns whether the state of `key` was, or may have been, converted since `charged` was
    /// made. The other limits may have drained or dropped the charge.
    pub(super) fn is_converted_since(&self, key: &[u8], charged: &ChargeRecord) -> bool {
        let conversion = self.keys.get(key).map_or(0, |key| key.refunds.conversion);
        conversion != 0 && conversion != charged.conversion
            || self
                .forgot_conversion
                .is_some_and(|forgot| charged.at <= forgot)
    }

    /// Records that the state of `key` was converted to other limits at `now`. The units charged
    /// before that expire by `until`. Without such units, no later refund has to know.
    pub(super) fn enter_conversion(&mut self, key: &[u8], now: Timestamp, until: Timestamp) {
        if until <= now {
            return;
        }
        self.conversions += 1;
        // Units charged before an earlier conversion may last longer.
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
        let now = self
            .keys
            .get(key)
            .map_or(0, |key| given(&key.refunds.given));
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
        let mut entry = self.keys.get(key).cloned().unwrap_or_default();
        let mut given = entry.refunds.given.into_vec();
        given.resize(given.len().max(more.len()), 0);
        for (given, more) in given.iter_mut().zip(more) {
            *given = given.saturating_add(*more);
        }
        entry.refunds.given = given.into();
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

    /// Drops what the ledger can do without; everything if that is less than half.
    fn make_room(&mut self, now: Timestamp) {
        self.forgot = Some(now);
        self.keys.retain(|_, entry| entry.converted_until > now);
        self.bytes = 0;
        for (key, entry) in &mut self.keys {
            // `forgot` says that the shifts are unknown.
            entry.refunds.given = Box::default();
            self.bytes += entry_bytes(key, entry);
        }
        if self.bytes > MAX_BYTES / 2 {
            self.forgot_conversion = Some(now);
            self.keys = HashMap::default();
            self.bytes = 0;
        }
    }
}

/// Returns the estimated size of an entry.
fn entry_bytes(key: &[u8], entry: &LedgerEntry) -> usize {
    key.len() + ENTRY_BYTES + size_of_val(&*entry.refunds.given)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Timestamp = Timestamp::from_micros(1_000);

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
        ledger.enter_conversion(b"key", Timestamp::from_micros(1), LATER);
        let between = charged(&ledger, 1);
        assert!(ledger.is_converted_since(b"key", &before));
        assert!(!ledger.is_converted_since(b"key", &between));
        ledger.enter(b"key", &[5], Timestamp::from_micros(1));
        assert!(!ledger.is_converted_since(b"key", &between));
        assert!(!ledger.is_converted_since(b"other", &before));
        ledger.enter_conversion(b"key", Timestamp::from_micros(1), LATER);
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
                ledger.enter_conversion(b"key", Timestamp::from_micros(2), LATER);
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
    /// The charge of `key` would not be refunded if the others made the ledger forget conversions.
    #[test]
    fn conversions_without_units_left_cancel_no_refund_of_other_keys() {
        let (mut ledger, before) = (RefundLedger::default(), 1);
        let before = charged(&ledger, before);
        for number in 0..20_000_u64 {
            let now = Timestamp::from_micros(2 + number);
            // Each conversion concerns refunds for a while; the first, with none left, never does.
            let until = Timestamp::from_micros(2 + number + number % 200);
            ledger.enter_conversion(&number.to_le_bytes(), now, until);
            assert!(ledger.bytes <= MAX_BYTES);
        }
        assert!(!ledger.is_converted_since(b"key", &before));
    }

    /// A second conversion, of a state that expires sooner, must not shorten the first one's time.
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
        assert!(ledger.is_converted_since(b"key", &before));
        fill(&mut ledger, LATER);
        assert_eq!(ledger.of_key(b"key").conversion, 0, "not needed any more");
        assert_eq!(ledger.forgot_conversion, None);
    }
}
