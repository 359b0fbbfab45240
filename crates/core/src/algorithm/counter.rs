//! The interface that every kernel implements.

use super::{ChargePosition, Drain, LimitStatus, Mark, Numbers, RetryAfter, Terms};
use crate::{
    limit::bounds,
    time::{Span, Timestamp},
};

/// A kernel (the implementation of an algorithm): the parameters of one limit, and the operations
/// on the state of a key.
///
/// The [`Kernel`](super::Kernel) method of the same name has the documentation of each method.
pub(crate) trait Counter: Sized {
    /// The state of one key.
    type State: CounterState;

    fn numbers(&self, cost: u64) -> Numbers<'_>;

    fn terms(&self) -> Terms;

    fn in_terms(&self, _terms: &Terms) -> Option<Self> {
        None
    }

    fn drain(
        &self,
        _old: Option<&Self>,
        _state: &Self::State,
        _now: Timestamp,
        _cost: u64,
    ) -> Option<Drain> {
        None
    }

    /// Returns the largest number that a state of this limit can contain. Instants are not taken
    /// into account.
    fn largest_number(&self) -> u64 {
        u64::MAX
    }

    fn new_entry_bytes(&self, _cost: u64) -> usize {
        0
    }

    fn growth_bytes(&self, _state: &Self::State, _cost: u64) -> usize {
        0
    }

    fn fresh(&self) -> Self::State;

    fn is_compatible(&self, _state: &Self::State) -> bool {
        true
    }

    fn adopt(&self, old: Option<&Self>, state: &mut Self::State, now: Timestamp);

    /// Returns whether a request of this `cost` would be admitted now.
    fn admits(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> bool;

    fn denied(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> u16 {
        u16::from(!self.admits(state, now, cost))
    }

    fn charge(&self, state: &mut Self::State, now: Timestamp, cost: u64);

    fn clamp(&self, state: &mut Self::State, at: Timestamp);

    fn trim(&self, _state: &mut Self::State, _now: Timestamp) {}

    fn refund(&self, state: &mut Self::State, now: Timestamp, units: u64);

    fn mark(state: &Self::State) -> Mark;

    /// Refunds up to `units` units of the charge at `position`. Refunds nothing if another kernel
    /// recorded `position`.
    fn refund_charge(
        &self,
        state: &mut Self::State,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64;

    fn renew(
        &self,
        _state: &mut Self::State,
        _now: Timestamp,
        _since: Timestamp,
        _units: u64,
    ) -> bool {
        true
    }

    fn status(&self, state: &Self::State, now: Timestamp, window: usize) -> LimitStatus;

    fn retry(&self, state: &Self::State, now: Timestamp, window: usize, cost: u64) -> RetryAfter;

    fn excess(&self, _state: &Self::State, _now: Timestamp) -> u64 {
        0
    }

    fn excess_delay(&self, _state: &Self::State, _now: Timestamp, _longest: Span) -> Span {
        Span::ZERO
    }

    fn delay(&self, _state: &Self::State, _now: Timestamp, _cost: u64) -> Span {
        Span::ZERO
    }
}

/// A kernel's state for one key. The [`KernelState`](super::KernelState) method of the same name
/// has the documentation of each method.
pub(crate) trait CounterState: Sized {
    fn expires(&self) -> Timestamp;

    fn move_back(&mut self, span: Span);

    fn heap_bytes(&self) -> usize {
        0
    }

    fn log_growth_bytes(&self) -> usize {
        0
    }

    /// Serialises the state by passing its numbers to `put`. [`Self::read`] is the inverse
    /// function.
    fn write(&self, put: &mut dyn FnMut(u64));

    /// Deserialises a state from the numbers that [`Self::write`] produced. Returns `None` if the
    /// numbers are invalid, for example in a damaged snapshot file.
    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self>;
}

/// Returns whether `number` is a valid number of units, which is at most [`bounds::MAX_COUNT`].
pub(super) fn is_count(number: &u64) -> bool {
    *number <= bounds::MAX_COUNT
}

/// Returns whether `number` is within the range of [`Timestamp`]. The number counts microseconds or
/// windows since the epoch.
pub(crate) fn is_instant(number: &u64) -> bool {
    *number <= Timestamp::MAX.as_micros()
}
