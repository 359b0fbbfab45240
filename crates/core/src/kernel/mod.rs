//! The kernels: pure functions of state, time and cost.
//!
//! Every algorithm of [`Algorithm`] is a face of one of six kernels. Each answers four questions about its own state, and
//! nobody else computes anything:
//!
//! - would this cost be *denied* now?
//! - what is the state once it is *charged*?
//! - how do things stand: what *remains*, when is it all back, when would this cost pass?
//! - when is the state *as good as new*, so that forgetting it changes nothing?
//!
//! Time never runs backwards here: the store hands in the latest instant that it has seen.
//!
//! The `L`, `B` and capacity of the promises are those of [`Limit::hard_quota`]: with the soft allowance on top. They hold
//! for what is charged; who may ask for an [`Effect::Refund`](crate::Effect::Refund) is trusted. What a state takes is the
//! kernel's; the store adds its entry of 48 bytes, which holds 16 bytes of state itself.

mod buckets;
mod interval;
mod log;
mod schedule;
mod weighted;
mod window;

pub(crate) use self::{
    buckets::{Buckets, BucketsState},
    interval::{Interval, IntervalState},
    log::{Log, LogState, Stamp},
    schedule::{Schedule, gcd, narrow},
    weighted::{Weighted, WeightedState},
    window::{FixedWindow, WindowState},
};

pub use self::schedule::Exact;
use crate::{
    bounds::{self, check_count, least_capacity},
    limit::{Algorithm, Counting, Limit, LimitError, RefillMode},
    outcome::Retry,
    receipt::Place,
    remote::{Numbers, Terms},
    time::{Span, Timestamp},
};

/// An algorithm's numbers, ready for deciding.
#[derive(Clone, Debug)]
pub(crate) enum Kernel {
    Schedule(Schedule),
    Interval(Interval),
    Window(FixedWindow),
    Log(Log),
    /// A log of those who hold a place.
    Lease(Log),
    Buckets(Buckets),
    Weighted(Weighted),
}

/// What a kernel remembers of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Schedule(Exact),
    Interval(IntervalState),
    Window(WindowState),
    Log(Box<LogState>),
    Lease(Box<LogState>),
    Buckets(Box<BucketsState>),
    Weighted(Box<WeightedState>),
}

/// Where in a state its latest charge is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Right before this arrival time.
    Before(Exact),
    /// In the debt of a bucket that was full again at that instant.
    FullAt(u64),
    /// In the window that ends then.
    Ending(u64),
    /// In the log, at the instant of the charge.
    Stamped,
    /// In the log of who holds a place, at the instant from which this one is held.
    HeldSince(Timestamp),
    /// In the bucket, or the weighted window, of that number.
    Numbered(u64),
}

/// How one limit stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The most that could be spent now.
    pub(crate) remaining: u64,
    /// How long until the state is as good as new.
    pub(crate) reset_after: Span,
}

/// Calls a method of the kernel with its own kind of state; a log, which has parts, has its own call.
///
/// [`Kernel::knows`] guards the way in: a state of another kernel never gets this far.
macro_rules! dispatch {
    ($kernel:expr, $state:expr, log |$l:ident, $ls:ident| $log:expr, other |$k:ident, $s:ident| $call:expr) => {
        match ($kernel, $state) {
            (Kernel::Schedule($k), State::Schedule($s)) => $call,
            (Kernel::Interval($k), State::Interval($s)) => $call,
            (Kernel::Window($k), State::Window($s)) => $call,
            (Kernel::Log($l), State::Log($ls)) | (Kernel::Lease($l), State::Lease($ls)) => $log,
            (Kernel::Buckets($k), State::Buckets($s)) => $call,
            (Kernel::Weighted($k), State::Weighted($s)) => $call,
            _ => unreachable!("a state is checked with `Kernel::knows` when it is loaded"),
        }
    };
}

/// The kernel inside, if it is of that kind.
macro_rules! of_kind {
    ($kernel:expr, $kind:ident) => {
        match $kernel {
            Some(Kernel::$kind(kernel)) => Some(kernel),
            _ => None,
        }
    };
}

