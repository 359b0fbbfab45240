//! The part of a request's final cost that exceeds what was charged before the request.

use tidegate_core::{
    Charge, Cost, Decision, MaybeReady, Outcome, Store, StoreDecision, StoreRequest, Timestamp,
};

/// Returns the index and the excess of each charge whose amount in `final_charges` exceeds its
/// cost.
#[must_use]
pub fn excess_costs(charges: &[Charge<'_>], final_charges: &[u64]) -> Vec<(usize, Cost)> {
    let excess = |(at, (charge, final_charge)): (usize, (&Charge<'_>, &u64))| {
        let more = final_charge.saturating_sub(charge.cost.units());
        // `Cost::new` writes an error message for 0, which takes longer than the rest of a
        // settlement without an excess.
        let cost = (more > 0).then(|| Cost::new(more).ok())??;
        Some((at, cost))
    };
    charges
        .iter()
        .zip(final_charges)
        .enumerate()
        .filter_map(excess)
        .collect()
}

/// Charges the part of a request's cost that exceeds the reserved amount. `charge` has the excess
/// as its cost. If the limits do not admit the whole excess, charges as much of it as they admit.
/// Returns the number of charged units.
pub fn charge_excess<S: Store>(
    store: &S,
    charge: Charge<'_>,
    now: Timestamp,
) -> MaybeReady<u64, impl Future<Output = u64> + Send> {
    let mut outcomes = Vec::new();
    let mut charges = vec![charge];
    let request = StoreRequest::excess(&mut charges, now);
    if let Some(decided) = store.decide(request, &mut outcomes).ready() {
        let Some(cost) = admissible(&decided, &outcomes) else {
            return MaybeReady::Ready(charged(&decided, charge));
        };
        let rest = Charge { cost, ..charge };
        charges = vec![rest];
        let request = StoreRequest::excess(&mut charges, now);
        if let Some(decided) = store.decide(request, &mut outcomes).ready() {
            return MaybeReady::Ready(charged(&decided, rest));
        }
    }
    MaybeReady::Pending(async move {
        let mut charges = vec![charge];
        let request = StoreRequest::excess(&mut charges, now);
        let decided = store.decide(request, &mut outcomes).await;
        let Some(cost) = admissible(&decided, &outcomes) else {
            return charged(&decided, charge);
        };
        let rest = Charge { cost, ..charge };
        charges = vec![rest];
        let request = StoreRequest::excess(&mut charges, now);
        let decided = store.decide(request, &mut outcomes).await;
        charged(&decided, rest)
    })
}

/// Returns the number of units that the decision charged for `charge`.
fn charged(decided: &StoreDecision, charge: Charge<'_>) -> u64 {
    match decided.decision {
        Decision::Admitted => charge.cost.units(),
        _ => 0,
    }
}

/// Returns the number of units that the denying limits would still admit. Returns `None` if no unit
/// would be admitted or if no limit denied the charge.
fn admissible(decided: &StoreDecision, outcomes: &[Outcome]) -> Option<Cost> {
    if decided.decision != Decision::Limited {
        return None;
    }
    let least = outcomes.iter().map(|outcome| outcome.remaining).min();
    Cost::new(least?).ok()
}
