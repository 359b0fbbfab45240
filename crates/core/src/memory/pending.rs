//! Pending charges: charges for which a decision is in progress.

use crate::{
    algorithm::Outcome,
    eval::{Charge, Evaluation, FormerState, KeyState, Limits, UndoRecord},
    time::Timestamp,
};

/// The location of a charge's key, and whether the shard has room for the memory that the charge
/// adds. If the shard does not have room, the charge is admitted but not counted
/// ([`WhenFull::Allow`](super::WhenFull::Allow)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryLocation {
    /// The key has an entry in slot `number` of the hash table.
    At { number: usize, has_room: bool },
    /// The key has no entry.
    Absent { has_room: bool },
}

impl EntryLocation {
    /// Returns whether the shard has room for the memory that the charge adds.
    pub(super) fn has_room(self) -> bool {
        match self {
            Self::At { has_room, .. } | Self::Absent { has_room } => has_room,
        }
    }
}

/// The hash of a charge's key, and the location of its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyLocation {
    pub(super) hash: u64,
    pub(super) located: EntryLocation,
}

/// A charge that is being decided, with its state checked out of the store.
#[derive(Debug)]
pub(super) struct PendingCharge<'c> {
    pub(super) charge: &'c Charge<'c>,
    pub(super) location: KeyLocation,
    pub(super) evaluation: Evaluation<'c>,
    /// The state as written under other limits, before conversion. `Some` if the former state must
    /// be put back unchanged because the conversion lost spent units.
    pub(super) former: Option<Box<FormerState>>,
    /// If the state was converted, the instant at which the last unit charged under other limits
    /// expires; otherwise zero. The converted state is written back only if `former` is `None`.
    pub(super) converted_until: Timestamp,
    /// Whether the decision changed the state. A new key is inserted only if the decision changed
    /// its state.
    pub(super) is_changed: bool,
    /// The input of [`Limits::undo`] for each part of the state. `Some` if a read-only decision
    /// uses the state without a copy (see
    /// [`KeyEntry::can_be_lent`](super::key_entry::KeyEntry::can_be_lent)), so that the charge must
    /// be undone.
    pub(super) lent: Option<Vec<UndoRecord>>,
}

impl PendingCharge<'_> {
    #[inline]
    pub(super) fn evaluate(&mut self, now: Timestamp) -> bool {
        self.evaluation.evaluate(now)
    }

    #[inline]
    pub(super) fn apply(&mut self, admitted: bool, now: Timestamp) {
        if let Some(before) = &mut self.lent {
            *before = Limits::before_charge(&self.evaluation.key_state);
        }
        // A state that exceeds a limit stays in the store until it has drained below that limit,
        // even if denied requests are counted.
        let is_replaced = |former: &FormerState| former.drain_times.is_empty();
        if self.former.as_deref().is_some_and(is_replaced) && self.evaluation.is_written(admitted) {
            self.former = None;
        }
        self.is_changed = self.evaluation.apply(admitted, now);
    }

    /// Undoes the charge of a read-only decision and returns the state; `None` if the decision uses
    /// a copy of the state.
    pub(super) fn undone(self, now: Timestamp) -> Option<KeyState> {
        let before = self.lent?;
        let units = if self.is_changed {
            self.charge.cost.units()
        } else {
            0
        };
        let mut key_state = self.evaluation.key_state;
        self.charge.limits.undo(&mut key_state, now, units, before);
        Some(key_state)
    }

    /// Appends the outcome of each limit. Returns true if the key is hot and must not be evicted.
    #[inline]
    pub(super) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) -> bool {
        let first = outcomes.len();
        self.evaluation.report(now, outcomes);
        if let Some(former) = &self.former {
            former.drain_times.correct(&mut outcomes[first..]);
        }
        let mut reported = self.charge.limits.iter().zip(&outcomes[first..]);
        // A key is hot if a limit denied the request or if more than half of a limit is used.
        reported.any(|(limit, outcome)| !outcome.allowed || limit.is_hot(outcome.remaining))
    }
}
