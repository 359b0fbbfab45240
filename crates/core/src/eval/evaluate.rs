//! The evaluation of one charge, step by step. Every store evaluates a charge with these steps.

use crate::{
    algorithm::Outcome,
    eval::{Charge, ChargeRecord, Effect, EvaluationResult, KeyState, Limits, Mask},
    time::{Span, Timestamp},
};

/// A charge that is being evaluated.
#[derive(Debug)]
pub(crate) struct Evaluation<'a> {
    limits: &'a Limits,
    pub(crate) key_state: KeyState,
    cost: u64,
    longest_wait: Option<Span>,
    denied: Mask,
    charged: bool,
}

impl<'a> Evaluation<'a> {
    /// Starts the evaluation with the key's state, which must be compatible with the charge's
    /// limits. If the effect is a refund, the refund is applied to the state.
    #[inline]
    pub(crate) fn open(
        charge: &Charge<'a>,
        mut key_state: KeyState,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        if effect == Effect::Refund {
            charge
                .limits
                .refund(&mut key_state, now, charge.cost.units());
        }
        let cost = if effect.can_deny() {
            charge.cost.units()
        } else {
            0
        };
        Self {
            limits: charge.limits,
            key_state,
            cost,
            longest_wait: charge.longest_wait,
            denied: 0,
            charged: false,
        }
    }

    /// Evaluates the limits. Returns true if the limits admit the request. In shadow mode, the
    /// limits always admit the request.
    #[inline]
    pub(crate) fn evaluate(&mut self, now: Timestamp) -> bool {
        let mut denied = self.limits.denied(&mut self.key_state, now, self.cost);
        if let Some(longest) = self.longest_wait {
            denied |= self.limits.exceeds_max_delay(&self.key_state, now, longest);
        }
        // A cost of 0 is always admitted, even if the count exceeds a lowered limit.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.limits.is_shadow()
    }

    /// Returns whether [`Self::apply`] writes the state, even if the write changes nothing.
    /// `admitted` is the decision on the whole request.
    pub(crate) fn is_written(&self, admitted: bool) -> bool {
        admitted && self.denied == 0
            || admitted == self.limits.is_shadow() && self.limits.counts_denials()
    }

    /// Charges the cost if the request was admitted and the limits of this charge do not deny the
    /// request. If the cost is not charged, charges only the limits that count denied requests, if
    /// any. `admitted` is the decision on the whole request. Returns true if the state changed.
    #[inline]
    pub(crate) fn apply(&mut self, admitted: bool, now: Timestamp) -> bool {
        if admitted && self.denied == 0 {
            self.limits.charge(&mut self.key_state, now, self.cost);
            self.charged = self.cost > 0;
            self.charged
        } else if admitted == self.limits.is_shadow() {
            // The request was denied by these limits or by the limits of another charge. A rule in
            // shadow mode counts a denial only if its own limits denied the request.
            let (cost, denied) = (self.cost, self.denied);
            self.limits
                .charge_denied(&mut self.key_state, now, cost, denied)
        } else {
            false
        }
    }

    /// Returns the position of the charge in the state, or `None` if nothing was charged. A rule in
    /// shadow mode is not charged for a request that it would have denied.
    pub(crate) fn charge_record(
        &self,
        at: Timestamp,
        shifts: Box<[u64]>,
        conversion: u64,
    ) -> Option<ChargeRecord> {
        self.charged.then(|| ChargeRecord {
            at,
            cost: self.cost,
            fingerprint: self.limits.fingerprint(),
            marks: self.limits.marks(&self.key_state),
            shifts,
            conversion,
        })
    }

    /// Appends the outcome of every limit of the charge to `outcomes`.
    #[inline]
    pub(crate) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        let result = EvaluationResult {
            now,
            cost: self.cost,
            longest_wait: self.longest_wait,
            denied: self.denied,
            charged: self.charged,
        };
        self.limits.report(&self.key_state, result, outcomes);
    }
}
