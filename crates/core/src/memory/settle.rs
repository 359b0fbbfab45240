//! Reservations: charges with a receipt, their refunds, and the renewal of their leases.

use super::{MemoryStore, pending::KeyLocation, shard::Shard};
use crate::{
    algorithm::Outcome,
    eval::{Charge, ChargeRecord, Decision, Effect, Receipt, Refund, Renewal, Settlement},
    hash_table::hash_with,
    time::Timestamp,
};

impl MemoryStore {
    /// Like [`check`](Self::check) with [`Effect::Charge`], but also returns a receipt for
    /// [settling](Self::settle) the charges.
    ///
    /// Rejects two charges with the same key, as [`check`](Self::check) does.
    pub fn reserve(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decision, Receipt) {
        let mut receipt = Receipt::default();
        let decision = self.decide(charges, now, Effect::Charge, outcomes, Some(&mut receipt));
        (decision, receipt)
    }

    /// Settles `charges`, for which [`reserve`](Self::reserve) returned `receipt`. Refunds each
    /// charge's unused units, given in `settlements`, if they are still counted. Releases all
    /// concurrency slots of the charges. Returns whether all unused units were refunded.
    ///
    /// - If the key's state has since been converted to other limits, only concurrency slots are
    ///   released, even if the state was converted back.
    /// - Limits that count denied requests refund nothing, unless they count them [in
    ///   full](crate::Limit::counting_in_full) or are in shadow mode.
    /// - After a [`reset`](Self::reset) or an eviction, no units are left to refund. If the key was
    ///   charged again at the same instant or in the same window, the new units cannot be
    ///   distinguished from the original units. The refund can then remove new units instead, up to
    ///   the same number.
    pub fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Refund {
        let mut refund = Refund::Complete;
        let settled = charges.iter().zip(receipt.charged).zip(settlements);
        for ((charge, charged), settlement) in settled {
            let Some(mut charged) = charged else {
                continue;
            };
            let hash = hash_with(&self.hasher, charge.key);
            let mut shard = self.lock_of(hash);
            let now = shard.latest(now);
            charged.clamp(now, shard.cold.rewound);
            refund = refund.and(shard.settle(charge, hash, &charged, *settlement, now));
        }
        refund
    }

    /// Renews the leases of `charges`, for which [`reserve`](Self::reserve) returned `receipt`. The
    /// new leases start at `now`. Call this method before the old leases expire.
    ///
    /// If a concurrency slot has been lost, it is acquired again, provided that the limits in
    /// `charges` have a free slot and the store has room.
    pub fn renew(&self, charges: &[Charge<'_>], receipt: &mut Receipt, now: Timestamp) -> Renewal {
        let mut renewal = Renewal::Held;
        for (charge, charged) in charges.iter().zip(&mut receipt.charged) {
            let Some(charged) = charged else { continue };
            if charge.limits.has_slots() {
                let hash = hash_with(&self.hasher, charge.key);
                let mut shard = self.lock_of(hash);
                if shard.is_sealed {
                    renewal = renewal.and(Renewal::Unknown);
                    continue;
                }
                let now = shard.latest(now);
                charged.clamp(now, shard.cold.rewound);
                renewal = renewal.and(shard.renew(charge, hash, charged, now));
            }
        }
        renewal
    }
}

impl Shard {
    fn renew(
        &mut self,
        charge: &Charge<'_>,
        hash: u64,
        charged: &mut ChargeRecord,
        now: Timestamp,
    ) -> Renewal {
        // If the charge's limits have since been replaced by limits whose states have other units
        // of measure, the slots cannot be found.
        if !charge.limits.has_terms_of_charge(charged) {
            return Renewal::Lost;
        }
        // Treat an expired entry like a missing entry, because expired entries can be removed at
        // any time.
        let found = self.find(hash, charge.key);
        let Some(number) = found.filter(|number| self.entries[*number].expires() > now) else {
            return self.renew_with_growth(charge, hash, charged, now);
        };
        let entry = &mut self.entries[number];
        let is_other = !entry.was_left_under(charged.fingerprint);
        if entry.is_unclamped() || !is_other && !entry.renews_in_place(charged) {
            // The general path converts the state, which would lose the units of another algorithm.
            let state = entry.key_state();
            if state.is_some_and(|state| !charge.limits.is_alike(&state)) {
                return Renewal::Lost;
            }
            return self.renew_with_growth(charge, hash, charged, now);
        }
        let (is_hot, fingerprint) = (entry.is_hot(), entry.fingerprint());
        self.cold.heap_bytes -= entry.heap_bytes();
        // The state must not be converted: a log and a lease of the same length have the same
        // fingerprint.
        let mut key_state = entry.take_as_left(charge.limits);
        let are_held = charge.limits.renew(&mut key_state, now, charged);
        entry.put(key_state, fingerprint, is_hot);
        self.cold.heap_bytes += entry.heap_bytes();
        Renewal::of(are_held)
    }

