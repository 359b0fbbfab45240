//! A charge while it is being decided.

use crate::{
    cell::Cell, charge::Charge, limit::Limit, limits::Mask, member::Asked, outcome::Outcome,
    time::Timestamp,
};

/// Where the key of a charge is, and whether there is room for what is charged: if not, it passes uncounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Located {
    /// In the entry of this number.
    At { number: usize, has_room: bool },
    /// Nowhere.
    Absent { has_room: bool },
}

/// Where the key of a charge is, or would be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) hash: u64,
    pub(super) located: Located,
}

/// One charge while it is being decided: its state is out of the store.
#[derive(Debug)]
pub(super) struct Pending<'c> {
    pub(super) charge: &'c Charge<'c>,
    cost: u64,
    pub(super) place: Place,
    pub(super) cell: Cell,
    denied: Mask,
    charged: bool,
    pub(super) kept: bool,
}

impl<'c> Pending<'c> {
    pub(super) fn new(charge: &'c Charge<'c>, place: Place, cell: Cell, cost: u64) -> Self {
        Self {
            charge,
            cost,
            place,
            cell,
            denied: 0,
            charged: false,
            kept: false,
        }
    }

    /// Asks the limits; true if they let the request pass, as those of a shadow rule always do.
    #[inline]
    pub(super) fn ask(&mut self, now: Timestamp) -> bool {
        let denied = self.charge.limits.denied(&mut self.cell, now, self.cost);
        // A cost of nothing always fits, also where more is spent than a lowered limit holds.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.charge.limits.shadow()
    }

    /// Spends what is to be spent, given whether the request as a whole is `admitted`.
    #[inline]
    pub(super) fn settle(&mut self, admitted: bool, now: Timestamp) {
        let limits = self.charge.limits;
        if admitted && self.denied == 0 {
            limits.charge(&mut self.cell, now, self.cost);
            self.charged = true;
        } else if admitted == limits.shadow() {
            // Denied by these limits, or by others of the same request: a shadow limit takes no notice of those.
            self.kept |= limits.charge_denied(&mut self.cell, now, self.cost, self.denied);
        }
        self.kept |= self.charged;
    }

    #[inline]
    pub(super) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) -> bool {
        let first = outcomes.len();
        let asked = Asked {
            now,
            cost: self.cost,
            denied: self.denied,
            charged: self.charged && self.cost > 0,
        };
        let limits = self.charge.limits;
        limits.report(&self.cell, asked, outcomes);
        let mut reported = limits.iter().zip(&outcomes[first..]);
        reported.any(|(limit, outcome)| is_pressed(limit, outcome))
    }
}

/// Whether the limit denied the request or is more than half spent, its soft allowance included: its key is not forgotten
/// to make room.
fn is_pressed(limit: &Limit, outcome: &Outcome) -> bool {
    !outcome.allowed || outcome.remaining.saturating_mul(2) < limit.hard_quota()
}
