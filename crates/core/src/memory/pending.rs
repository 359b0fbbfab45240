//! A charge while it is being decided.

use crate::{charge::Charge, outcome::Outcome, question::Question, time::Timestamp};

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
    /// Whether there is anything to remember of a key that was not there.
    pub(super) kept: bool,
}

impl Pending<'_> {
    #[inline]
    pub(super) fn ask(&mut self, now: Timestamp) -> bool {
        self.question.ask(now)
    }

    #[inline]
    pub(super) fn settle(&mut self, admitted: bool, now: Timestamp) {
        self.kept = self.question.settle(admitted, now);
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