    /// Renews leases on the general path, which can allocate memory. The general path is needed if
    /// the key has no live entry, if its state is unclamped, or if its list of leases may have to
    /// grow.
    fn renew_with_growth(
        &mut self,
        charge: &Charge<'_>,
        hash: u64,
        charged: &mut ChargeRecord,
        now: Timestamp,
    ) -> Renewal {
        let alone = std::slice::from_ref(charge);
        let located = self.locate(charge, alone, hash, now, Effect::Charge);
        self.evict_reserved(now, Effect::Charge, located.is_ok());
        let located = located.map(|located| self.locate_again(hash, charge.key, located));
        let renewal = match located {
            Ok(located) if located.has_room() => {
                let mut pending =
                    self.open(charge, KeyLocation { hash, located }, now, Effect::Charge);
                let key_state = &mut pending.evaluation.key_state;
                let are_held = charge.limits.renew(key_state, now, charged);
                let is_hot = charge.limits.is_hot(key_state, now);
                pending.is_changed = are_held;
                if are_held {
                    // The converted state contains the renewed leases, so do not put the former
                    // state back.
                    pending.former = None;
                }
                self.record_conversion(&pending, now);
                if let Some(new_key) = self.put_back(pending, is_hot) {
                    self.insert_pending(new_key, is_hot);
                }
                Renewal::of(are_held)
            }
            // The store is full, so the leases cannot be recorded. The slots may still be free, so
            // a later renewal can succeed.
            _ => Renewal::Unknown,
        };
        self.finish(Effect::Charge);
        renewal
    }

    fn settle(
        &mut self,
        charge: &Charge<'_>,
        hash: u64,
        charged: &ChargeRecord,
        settlement: Settlement,
        now: Timestamp,
    ) -> Refund {
        let limits = charge.limits;
        let Some(number) = self.find(hash, charge.key) else {
            return Refund::Complete;
        };
        let without_units = match settlement.unused > 0 && limits.has_units() {
            true => Refund::Incomplete,
            false => Refund::Complete,
        };
        let context = self.load_context(charge, now);
        let entry = &mut self.entries[number];
        // If the charge's limits have since been replaced by limits whose states have other units
        // of measure, change nothing.
        if !limits.has_terms_of_charge(charged) {
            return without_units;
        }
        let is_unclamped = entry.is_unclamped();
        if is_unclamped && !entry.was_left_under(charged.fingerprint) {
            // In the rare case that the clock was ahead and the limits changed, release nothing.
            // The leases expire on their own.
            return without_units;
        }
        let is_hot = entry.is_hot();
        self.cold.heap_bytes -= entry.heap_bytes();
        let (mut key_state, fingerprint) = if is_unclamped {
            let key_state = entry.take(limits, context).key_state;
            (key_state, limits.fingerprint())
        } else {
            (entry.take_as_left(limits), entry.fingerprint())
        };
        let ledger = &mut self.cold.ledger;
        let is_same = fingerprint == charged.fingerprint
            && limits.is_alike(&key_state)
            && !ledger.is_converted_since(charge.key, charged, now);
        let refund = if is_same {
            let shift = |number| ledger.shift_since(charge.key, number, charged, now);
            let shifts = limits.refund_unused(&mut key_state, now, charged, settlement, shift);
            ledger.enter(charge.key, &shifts, now);
            // A limit without a mark counts denied requests, or a clock that was ahead made the
            // charge.
            let is_complete = charged.marks.iter().all(Option::is_some);
            if is_complete {
                Refund::Complete
            } else {
                without_units
            }
        } else {
            limits.release_slots(&mut key_state, charged);
            without_units
        };
        // After the refund, the key may no longer be hot. A state that was restored from a snapshot
        // has no status before the first decision.
        let has_status = fingerprint == charged.fingerprint && limits.is_compatible(&key_state);
        let is_hot = is_hot && (!has_status || limits.is_hot(&key_state, now));
        entry.put(key_state, fingerprint, is_hot);
        self.cold.heap_bytes += entry.heap_bytes();
        refund
    }
}
