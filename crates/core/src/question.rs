//! A question to one key's limits, step by step: the same wherever the state is kept.

use crate::{
    cell::Cell,
    charge::{Charge, Effect},
    limits::{Limits, Mask},
    member::Asked,
    outcome::Outcome,
    receipt::Charged,
    time::{Span, Timestamp},
};

/// One charge while it is being decided.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    limits: &'a Limits,
    pub(crate) cell: Cell,
    cost: u64,
    longest_wait: Option<Span>,
    denied: Mask,
    charged: bool,
}

impl<'a> Question<'a> {
    /// Begins with the state of the charge's key, one that its limits know; what is to be given back is.
    #[inline]
    pub(crate) fn open(
        charge: &Charge<'a>,
        mut cell: Cell,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        if effect == Effect::Refund {
            charge.limits.refund(&mut cell, now, charge.cost.units());
        }
        let cost = if effect.asks() {
            charge.cost.units()
        } else {
            0
        };
        Self {
            limits: charge.limits,
            cell,
            cost,
            longest_wait: charge.longest_wait,
            denied: 0,
            charged: false,
        }
    }

    /// Asks the limits; true if they let the request pass, as those of a shadow rule always do.
    #[inline]
    pub(crate) fn ask(&mut self, now: Timestamp) -> bool {
        let mut denied = self.limits.denied(&mut self.cell, now, self.cost);
        if let Some(longest) = self.longest_wait {
            denied |= self.limits.kept_waiting(&self.cell, now, longest);
        }
        // A cost of nothing always fits, also where more is spent than a lowered limit holds.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.limits.shadow()
    }

    /// Whether [`Self::settle`] writes a state, given whether the request as a whole is `admitted`: it may
    /// write one that is as it was.
    pub(crate) fn writes(&self, admitted: bool) -> bool {
        admitted && self.denied == 0
            || admitted == self.limits.shadow() && self.limits.counts_denials()
    }

    /// Spends what is to be spent, given whether the request as a whole is `admitted`; true if that is anything.
    #[inline]
    pub(crate) fn settle(&mut self, admitted: bool, now: Timestamp) -> bool {
        if admitted && self.denied == 0 {
            self.limits.charge(&mut self.cell, now, self.cost);
            self.charged = self.cost > 0;
            self.charged
        } else if admitted == self.limits.shadow() {
            // Denied by these limits, or by others of the same request: a shadow limit takes no notice of those.
            let (cost, denied) = (self.cost, self.denied);
            self.limits.charge_denied(&mut self.cell, now, cost, denied)
        } else {
            false
        }
    }

    /// Where the charge is in the state, if it was made: what was denied in a shadow was not.
    pub(crate) fn charged(&self, at: Timestamp, given: Box<[u64]>) -> Option<Charged> {
        self.charged.then(|| Charged {
            at,
            cost: self.cost,
            fingerprint: self.limits.fingerprint(),
            marks: self.limits.marks(&self.cell),
            given,
        })
    }

    /// Appends what every limit answers.
    #[inline]
    pub(crate) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        let asked = Asked {
            now,
            cost: self.cost,
            longest_wait: self.longest_wait,
            denied: self.denied,
            charged: self.charged,
        };
        self.limits.report(&self.cell, asked, outcomes);
    }
}
