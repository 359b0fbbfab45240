//! The evaluation of one charge, step by step. It is the same wherever the state is stored.

use crate::{
    cell::Cell,
    charge::{Charge, Effect},
    limits::{Limits, Mask},
    member::Asked,
    outcome::Outcome,
    receipt::Charged,
    time::{Span, Timestamp},
};

/// One charge while it is evaluated.
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
    /// Starts with the state of the charge's key, which must match its limits. A refund is applied
    /// here.
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

    /// Evaluates the limits. Returns true if they admit the request; the limits of a shadow rule
    /// always do.
    #[inline]
    pub(crate) fn ask(&mut self, now: Timestamp) -> bool {
        let mut denied = self.limits.denied(&mut self.cell, now, self.cost);
        if let Some(longest) = self.longest_wait {
            denied |= self.limits.kept_waiting(&self.cell, now, longest);
        }
        // A cost of 0 always fits, even if the count exceeds a limit that was lowered.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.limits.shadow()
    }

    /// Returns whether [`Self::settle`] writes the state, possibly unchanged, given whether the request
    /// as a whole is `admitted`.
    pub(crate) fn writes(&self, admitted: bool) -> bool {
        admitted && self.denied == 0
            || admitted == self.limits.shadow() && self.limits.counts_denials()
    }

    /// Charges the cost, given whether the request as a whole is `admitted`. Returns true if the
    /// state changed.
    #[inline]
    pub(crate) fn settle(&mut self, admitted: bool, now: Timestamp) -> bool {
        if admitted && self.denied == 0 {
            self.limits.charge(&mut self.cell, now, self.cost);
            self.charged = self.cost > 0;
            self.charged
        } else if admitted == self.limits.shadow() {
            // The request is denied, by these limits or by others. A shadow rule counts a denial
            // only if its own limits denied: denials by other limits do not count for it.
            let (cost, denied) = (self.cost, self.denied);
            self.limits.charge_denied(&mut self.cell, now, cost, denied)
        } else {
            false
        }
    }

    /// Returns the location of the charge in the state, if the charge was made. A request that a
    /// shadow rule would have denied is not charged.
    pub(crate) fn charged(&self, at: Timestamp, given: Box<[u64]>) -> Option<Charged> {
        self.charged.then(|| Charged {
            at,
            cost: self.cost,
            fingerprint: self.limits.fingerprint(),
            marks: self.limits.marks(&self.cell),
            given,
        })
    }

    /// Appends the outcome of every limit.
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
