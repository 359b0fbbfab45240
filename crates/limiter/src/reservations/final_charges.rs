//! The final charges of a reservation.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate::rate_limiter::{OwnedCharge, OwnedCharges, charge_excess, excess_costs};
use tidegate_config::ReservationExpiry;
use tidegate_core::{Charge, CostSource, Mode, Rule, RuleSet, Settlement, Timestamp};

use crate::ServerLimiter;

/// The final charges of a reservation.
pub(super) struct FinalCharges {
    /// The final amount of each charge.
    pub(super) amounts: SmallVec<[u64; 1]>,
    /// The settlement of each charge.
    pub(super) settlements: SmallVec<[Settlement; 1]>,
    /// The largest excess over a reserved amount that is never charged, because the rule also has
    /// concurrency slots. A rule in shadow mode does not count, because it admits every excess.
    pub(super) uncharged: u64,
}

impl FinalCharges {
    /// Returns the final charges of a request with this final cost. `rules` are the rules in force:
    /// they determine the cost, so that every server that settles the reservation determines the
    /// same cost after a reload.
    pub(super) fn new(charges: &OwnedCharges, rules: &RuleSet, cost: u64) -> Self {
        let has_rules = charges.has_rules();
        let mut uncharged = 0;
        let final_charge = |charge: &OwnedCharge| {
            let reserved = charge.cost.units();
            match rules.rule_of(&charge.key).filter(|_| has_rules) {
                Some(rule) => {
                    let amount = final_charge(rule, reserved, cost);
                    let has_units = charge.limits().has_units() || rule.has_units();
                    let is_enforced = rule.mode() == Mode::Enforce;
                    if is_enforced && has_units && matches!(rule.cost(), CostSource::Request) {
                        uncharged = uncharged.max(cost - amount);
                    }
                    amount
                }
                // This server does not have the rule, so it does not know how the rule determines
                // its cost.
                None if has_rules => cost.min(reserved),
                // The counter of an Envoy descriptor has no rule.
                None => cost,
            }
        };
        let amounts = charges.list().iter().map(final_charge).collect();
        Self {
            uncharged,
            ..Self::from_amounts(charges, amounts)
        }
    }

    /// Returns the final charges of a request whose reservation has expired.
    pub(super) fn of_expired(charges: &OwnedCharges, on_expiry: ReservationExpiry) -> Self {
        // A counter without a rule is always refunded, because a late `Commit` charges it again.
        let is_charged = charges.has_rules() && on_expiry == ReservationExpiry::Charge;
        let amount = |charge: &OwnedCharge| if is_charged { charge.cost.units() } else { 0 };
        let amounts = charges.list().iter().map(amount).collect();
        Self::from_amounts(charges, amounts)
    }

    fn from_amounts(charges: &OwnedCharges, amounts: SmallVec<[u64; 1]>) -> Self {
        let settlement = |(charge, amount): (&OwnedCharge, &u64)| Settlement {
            unused: charge.cost.units().saturating_sub(*amount),
        };
        let settlements = charges
            .list()
            .iter()
            .zip(&amounts)
            .map(settlement)
            .collect();
        Self {
            amounts,
            settlements,
            uncharged: 0,
        }
    }
}

/// Returns how many units `rule` charges in total for a request with the final `cost`. The rule has
/// already charged `reserved` units.
fn final_charge(rule: &Rule, reserved: u64, cost: u64) -> u64 {
    match rule.cost() {
        // More concurrency slots than reserved are never charged, because no request would release
        // them.
        CostSource::Request if rule.has_slots() => cost.min(reserved),
        // A reservation has no request body to read a cost from, so the cost given in the call
        // applies.
        CostSource::Request | CostSource::Body(_) => cost,
        CostSource::Fixed(_) | CostSource::Entry(_) if cost == 0 => 0,
        CostSource::Fixed(_) | CostSource::Entry(_) => reserved,
    }
}

impl ServerLimiter {
    /// Charges the excess of each final amount over the reserved amount under `rules`, with which
    /// the final amounts were determined. The limits may not admit the whole excess. Returns the
    /// largest number of units that were not charged.
    pub(super) async fn charge_excess_of(
        &self,
        charges: &OwnedCharges,
        final_charges: &FinalCharges,
        rules: &Arc<RuleSet>,
        now: Timestamp,
    ) -> u64 {
        let reserved = charges.list().iter().map(|charge| charge.cost.units());
        let mut amounts = reserved.zip(&final_charges.amounts);
        if amounts.all(|(reserved, amount)| *amount <= reserved) {
            return final_charges.uncharged;
        }
        // The excess is a new charge, so the limits that apply now decide it.
        let current = charges.under_current_limits(rules, now);
        // No request would release the slots of an excess.
        let is_chargeable: SmallVec<[bool; 1]> = current
            .with_rules()
            .map(|(_, rule)| rule.is_some_and(|rule| !rule.has_slots()))
            .collect();
        let charges = current.as_charges();
        let excess = excess_costs(&charges, &final_charges.amounts);
        let mut uncharged = final_charges.uncharged;
        // The excess of a rule that a reload has removed is not charged.
        for (at, excess) in excess.into_iter().filter(|(at, _)| is_chargeable[*at]) {
            let charge = Charge {
                cost: excess,
                ..charges[at]
            };
            let charged = charge_excess(self, charge, now).await;
            uncharged = uncharged.max(excess.units() - charged);
        }
        uncharged
    }
}
