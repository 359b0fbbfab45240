//! This node's share of every limit. A request that is charged in Redis is also charged to the
//! share. While Redis is slow or unreachable, the share alone decides requests.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::{
    Accounting, Charge, Decision, Effect, Exactness, Limits, OnFailure, Outcome, Receipt,
    RetryAfter, Source, StoreDecision, StoreRequest, Timestamp,
};

use super::{CLOSED_RETRY_AFTER, FallbackStore};

impl FallbackStore {
    /// Applies a decision by Redis to this node's share. Charges the units that Redis admitted, but
    /// no more than fit into the share. Refunds the units that Redis refunded, but no more than
    /// were charged to the share.
    ///
    /// `now` is the time at which the reply arrived.
    pub(super) fn update_share(
        &self,
        request: &StoreRequest<'_, '_>,
        now: Timestamp,
        effect: Effect,
    ) {
        let charge_local = |shared: &Charge<'_>| {
            let mut outcomes = Vec::new();
            self.local.check(&[*shared], now, effect, &mut outcomes)
        };
        for charge in request.charges.iter() {
            self.apply_to_share(charge, now, charge_local);
        }
    }

    /// Calls `charge_local` with this node's share of `charge`, if the rule's failure policy is
    /// [`OnFailure::Local`].
    pub(super) fn apply_to_share(
        &self,
        charge: &Charge<'_>,
        now: Timestamp,
        charge_local: impl FnOnce(&Charge<'_>) -> Decision,
    ) {
        if self.policy(charge) != OnFailure::Local {
            return;
        }
        let limits = charge.limits.share(self.share());
        let shared = Charge {
            limits: &limits,
            ..*charge
        };
        if let Decision::Blocked { .. } = charge_local(&shared) {
            // Redis has admitted the request, so the block has been lifted.
            self.local.unblock(charge.key, now);
        }
    }

    /// Copies `charges` with each limit reduced to this node's share, calls `answer` with the
    /// copies, and returns the result.
    pub(super) fn with_share<T>(
        &self,
        charges: &[Charge<'_>],
        answer: impl FnOnce(&[Charge<'_>]) -> T,
    ) -> T {
        let share = self.share();
        let shares: SmallVec<[Arc<Limits>; 2]> = charges
            .iter()
            .map(|charge| charge.limits.share(share))
            .collect();
        let shared: SmallVec<[Charge<'_>; 2]> = charges
            .iter()
            .zip(&shares)
            .map(|(charge, limits)| Charge { limits, ..*charge })
            .collect();
        answer(&shared)
    }

    /// Decides `request` without Redis, according to the failure policies of its rules. If a rule
    /// has the policy [`OnFailure::Closed`] and the effect of the request can deny, the request is
    /// denied. If no such rule denies the request, only the [`OnFailure::Local`] rules remain in
    /// the request, and this node's share of the limits decides them. If no rule with
    /// [`OnFailure::Local`] remains, the request is admitted.
    pub(super) fn fall_back(
        &self,
        request: &mut StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> StoreDecision {
        outcomes.clear();
        let (now, effect) = (request.now, request.effect);
        let charges = &mut *request.charges;
        let by_policy = |decision| StoreDecision {
            decision,
            exactness: Exactness::None,
            source: Source::Policy,
        };
        let closed = effect.can_deny()
            && charges
                .iter()
                .any(|charge| self.policy(charge) == OnFailure::Closed);
        if closed {
            self.count_fallback(Source::Policy, request.accounting, now);
            return by_policy(Decision::Full {
                retry_after: RetryAfter::After(CLOSED_RETRY_AFTER),
            });
        }
        charges.retain(|charge| self.policy(charge) == OnFailure::Local);
        if charges.is_empty() {
            self.count_fallback(Source::Policy, request.accounting, now);
            return by_policy(Decision::Admitted);
        }
        self.count_fallback(Source::Local, request.accounting, now);
        let decision = self.with_share(charges, |shared| match receipt {
            None => self.local.check(shared, now, effect, outcomes),
            Some(receipt) => {
                let (decision, reserved) = self.local.reserve(shared, now, outcomes);
                *receipt = reserved;
                decision
            }
        });
        StoreDecision {
            decision,
            exactness: Exactness::Local,
            source: Source::Local,
        }
    }

    /// Counts a fallback decision by `source`, and logs the outage if one begins. An inspection is
    /// not counted as a decision.
    fn count_fallback(&self, source: Source, accounting: Accounting, now: Timestamp) {
        if accounting == Accounting::Inspection {
            return;
        }
        if accounting != Accounting::Attempt {
            self.counters.count(source);
        }
        if self.outage.record_fallback(source, now) {
            let error = self.redis.health().error.map(|error| error.to_string());
            let problem = error.or_else(|| self.last_server_error(now));
            let problem = problem.unwrap_or_else(|| "its replies arrive too late".to_owned());
            self.outage_log.begin(&problem);
        }
    }

    fn policy(&self, charge: &Charge<'_>) -> OnFailure {
        self.failure_policy(charge.limits)
    }

    /// Returns the failure policy of `limits`, which applies while Redis is slow or unreachable.
    /// Limits in shadow mode never deny.
    #[must_use]
    pub fn failure_policy(&self, limits: &Limits) -> OnFailure {
        let policy = limits.on_failure().unwrap_or(self.settings.on_failure);
        match (policy, limits.is_shadow()) {
            (OnFailure::Closed, true) => OnFailure::Open,
            (policy, _) => policy,
        }
    }
}
