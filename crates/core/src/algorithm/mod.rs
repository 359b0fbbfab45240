//! Kernels: the implementations of the algorithms, as pure functions of state, time and cost.
//!
//! Each variant of [`Algorithm`](crate::Algorithm) is implemented by one of six kernels. A kernel
//! answers four questions about its own state. All computation on states is in this module:
//!
//! - Is this cost *denied* now?
//! - What is the state after this cost is *charged*?
//! - How much *remains*, when is the whole limit available again, and when would this cost be
//!   admitted?
//! - When does the state *expire*, so that forgetting it changes no decision?
//!
//! For a kernel, time never runs backwards: the store passes the latest instant that it has seen.
//!
//! The documentation of each kernel states what it guarantees under **Promise**. There, `L`, `B`
//! and the capacity include the soft allowance, as in
//! [`Limit::hard_quota`](crate::limit::Limit::hard_quota). The guarantees hold for charges. A
//! caller that may request an [`Effect::Refund`](crate::Effect::Refund) is trusted. **Memory** is
//! the size of the kernel's state. The store adds an entry of 48 bytes, which can hold 16 bytes of
//! state inline.

mod charge_position;
mod compile;
mod fixed_window;
mod gcra;
mod interval_bucket;
mod numbers;
mod outcome;
mod sliding_buckets;
mod sliding_log;
mod sliding_weighted;

pub(crate) use self::{
    charge_position::{ChargePosition, Mark},
    fixed_window::{FixedWindow, WindowState},
    gcra::{Gcra, gcd, narrow},
    interval_bucket::{Interval, IntervalState},
    sliding_buckets::{Buckets, BucketsState},
    sliding_log::{Log, LogState, Stamp},
    sliding_weighted::{Weighted, WeightedState},
};

pub use self::{
    gcra::Exact,
    numbers::{Numbers, Terms},
    outcome::{Outcome, Retry},
};
use crate::{
    limit::bounds,
    time::{Span, Timestamp},
};

/// The compiled parameters of an algorithm.
#[derive(Clone, Debug)]
pub(crate) enum Kernel {
    Gcra(Gcra),
    Interval(Interval),
    Window(FixedWindow),
    Log(Log),
    /// A log of the held concurrency slots, with one window: the lease.
    Lease(Log),
    Buckets(Buckets),
    Weighted(Weighted),
}

/// The state that a kernel keeps for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Gcra(Exact),
    Interval(IntervalState),
    Window(WindowState),
    Log(Box<LogState>),
    Lease(Box<LogState>),
    Buckets(Box<BucketsState>),
    Weighted(Box<WeightedState>),
}

/// The status of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitStatus {
    /// The maximum cost that would be admitted now.
    pub(crate) remaining: u64,
    /// The time until the state expires. From then on, the key is decided like a new one.
    pub(crate) reset_after: Span,
}

/// Calls a method of the kernel with the state of the matching variant. The log kernel may have
/// several windows, so a separate expression is used for it.
///
/// [`Kernel::is_compatible`] has checked the state when it was loaded, so a mismatch cannot occur
/// here.
macro_rules! dispatch {
    ($kernel:expr, $state:expr, log |$l:ident, $ls:ident| $log:expr, other |$k:ident, $s:ident| $call:expr) => {
        match ($kernel, $state) {
            (Kernel::Gcra($k), State::Gcra($s)) => $call,
            (Kernel::Interval($k), State::Interval($s)) => $call,
            (Kernel::Window($k), State::Window($s)) => $call,
            (Kernel::Log($l), State::Log($ls)) | (Kernel::Lease($l), State::Lease($ls)) => $log,
            (Kernel::Buckets($k), State::Buckets($s)) => $call,
            (Kernel::Weighted($k), State::Weighted($s)) => $call,
            _ => unreachable!("`Kernel::is_compatible` has checked the state when it was loaded"),
        }
    };
}

/// Returns the inner kernel if it is of that variant.
macro_rules! of_kind {
    ($kernel:expr, $kind:ident) => {
        match $kernel {
            Some(Kernel::$kind(kernel)) => Some(kernel),
            _ => None,
        }
    };
}

