//! What is charged with a receipt, what comes back of it, and places that are held for longer.

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
    /// [`check`](Self::check) with [`Effect::Charge`], and a receipt by which what was charged can be
    /// [settled](Self::settle).
    ///
    /// Two charges with one key are refused, as by [`check`](Self::check).
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

    /// Settles `charges`, for which [`reserve`](Self::reserve) wrote `receipt`: gives back what each of `settlements` says, as
    /// far as it is still there.
    ///
    /// Nothing but places is given back where the numbers have changed since the key was last charged under them, and nothing
    /// where its limits count what is denied. After a [`reset`](Self::reset), or once the key was evicted, nothing is owed any more either; what
    /// others have charged since at the same instant or in the same window cannot be told from it, and comes back as far as it is
    /// there.
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

    /// Renews the places of `charges`, for which [`reserve`](Self::reserve) wrote `receipt`: they are held from `now` on. It is to be
    /// done before their leases are over.
    ///
    /// A place that is not held any more is taken again if one is free, by the numbers of `charges`, and there is room to remember it.
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
        if charge.limits.fingerprint() != charged.fingerprint {
            return Renewal::Lost;
        }
        // What has expired may be gone or not, and is as good as gone.
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

    /// Takes places anew, for which the log may have to grow, or the key is not there any more.
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
            // Nobody has taken them: they are not to be remembered.
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
        if limits.fingerprint() != charged.fingerprint {
            return;
        }
        let is_unclamped = entry.is_unclamped();
        if is_unclamped && !entry.was_left_under(charged.fingerprint) {
            // Two rare things at once, a clock that was ahead and limits that changed: leases end by themselves.
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
        // What has come back may leave a key that others may push out again.
        let pressed =
            pressed && (fingerprint != charged.fingerprint || limits.is_pressed(&cell, now));
        entry.put(cell, fingerprint, pressed);
        self.rest.heap_bytes += entry.heap_bytes();
    }
}
