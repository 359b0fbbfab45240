//! What is charged with a receipt, and what comes back of it.

use super::{
    MemoryStore,
    shard::{Shard, hash_with},
};
use crate::{
    charge::{Charge, Effect},
    outcome::{Decision, Outcome},
    receipt::{Charged, Receipt, Settlement},
    time::Timestamp,
};

impl MemoryStore {
    /// [`check`](Self::check) with [`Effect::Charge`], and a receipt by which what was charged can be
    /// [settled](Self::settle).
    ///
    /// # Panics
    ///
    /// As [`check`](Self::check) does.
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
            let Some(charged) = charged else { continue };
            let hash = hash_with(&self.hasher, charge.key);
            let mut shard = self.lock_of(hash);
            let now = shard.latest(now);
            shard.settle((charge, hash), (&charged, *settlement), now);
        }
    }
}

impl Shard {
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
        let (pressed, fingerprint) = (entry.pressed(), entry.fingerprint());
        self.rest.heap_bytes -= entry.heap_bytes();
        let mut cell = entry.take_as_left(limits);
        if fingerprint == charged.fingerprint {
            let ledger = &mut self.rest.ledger;
            let shift = |number| ledger.since(charge.key, number, (charged, now));
            let given = limits.settle(&mut cell, now, (charged, settlement), shift);
            ledger.enter(charge.key, &given, now);
        } else {
            limits.leave(&mut cell, charged);
        }
        entry.put(cell, fingerprint, pressed);
        self.rest.heap_bytes += entry.heap_bytes();
    }
}