impl Kernel {
    /// Returns the parameters for a remote store (Redis), for a request of `cost`.
    pub(crate) fn numbers(&self, cost: u64) -> Numbers<'_> {
        match self {
            Self::Gcra(gcra) => gcra.numbers(cost),
            Self::Interval(interval) => interval.numbers(),
            Self::Window(window) => window.numbers(),
            Self::Log(log) => log.numbers(),
            Self::Lease(log) => log.lease_numbers(),
            Self::Buckets(buckets) => buckets.numbers(),
            Self::Weighted(weighted) => weighted.numbers(),
        }
    }

    /// Returns the terms (units) in which a state is counted.
    pub(crate) fn terms(&self) -> Terms {
        match self {
            Self::Gcra(gcra) => gcra.terms(),
            Self::Interval(interval) => interval.terms(),
            Self::Window(window) => window.terms(),
            Self::Log(log) | Self::Lease(log) => log.terms(),
            Self::Buckets(buckets) => buckets.terms(),
            Self::Weighted(weighted) => weighted.terms(),
        }
    }

    /// Returns this kernel with its states counted in other units. `None` if a state contains all
    /// that its conversion needs.
    pub(crate) fn in_terms(&self, terms: &Terms) -> Option<Self> {
        match (self, terms) {
            (
                Self::Gcra(gcra),
                Terms::Gcra {
                    numerator,
                    denominator,
                },
            ) => Some(Self::Gcra(gcra.with_units(*numerator, *denominator))),
            (Self::Interval(interval), Terms::Interval { refill, every }) => {
                Some(Self::Interval(interval.with_refill(*refill, *every)))
            }
            (Self::Window(own), Terms::FirstRequest { window }) => {
                Some(Self::Window(own.in_windows_of(*window)))
            }
            _ => None,
        }
    }

    /// Returns whether [`Self::adopt`] keeps all spent units. With a slower rate, or a smaller
    /// limit of a weighted window counter, some may be lost.
    pub(crate) fn adopts_all(&self, old: Option<&Self>, state: &State, now: Timestamp) -> bool {
        match (self, old, state) {
            (Self::Gcra(new), Some(Self::Gcra(old)), State::Gcra(tat)) => {
                new.adopts_all(old, *tat, now)
            }
            (Self::Interval(new), Some(Self::Interval(old)), State::Interval(state)) => {
                new.adopts_all(old, *state, now)
            }
            (Self::Weighted(new), _, State::Weighted(state)) => new.holds(state, now),
            _ => true,
        }
    }

    /// Returns whether all numbers of a state, except instants, fit in 32 bits.
    pub(crate) fn is_small(&self) -> bool {
        let largest = match self {
            Self::Gcra(gcra) => gcra.largest_part(),
            Self::Interval(interval) => interval.largest_refill(),
            Self::Window(window) => window.largest_count(),
            Self::Log(_) | Self::Lease(_) | Self::Buckets(_) | Self::Weighted(_) => u64::MAX,
        };
        u32::try_from(largest).is_ok()
    }

    /// Returns the maximum number of heap bytes of a new key's state after `cost` is charged.
    pub(crate) fn new_entry_bytes(&self, cost: u64) -> usize {
        match self {
            Self::Gcra(_) | Self::Interval(_) | Self::Window(_) => 0,
            Self::Log(log) | Self::Lease(log) => size_of::<LogState>() + log.new_entry_bytes(cost),
            Self::Buckets(buckets) => size_of::<BucketsState>() + buckets.new_entry_bytes(),
            Self::Weighted(_) => size_of::<WeightedState>(),
        }
    }

    /// Returns the maximum number of bytes that charging `cost` adds to a state.
    pub(crate) fn growth_bytes(&self, state: &State, cost: u64) -> usize {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.growth_bytes(state, cost)
            }
            _ => 0,
        }
    }

    /// Returns the state of a new key.
    pub(crate) fn fresh(&self) -> State {
        match self {
            Self::Gcra(_) => State::Gcra(Exact::default()),
            Self::Interval(_) => State::Interval(IntervalState::default()),
            Self::Window(_) => State::Window(WindowState::default()),
            Self::Log(log) => State::Log(Box::new(log.fresh())),
            Self::Lease(log) => State::Lease(Box::new(log.fresh())),
            Self::Buckets(buckets) => State::Buckets(Box::new(buckets.fresh())),
            Self::Weighted(weighted) => State::Weighted(Box::new(weighted.fresh())),
        }
    }

    /// Returns whether `state` can be used by this kernel without conversion.
    pub(crate) fn is_compatible(&self, state: &State) -> bool {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.is_compatible(state)
            }
            (Self::Buckets(buckets), State::Buckets(state)) => buckets.is_compatible(state),
            (Self::Weighted(weighted), State::Weighted(state)) => weighted.is_compatible(state),
            _ => self.is_kind_of(state),
        }
    }

    /// Returns whether `state` was written by a kernel of this variant, with any numbers.
    pub(crate) fn is_kind_of(&self, state: &State) -> bool {
        matches!(
            (self, state),
            (Self::Gcra(_), State::Gcra(_))
                | (Self::Interval(_), State::Interval(_))
                | (Self::Window(_), State::Window(_))
                | (Self::Log(_), State::Log(_))
                | (Self::Lease(_), State::Lease(_))
                | (Self::Buckets(_), State::Buckets(_))
                | (Self::Weighted(_), State::Weighted(_))
        )
    }

    /// Converts a state that was written under other numbers. `old` is the kernel that wrote it, if
    /// known.
    ///
    /// Spent units stay spent, and anything unknown counts as spent. A state that exceeds these
    /// limits is not reduced, because servers that still use the other numbers share it: a denial
    /// under these limits must not change their count.
    pub(crate) fn adopt(&self, old: Option<&Self>, state: State, now: Timestamp) -> State {
        match (self, state) {
            (Self::Gcra(new), State::Gcra(tat)) => {
                State::Gcra(new.adopt(of_kind!(old, Gcra), tat, now))
            }
            (Self::Interval(new), State::Interval(state)) => {
                State::Interval(new.adopt(of_kind!(old, Interval), state, now))
            }
            (Self::Window(new), State::Window(state)) => {
                State::Window(new.adopt(of_kind!(old, Window), state, now))
            }
            (Self::Log(new), State::Log(mut state)) => {
                new.adopt(&mut state, now);
                State::Log(state)
            }
            (Self::Lease(new), State::Lease(mut state)) => {
                new.adopt(&mut state, now);
                State::Lease(state)
            }
            (Self::Buckets(new), State::Buckets(state)) => {
                State::Buckets(Box::new(new.adopt(&state, now)))
            }
            (Self::Weighted(new), State::Weighted(state)) => {
                State::Weighted(Box::new(new.adopt(&state, now)))
            }
            _ => self.fresh(),
        }
    }

    /// Returns the windows that deny `cost` now, as bits. Only the log kernel uses other bits than
    /// bit 0.
    pub(crate) fn denied(&self, state: &mut State, now: Timestamp, cost: u64) -> u16 {
        dispatch!(
            self,
            state,
            log | k,
            s | k.denied(s, now, cost),
            other | k,
            s | u16::from(!k.admits(s, now, cost))
        )
    }

    /// Charges `cost`. If the request was denied (by a limit that counts denied requests), the
    /// state grows to its maximum at most. A client that keeps sending stays denied, but never owes
    /// more than it could have spent.
    pub(crate) fn charge(&self, state: &mut State, now: Timestamp, cost: u64) {
        dispatch!(
            self,
            state,
            log | k,
            s | k.charge(s, now, cost),
            other | k,
            s | k.charge(s, now, cost)
        );
    }

    /// Clamps a state that was written while the clock was ahead. Afterwards it has at most the
    /// spent units of a key that was charged to its maximum at `at`, the instant from which time
    /// continued.
    ///
    /// A state that was not affected by the wrong clock does not change, unless it exceeds these
    /// limits. That happens if it was written under higher limits; it is then reduced to its
    /// maximum.
    pub(crate) fn clamp(&self, state: &mut State, at: Timestamp) {
        match (self, state) {
            (Self::Gcra(gcra), State::Gcra(tat)) => gcra.clamp(tat, at),
            (Self::Interval(interval), State::Interval(state)) => interval.clamp(state, at),
            (Self::Window(window), State::Window(state)) => window.clamp(state, at),
            (Self::Log(_), State::Log(state)) | (Self::Lease(_), State::Lease(state)) => {
                state.clamp(at);
            }
            (Self::Buckets(_), State::Buckets(state)) => state.clamp(at),
            (Self::Weighted(weighted), State::Weighted(state)) => weighted.clamp(state, at),
            _ => unreachable!("`Kernel::is_compatible` has checked the state when it was loaded"),
        }
    }

    /// Drops units that affect no decision, for a limit that charges denied requests.
    pub(crate) fn trim(&self, state: &mut State, now: Timestamp) {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.trim(state, now);
            }
            _ => {}
        }
    }

    /// Refunds up to `units`, the most recently spent ones first, and never more than are counted.
    pub(crate) fn refund(&self, state: &mut State, now: Timestamp, units: u64) {
        match (self, state) {
            (Self::Gcra(gcra), State::Gcra(tat)) => gcra.refund(tat, now, units),
            (Self::Interval(interval), State::Interval(state)) => {
                interval.refund(state, now, units);
            }
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.refund(state, now, units);
            }
            (Self::Window(_), State::Window(state)) => state.refund(now, units),
            (Self::Buckets(_), State::Buckets(state)) => state.refund(now, units),
            (Self::Weighted(_), State::Weighted(state)) => state.refund(now, units),
            _ => unreachable!("`Kernel::is_compatible` has checked the state when it was loaded"),
        }
    }

    /// Returns the position in `state` of the charge that was just made.
    pub(crate) fn mark(state: &State) -> Mark {
        match state {
            State::Gcra(tat) => Mark::Before(*tat),
            State::Interval(state) => Mark::FullAt(state.full_at),
            State::Window(state) => Mark::Ending(state.end),
            State::Log(_) => Mark::Stamped,
            State::Lease(state) => Mark::HeldSince(state.newest()),
            State::Buckets(state) => Mark::Numbered(state.newest),
            State::Weighted(state) => Mark::Numbered(state.index),
        }
    }

    /// Refunds up to `units` of a charge, as far as they are still counted. Of a lease, releases
    /// all slots. For a GCRA schedule, returns by how many microseconds this moves later charges
    /// forward; otherwise 0.
    pub(crate) fn refund_charge(
        &self,
        state: &mut State,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        let units = units.min(position.cost);
        match (self, state, position.mark) {
            (Self::Gcra(gcra), State::Gcra(tat), Mark::Before(end)) => {
                return gcra.refund_charge(tat, now, position, end, units);
            }
            (Self::Interval(interval), State::Interval(state), Mark::FullAt(full_at)) => {
                interval.refund_charge(state, now, position, full_at, units);
            }
            (Self::Window(_), State::Window(state), Mark::Ending(end)) if state.end == end => {
                state.refund(now, units);
            }
            (Self::Log(log), State::Log(state), Mark::Stamped) => {
                log.refund_charge(state, now, position.at, units);
            }
            (Self::Lease(log), State::Lease(state), Mark::HeldSince(since)) => {
                log.refund_charge(state, now, since, position.cost);
            }
            (Self::Buckets(_), State::Buckets(state), Mark::Numbered(bucket)) => {
                state.refund_charge(now, bucket, units);
            }
            (Self::Weighted(_), State::Weighted(state), Mark::Numbered(window)) => {
                state.refund_charge(now, window, units);
            }
            _ => {}
        }
        0
    }

    /// Renews `units` concurrency slots held since `since`, so that their lease starts `now`.
    /// Returns false, and changes nothing, if the slots were lost and other requests hold them now.
    /// Kernels without leases return true.
    pub(crate) fn renew(
        &self,
        state: &mut State,
        now: Timestamp,
        since: Timestamp,
        units: u64,
    ) -> bool {
        match (self, state) {
            (Self::Lease(log), State::Lease(state)) => log.renew(state, now, since, units),
            _ => true,
        }
    }

    /// Returns the status of window number `part`.
    pub(crate) fn status(&self, state: &State, now: Timestamp, part: usize) -> LimitStatus {
        dispatch!(
            self,
            state,
            log | k,
            s | k.status(s, now, part),
            other | k,
            s | k.status(s, now)
        )
    }

    /// Returns when window number `part`, which denies `cost` now, would admit it. For concurrency
    /// slots this is an estimate.
    pub(crate) fn retry(&self, state: &State, now: Timestamp, part: usize, cost: u64) -> Retry {
        if let (Self::Lease(log), State::Lease(state)) = (self, state) {
            return log.retry_hint(state, now, cost);
        }
        dispatch!(
            self,
            state,
            log | k,
            s | k.retry(s, now, part, cost),
            other | k,
            s | k.retry(s, now, cost)
        )
    }

    /// Returns how far the count exceeds the limit. Only a fixed window can exceed it.
    pub(crate) fn excess(&self, state: &State, now: Timestamp) -> u64 {
        match (self, state) {
            (Self::Window(window), State::Window(state)) => window.excess(state, now),
            _ => 0,
        }
    }

    /// Returns the current wait of a queue minus `longest`, or zero if the wait is shorter. The
    /// cost does not matter.
    pub(crate) fn excess_delay(&self, state: &State, now: Timestamp, longest: Span) -> Span {
        match (self, state) {
            (Self::Gcra(gcra), State::Gcra(tat)) => gcra.excess_delay(*tat, now, longest),
            _ => Span::ZERO,
        }
    }

    /// Returns how long to delay the request whose `cost` was just charged.
    pub(crate) fn delay(&self, state: &State, now: Timestamp, cost: u64) -> Span {
        match (self, state) {
            (Self::Gcra(gcra), State::Gcra(tat)) => gcra.delay(*tat, now, cost),
            _ => Span::ZERO,
        }
    }
}

