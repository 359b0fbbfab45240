//! The evaluation of one charge, step by step. The steps are the same wherever the state is stored.

use crate::{
    algorithm::Outcome,
    eval::{Charge, ChargeRecord, Effect, EvaluationResult, KeyState, Limits, Mask},
    time::{Span, Timestamp},
};

/// One charge while it is evaluated.
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
    /// Starts with the state of the charge's key, which must match the limits of the charge. A
    /// refund is applied here.
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

    /// Evaluates the limits. Returns true if the limits admit the request; the limits of a shadow
    /// rule always admit it.
    #[inline]
    pub(crate) fn evaluate(&mut self, now: Timestamp) -> bool {
        let mut denied = self.limits.denied(&mut self.key_state, now, self.cost);
        if let Some(longest) = self.longest_wait {
            denied |= self.limits.exceeds_max_delay(&self.key_state, now, longest);
        }
        // A cost of 0 always fits, even if the count exceeds a limit that was lowered.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.limits.is_shadow()
    }

    /// Returns whether [`Self::apply`] writes the state, even if the state does not change.
    /// `admitted` is the decision on the request as a whole.
    pub(crate) fn is_written(&self, admitted: bool) -> bool {
        admitted && self.denied == 0
            || admitted == self.limits.is_shadow() && self.limits.counts_denials()
    }

    /// Charges the cost. `admitted` is the decision on the request as a whole. Returns true if the
    /// state changed.
    #[inline]
    pub(crate) fn apply(&mut self, admitted: bool, now: Timestamp) -> bool {
        if admitted && self.denied == 0 {
            self.limits.charge(&mut self.key_state, now, self.cost);
            self.charged = self.cost > 0;
            self.charged
        } else if admitted == self.limits.is_shadow() {
            // The request is denied, by these limits or by others. A shadow rule counts a denial
            // only if its own limits denied the request, and ignores denials by other limits.
            let (cost, denied) = (self.cost, self.denied);
            self.limits
                .charge_denied(&mut self.key_state, now, cost, denied)
        } else {
            false
        }
    }

    /// Returns the location of the charge in the state, if the charge was made. If a shadow rule
    /// would have denied the request, the request is not charged to that rule.
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

    /// Appends the outcome of every limit.
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