impl Kernel {
    /// Checks a limit's numbers and prepares them.
    pub(crate) fn compile(limit: &Limit) -> Result<Self, LimitError> {
        let hard = limit.hard_quota();
        Ok(match limit.algorithm() {
            Algorithm::Gcra { rate, burst } => {
                check_count("burst", *burst, 0)?;
                Self::Schedule(Schedule::new(("rate", *rate), ("burst", hard), false)?)
            }
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode,
            } => {
                check_count("capacity", *capacity, least_capacity(false))?;
                match mode {
                    RefillMode::Continuous => Self::Schedule(Schedule::new(
                        ("refill", *refill),
                        ("capacity", hard),
                        false,
                    )?),
                    RefillMode::Interval => Self::Interval(Interval::new(*refill, hard)?),
                }
            }
            Algorithm::LeakyBucket {
                capacity,
                leak,
                queue,
            } => {
                check_count("capacity", *capacity, least_capacity(*queue))?;
                Self::Schedule(Schedule::new(("leak", *leak), ("capacity", hard), *queue)?)
            }
            Algorithm::FixedWindow { window, .. } => {
                Self::Window(FixedWindow::new(hard, window, limit.counts_in_full())?)
            }
            Algorithm::SlidingWindowLog { window, .. } => Self::Log(Log::new(hard, *window)?),
            Algorithm::Concurrency { lease, .. } => Self::Lease(Log::new_lease(hard, *lease)?),
            Algorithm::SlidingWindowCounter {
                window,
                counting: Counting::Weighted,
                ..
            } => Self::Weighted(Weighted::new(hard, *window)?),
            Algorithm::SlidingWindowCounter {
                window,
                counting: Counting::Buckets { buckets, strict },
                ..
            } => Self::Buckets(Buckets::new(hard, *window, *buckets, *strict)?),
        })
    }

    /// The numbers for a store elsewhere, at a cost.
    pub(crate) fn numbers(&self, cost: u64) -> Numbers<'_> {
        match self {
            Self::Schedule(schedule) => schedule.numbers(cost),
            Self::Interval(interval) => interval.numbers(),
            Self::Window(window) => window.numbers(),
            Self::Log(log) => log.numbers(),
            Self::Lease(log) => log.lease_numbers(),
            Self::Buckets(buckets) => buckets.numbers(),
            Self::Weighted(weighted) => weighted.numbers(),
        }
    }

    /// What a state is counted in.
    pub(crate) fn terms(&self) -> Terms {
        match self {
            Self::Schedule(schedule) => schedule.terms(),
            Self::Interval(interval) => interval.terms(),
            Self::Window(window) => window.terms(),
            Self::Log(log) | Self::Lease(log) => log.terms(),
            Self::Buckets(buckets) => buckets.terms(),
            Self::Weighted(weighted) => weighted.terms(),
        }
    }

    /// This kernel, its states counted in other terms, where a conversion needs more than the state.
    pub(crate) fn in_terms(&self, terms: &Terms) -> Option<Self> {
        match (self, terms) {
            (
                Self::Schedule(schedule),
                Terms::Schedule {
                    numerator,
                    denominator,
                },
            ) => Some(Self::Schedule(
                schedule.with_units(*numerator, *denominator),
            )),
            (Self::Interval(interval), Terms::Interval { refill, every }) => {
                Some(Self::Interval(interval.with_refill(*refill, *every)))
            }
            (Self::Window(own), Terms::FirstRequest { window }) => {
                Some(Self::Window(own.in_windows_of(*window)))
            }
            _ => None,
        }
    }

    /// Whether [`Self::adopt`] keeps all that was spent: a slower rate, or a smaller limit of two weighted windows, may not.
    pub(crate) fn adopts_all(&self, old: Option<&Self>, state: &State, now: Timestamp) -> bool {
        match (self, old, state) {
            (Self::Schedule(new), Some(Self::Schedule(old)), State::Schedule(tat)) => {
                new.adopts_all(old, *tat, now)
            }
            (Self::Interval(new), Some(Self::Interval(old)), State::Interval(state)) => {
                new.adopts_all(old, *state, now)
            }
            (Self::Weighted(new), _, State::Weighted(state)) => new.holds(state, now),
            _ => true,
        }
    }

    /// Whether all numbers of a state, but instants, fit 32 bits.
    pub(crate) fn is_small(&self) -> bool {
        let largest = match self {
            Self::Schedule(schedule) => schedule.largest_part(),
            Self::Interval(interval) => interval.largest_refill(),
            Self::Window(window) => window.largest_count(),
            Self::Log(_) | Self::Lease(_) | Self::Buckets(_) | Self::Weighted(_) => u64::MAX,
        };
        u32::try_from(largest).is_ok()
    }

    /// The most bytes on the heap that the state of a new key takes once `cost` is charged.
    pub(crate) fn newcomer_bytes(&self, cost: u64) -> usize {
        match self {
            Self::Schedule(_) | Self::Interval(_) | Self::Window(_) => 0,
            Self::Log(log) | Self::Lease(log) => size_of::<LogState>() + log.newcomer_bytes(cost),
            Self::Buckets(buckets) => size_of::<BucketsState>() + buckets.newcomer_bytes(),
            Self::Weighted(_) => size_of::<WeightedState>(),
        }
    }

    /// The most bytes that charging `cost` adds to a state.
    pub(crate) fn growth_bytes(&self, state: &State, cost: u64) -> usize {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.growth_bytes(state, cost)
            }
            _ => 0,
        }
    }

    /// The state of a key that was never seen.
    pub(crate) fn fresh(&self) -> State {
        match self {
            Self::Schedule(_) => State::Schedule(Exact::default()),
            Self::Interval(_) => State::Interval(IntervalState::default()),
            Self::Window(_) => State::Window(WindowState::default()),
            Self::Log(log) => State::Log(Box::new(log.fresh())),
            Self::Lease(log) => State::Lease(Box::new(log.fresh())),
            Self::Buckets(buckets) => State::Buckets(Box::new(buckets.fresh())),
            Self::Weighted(weighted) => State::Weighted(Box::new(weighted.fresh())),
        }
    }

    /// Whether `state` is of this kernel's kind and shape.
    pub(crate) fn knows(&self, state: &State) -> bool {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.knows(state)
            }
            (Self::Buckets(buckets), State::Buckets(state)) => buckets.knows(state),
            (Self::Weighted(weighted), State::Weighted(state)) => weighted.knows(state),
            _ => self.is_kind_of(state),
        }
    }

    /// Whether `state` was left by a kernel of this kind, under whatever numbers.
    pub(crate) fn is_kind_of(&self, state: &State) -> bool {
        matches!(
            (self, state),
            (Self::Schedule(_), State::Schedule(_))
                | (Self::Interval(_), State::Interval(_))
                | (Self::Window(_), State::Window(_))
                | (Self::Log(_), State::Log(_))
                | (Self::Lease(_), State::Lease(_))
                | (Self::Buckets(_), State::Buckets(_))
                | (Self::Weighted(_), State::Weighted(_))
        )
    }

    /// Takes over a state that was left under other numbers: `old` is the kernel that left it, if that is known.
    ///
    /// What has been spent stays spent, and what cannot be told is read as spent. A state that holds more than these numbers allow keeps
    /// it: a denial under them takes nothing from whoever else goes by the others.
    pub(crate) fn adopt(&self, old: Option<&Self>, state: State, now: Timestamp) -> State {
        match (self, state) {
            (Self::Schedule(new), State::Schedule(tat)) => {
                State::Schedule(new.adopt(of_kind!(old, Schedule), tat, now))
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

    /// The parts that deny `cost` now, as bits.
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

    /// Spends `cost`. A cost that was denied fills the state to the brim and no further, so that a client
    /// that hammers stays denied but owes no more than it could ever have spent.
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

    /// Pulls a state back that was left while the clock was ahead: afterwards it is at most as full as that of
    /// a key that was charged to its maximum at `at`. Time was found to go on from `at`.
    ///
    /// A state that no wrong clock has touched stays as it is, unless it holds more than these numbers
    /// allow. Such a state, left under wider limits, comes down to a full one.
    pub(crate) fn clamp(&self, state: &mut State, at: Timestamp) {
        match (self, state) {
            (Self::Schedule(schedule), State::Schedule(tat)) => schedule.clamp(tat, at),
            (Self::Interval(interval), State::Interval(state)) => interval.clamp(state, at),
            (Self::Window(window), State::Window(state)) => window.clamp(state, at),
            (Self::Log(_), State::Log(state)) | (Self::Lease(_), State::Lease(state)) => {
                state.clamp(at);
            }
            (Self::Buckets(_), State::Buckets(state)) => state.clamp(at),
            (Self::Weighted(weighted), State::Weighted(state)) => weighted.clamp(state, at),
            _ => unreachable!("a state is checked with `Kernel::knows` when it is loaded"),
        }
    }

    /// Forgets what decides nothing, of a limit that charges what it denies.
    pub(crate) fn trim(&self, state: &mut State, now: Timestamp) {
        match (self, state) {
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.trim(state, now);
            }
            _ => {}
        }
    }

    /// Gives `units` back, those that were spent last, and never more than count.
    pub(crate) fn refund(&self, state: &mut State, now: Timestamp, units: u64) {
        match (self, state) {
            (Self::Schedule(schedule), State::Schedule(tat)) => schedule.refund(tat, now, units),
            (Self::Interval(interval), State::Interval(state)) => {
                interval.refund(state, now, units);
            }
            (Self::Log(log), State::Log(state)) | (Self::Lease(log), State::Lease(state)) => {
                log.refund(state, now, units);
            }
            (Self::Window(_), State::Window(state)) => state.refund(now, units),
            (Self::Buckets(_), State::Buckets(state)) => state.refund(now, units),
            (Self::Weighted(_), State::Weighted(state)) => state.refund(now, units),
            _ => unreachable!("a state is checked with `Kernel::knows` when it is loaded"),
        }
    }

    /// Where in `state` the charge is that was just made.
    pub(crate) fn mark(state: &State) -> Mark {
        match state {
            State::Schedule(tat) => Mark::Before(*tat),
            State::Interval(state) => Mark::FullAt(state.full_at),
            State::Window(state) => Mark::Ending(state.end),
            State::Log(_) => Mark::Stamped,
            State::Lease(state) => Mark::HeldSince(state.newest()),
            State::Buckets(state) => Mark::Numbered(state.newest),
            State::Weighted(state) => Mark::Numbered(state.index),
        }
    }

    /// Takes up to `units` of a charge out of the state, as much as is still there, and all of a lease. Answers how much time
    /// that was, of a schedule.
    pub(crate) fn give_back(
        &self,
        state: &mut State,
        now: Timestamp,
        place: &Place,
        units: u64,
    ) -> u64 {
        let units = units.min(place.cost);
        match (self, state, place.mark) {
            (Self::Schedule(schedule), State::Schedule(tat), Mark::Before(end)) => {
                return schedule.give_back(tat, now, (place, end), units);
            }
            (Self::Interval(interval), State::Interval(state), Mark::FullAt(full_at)) => {
                interval.give_back(state, now, (place, full_at), units);
            }
            (Self::Window(_), State::Window(state), Mark::Ending(end)) if state.end == end => {
                state.refund(now, units);
            }
            (Self::Log(log), State::Log(state), Mark::Stamped) => {
                log.give_back(state, now, place.at, units);
            }
            (Self::Lease(log), State::Lease(state), Mark::HeldSince(since)) => {
                log.give_back(state, now, since, place.cost);
            }
            (Self::Buckets(_), State::Buckets(state), Mark::Numbered(bucket)) => {
                state.give_back(now, bucket, units);
            }
            (Self::Weighted(_), State::Weighted(state), Mark::Numbered(window)) => {
                state.give_back(now, window, units);
            }
            _ => {}
        }
        0
    }

    /// Lets who has held `units` places since then hold them from now on; false, and nothing has changed, where they were taken
    /// from him and others have them. What holds no places has none to lose.
    pub(crate) fn renew(
        &self,
        state: &mut State,
        now: Timestamp,
        (since, units): (Timestamp, u64),
    ) -> bool {
        match (self, state) {
            (Self::Lease(log), State::Lease(state)) => log.renew(state, now, (since, units)),
            _ => true,
        }
    }

    /// How part `part` stands.
    pub(crate) fn standing(&self, state: &State, now: Timestamp, part: usize) -> Standing {
        dispatch!(
            self,
            state,
            log | k,
            s | k.standing(s, now, part),
            other | k,
            s | k.standing(s, now)
        )
    }

    /// When part `part` would admit `cost`, which it denies now. Of places that is an estimate.
    pub(crate) fn retry(&self, state: &State, now: Timestamp, part: usize, cost: u64) -> Retry {
        if let (Self::Lease(log), State::Lease(state)) = (self, state) {
            return log.hint(state, now, cost);
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

    /// How far the count lies beyond the limit, where it can.
    pub(crate) fn excess(&self, state: &State, now: Timestamp) -> u64 {
        match (self, state) {
            (Self::Window(window), State::Window(state)) => window.excess(state, now),
            _ => 0,
        }
    }

    /// How much more than `longest` a request would have to wait now, whatever it costs.
    pub(crate) fn overlong(&self, state: &State, now: Timestamp, longest: Span) -> Span {
        match (self, state) {
            (Self::Schedule(schedule), State::Schedule(tat)) => {
                schedule.overlong(*tat, now, longest)
            }
            _ => Span::ZERO,
        }
    }

    /// How long the `cost` that was just charged must be held back.
    pub(crate) fn delay(&self, state: &State, now: Timestamp, cost: u64) -> Span {
        match (self, state) {
            (Self::Schedule(schedule), State::Schedule(tat)) => schedule.delay(*tat, now, cost),
            _ => Span::ZERO,
        }
    }
}

impl State {
    /// Moves every instant in the state back by `span`: it is as full at some instant as it was `span` later,
    /// but for sub-windows, whose grid allows whole steps only and which may be newer by up to one.
    pub(crate) fn move_back(&mut self, span: Span) {
        let micros = span.as_micros();
        match self {
            Self::Schedule(tat) => tat.whole = tat.whole.saturating_sub(micros),
            Self::Interval(state) => state.full_at = state.full_at.saturating_sub(micros),
            Self::Window(state) => state.end = state.end.saturating_sub(micros),
            Self::Log(state) | Self::Lease(state) => state.move_back(span),
            Self::Buckets(state) => state.move_back(span),
            Self::Weighted(state) => state.move_back(span),
        }
    }

    /// The instant from which forgetting the state changes nothing.
    pub(crate) fn expires(&self) -> Timestamp {
        match self {
            Self::Schedule(tat) => tat.ceil(),
            Self::Interval(state) => state.full_at(),
            Self::Window(state) => state.end(),
            Self::Log(state) | Self::Lease(state) => state.expires(),
            Self::Buckets(state) => state.expires(),
            Self::Weighted(state) => state.expires(),
        }
    }

    /// Bytes that the state holds on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Self::Schedule(_) | Self::Interval(_) | Self::Window(_) => 0,
            Self::Log(state) | Self::Lease(state) => size_of::<LogState>() + state.heap_bytes(),
            Self::Buckets(state) => size_of::<BucketsState>() + state.heap_bytes(),
            Self::Weighted(_) => size_of::<WeightedState>(),
        }
    }

    /// Bytes that a log may grow by when it is taken over by other limits and charged.
    pub(crate) fn log_growth_bytes(&self) -> usize {
        if let Self::Log(state) | Self::Lease(state) = self {
            state.growth_bytes(bounds::MAX_LOG_LIMIT)
        } else {
            0
        }
    }
}
