//! A charge while it is being decided.

use crate::{
    cell::Cell,
    charge::Charge,
    limits::{Before, LeftCell, Limits},
    outcome::Outcome,
    question::Question,
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

impl Located {
    /// Whether there is room for what is charged.
    pub(super) fn has_room(self) -> bool {
        match self {
            Self::At { has_room, .. } | Self::Absent { has_room } => has_room,
        }
    }
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
    pub(super) place: Place,
    pub(super) question: Question<'c>,
    /// The state as other limits left it, if it is to be put back like that.
    pub(super) left: Option<Box<LeftCell>>,
    /// Whether there is anything to remember of a key that was not there.
    pub(super) kept: bool,
    /// Of a state that is lent, and is to be put back as it was: what its parts were, as far as they have to be
    /// copied for that.
    pub(super) lent: Option<Vec<Before>>,
}

impl Pending<'_> {
    #[inline]
    pub(super) fn ask(&mut self, now: Timestamp) -> bool {
        self.question.ask(now)
    }

    #[inline]
    pub(super) fn settle(&mut self, admitted: bool, now: Timestamp) {
        if let Some(before) = &mut self.lent {
            *before = Limits::before_charge(&self.question.cell);
        }
        if self.left.is_some() && self.question.writes(admitted) {
            self.left = None;
        }
        self.kept = self.question.settle(admitted, now);
    }

    /// The state as it was lent: what was charged to find out how the limits would stand is undone.
    pub(super) fn undone(self, now: Timestamp) -> Option<Cell> {
        let before = self.lent?;
        let units = if self.kept {
            self.charge.cost.units()
        } else {
            0
        };
        let mut cell = self.question.cell;
        self.charge.limits.undo(&mut cell, now, units, before);
        Some(cell)
    }

    /// Appends what every limit answers; true if the key is not to be forgotten to make room.
    #[inline]
    pub(super) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) -> bool {
        let first = outcomes.len();
        self.question.report(now, outcomes);
        let mut reported = self.charge.limits.iter().zip(&outcomes[first..]);
        // What has denied the request, or is more than half spent, is not forgotten to make room.
        reported.any(|(limit, outcome)| !outcome.allowed || limit.is_pressed(outcome.remaining))
    }
}