impl State {
    /// Moves every instant in the state back by the duration `span`. At any instant, the state then
    /// has the spent units that it had `span` later. Sub-windows and weighted windows are aligned
    /// to the epoch, so they move by whole windows only, and by up to one window too little.
    pub(crate) fn move_back(&mut self, span: Span) {
        let micros = span.as_micros();
        match self {
            Self::Gcra(tat) => tat.whole = tat.whole.saturating_sub(micros),
            Self::Interval(state) => state.full_at = state.full_at.saturating_sub(micros),
            Self::Window(state) => state.end = state.end.saturating_sub(micros),
            Self::Log(state) | Self::Lease(state) => state.move_back(span),
            Self::Buckets(state) => state.move_back(span),
            Self::Weighted(state) => state.move_back(span),
        }
    }

    /// Returns the instant from which the state can be dropped without changing any decision.
    pub(crate) fn expires(&self) -> Timestamp {
        match self {
            Self::Gcra(tat) => tat.ceil(),
            Self::Interval(state) => state.full_at(),
            Self::Window(state) => state.end(),
            Self::Log(state) | Self::Lease(state) => state.expires(),
            Self::Buckets(state) => state.expires(),
            Self::Weighted(state) => state.expires(),
        }
    }

    /// Returns the heap bytes owned by the state.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Self::Gcra(_) | Self::Interval(_) | Self::Window(_) => 0,
            Self::Log(state) | Self::Lease(state) => size_of::<LogState>() + state.heap_bytes(),
            Self::Buckets(state) => size_of::<BucketsState>() + state.heap_bytes(),
            Self::Weighted(_) => size_of::<WeightedState>(),
        }
    }

    /// Returns the maximum number of bytes by which a log grows when it is converted to other
    /// limits and charged.
    pub(crate) fn log_growth_bytes(&self) -> usize {
        if let Self::Log(state) | Self::Lease(state) = self {
            state.growth_bytes(bounds::MAX_LOG_LIMIT)
        } else {
            0
        }
    }
}
