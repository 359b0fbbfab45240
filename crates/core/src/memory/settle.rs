//! Reservations with receipts: charging, refunding, and renewing leases.

use super::{
    MemoryStore,
    entry::Clock,
    pending::Place,
    shard::{Shard, hash_with},
};
use crate::{
    charge::{Charge, Effect},
    outcome::{Decision, Outcome},
    receipt::{Charged, Receipt, Renewal, Settlement},
    time::Timestamp,
};

impl MemoryStore {
    /// Like [`check`](Self::check) with [`Effect::Charge`], but also returns a receipt with which
    /// the charges can be [settled](Self::settle).
    ///
    /// Refuses two charges with the same key, as [`check`](Self::check) does.
    pub fn reserve(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decision, Receipt) {
        outcomes.clear();
        let mut receipt = Receipt::default();
        let decision = self.check_all((charges, now, Effect::Charge), outcomes, Some(&mut receipt));
        (decision, receipt)
    }

    /// Settles `charges`, for which [`reserve`](Self::reserve) returned `receipt`. Refunds the
    /// unused units of each of `settlements`, as far as they are still counted, and releases all
    /// concurrency slots.
    ///
    /// - If the key's state was converted to other limits since, only concurrency slots are
    ///   released.
    /// - Limits that count denied requests refund nothing.
    /// - After a [`reset`](Self::reset) or an eviction there is nothing left to refund. But if the
    ///   key was charged again at the same instant or in the same window, those units cannot be
    ///   distinguished from the refunded ones, and they are refunded as far as they are present.
    pub fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let settled = charges.iter().zip(receipt.charged).zip(settlements);
        for ((charge, charged), settlement) in settled {
            let Some(mut charged) = charged else {
                continue;
            };
            let hash = hash_with(&self.hasher, charge.key);
            let mut shard = self.lock_of(hash);
            let now = shard.latest(now);
            charged.clamp(now, shard.rest.rewound);
            shard.settle((charge, hash), (&charged, *settlement), now);
        }
    }

    /// Renews the leases of `charges`, for which [`reserve`](Self::reserve) returned `receipt`.
    /// They run from `now` on. Call this before they expire.
    ///
    /// A concurrency slot that has been lost is acquired again if the limits in `charges` have one
    /// free and there is room in the store.
    pub fn renew(&self, charges: &[Charge<'_>], receipt: &mut Receipt, now: Timestamp) -> Renewal {
        let mut renewal = Renewal::Held;
        for (charge, charged) in charges.iter().zip(&mut receipt.charged) {
            let Some(charged) = charged else { continue };
            if charge.limits.holds_places() {
                let hash = hash_with(&self.hasher, charge.key);
                let mut shard = self.lock_of(hash);
                let now = shard.latest(now);
                charged.clamp(now, shard.rest.rewound);
                renewal = renewal.and(shard.renew((charge, hash), charged, now));
            }
        }
        renewal
    }
}

impl Shard {
    fn renew(
        &mut self,
        (charge, hash): (&Charge<'_>, u64),
        charged: &mut Charged,
        now: Timestamp,
    ) -> Renewal {
        // The limits of the charge have been replaced since by limits counted in other terms.
        if charge.limits.fingerprint() != charged.fingerprint {
            return Renewal::Lost;
        }
        // An expired entry may or may not have been removed already; treat both cases alike.
        let found = self.find(hash, charge.key);
        let Some(number) = found.filter(|number| self.entries[*number].expires() > now) else {
            return self.renew_in_room((charge, hash), charged, now);
        };
        let entry = &mut self.entries[number];
        let is_other = !entry.was_left_under(charged.fingerprint);
        if entry.is_unclamped() || !is_other && !entry.renews_in_place(charged) {
            return self.renew_in_room((charge, hash), charged, now);
        }
        let (pressed, fingerprint) = (entry.pressed(), entry.fingerprint());
        self.rest.heap_bytes -= entry.heap_bytes();
        let mut cell = if is_other {
            entry.take_as_left(charge.limits)
        } else {
            let rewound = self.rest.rewound;
            entry.take(charge.limits, Clock { now, rewound }).cell
        };
        let are_held = charge.limits.renew(&mut cell, now, charged);
        entry.put(cell, fingerprint, pressed);
        self.rest.heap_bytes += entry.heap_bytes();
        Renewal::of(are_held)
    }

    /// Renews leases when that needs room: the key's entry is gone, or its log may have to grow.
    fn renew_in_room(
        &mut self,
        (charge, hash): (&Charge<'_>, u64),
        charged: &mut Charged,
        now: Timestamp,
    ) -> Renewal {
        let alone = std::slice::from_ref(charge);
        let located = self.locate((charge, alone), hash, now, Effect::Charge);
        self.carry_out(now, Effect::Charge);
        let located = located.map(|located| self.locate_again(hash, charge.key, located));
        let renewal = match located {
            Ok(located) if located.has_room() => {
                let mut pending = self.open(charge, Place { hash, located }, now, Effect::Charge);
                let cell = &mut pending.question.cell;
                let are_held = charge.limits.renew(cell, now, charged);
                let pressed = charge.limits.is_pressed(cell, now);
                pending.kept = are_held;
                if let Some(newcomer) = self.put_back(pending, pressed) {
                    self.insert_pending(newcomer, pressed);
                }
                Renewal::of(are_held)
            }
            // The store is full. The slots were not taken by other requests, so they are not lost:
            // a later renewal may succeed.
            _ => Renewal::Unknown,
        };
        self.finish(Effect::Charge);
        renewal
    }

    fn settle(
        &mut self,
        (charge, hash): (&Charge<'_>, u64),
        (charged, settlement): (&Charged, Settlement),
        now: Timestamp,
    ) {
        let limits = charge.limits;
        let Some(number) = self.find(hash, charge.key) else {
            return;
        };
        let entry = &mut self.entries[number];
        // The limits of the charge have been replaced since by limits counted in other terms.
        if limits.fingerprint() != charged.fingerprint {
            return;
        }
        let is_unclamped = entry.is_unclamped();
        if is_unclamped && !entry.was_left_under(charged.fingerprint) {
            // The clock was ahead and the limits changed, which is rare. Release nothing; the
            // leases expire by themselves.
            return;
        }
        let pressed = entry.pressed();
        self.rest.heap_bytes -= entry.heap_bytes();
        let (mut cell, fingerprint) = if is_unclamped {
            let rewound = self.rest.rewound;
            let cell = entry.take(limits, Clock { now, rewound }).cell;
            (cell, limits.fingerprint())
        } else {
            (entry.take_as_left(limits), entry.fingerprint())
        };
        if fingerprint == charged.fingerprint {
            let ledger = &mut self.rest.ledger;
            let shift = |number| ledger.since(charge.key, number, (charged, now));
            let given = limits.settle(&mut cell, now, (charged, settlement), shift);
            ledger.enter(charge.key, &given, now);
        } else {
            limits.leave(&mut cell, charged);
        }
        // The refund may have made the key evictable again.
        let pressed =
            pressed && (fingerprint != charged.fingerprint || limits.is_pressed(&cell, now));
        entry.put(cell, fingerprint, pressed);
        self.rest.heap_bytes += entry.heap_bytes();
    }
}
