//! Support for stores that keep and charge their states remotely, such as in Redis.
//!
//! Such a store sends [`numbers`] to the remote side, where a few additions and comparisons decide.
//! The reply contains the state before the decision. A [`Replay`] repeats the decision on that
//! state with the same kernels that the memory store uses, so every number that a caller sees is
//! computed here.
//!
//! ```text
//!   numbers(limits, cost) ──▶  remote: admit or deny, charge, keep  ──▶  state before, now
//!                                                                              │
//!   outcomes, in order  ◀──  Replay::report  ◀──  settle  ◀──  ask  ◀──  open ◀┘
//! ```

use crate::{
    cell::Cell,
    charge::{Charge, Cost, Effect},
    digest::Digest,
    kernel::{BucketsState, IntervalState, LogState, Stamp, State, WeightedState, WindowState},
    limit::Window,
    limits::Limits,
    outcome::{Outcome, Retry},
    question::Question,
    time::{Span, Timestamp},
};
pub use crate::{kernel::Exact, member::Denials, time::JUMP};

/// The precomputed numbers of one kernel at one cost. With them a decision needs only additions,
/// carries and comparisons. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Numbers<'l> {
    /// A theoretical arrival time (GCRA).
    Schedule {
        /// The number of parts of one microsecond.
        fraction: u64,
        /// The cost as a duration; `None` if it can never fit.
        lasting: Option<Exact>,
        /// How far the arrival time may be ahead of the clock.
        tau: Exact,
        /// Whether admitted requests are delayed. Their start times are already known to them, so
        /// they cannot be moved forward.
        queue: bool,
    },
    /// Tokens that return together at the end of an interval.
    Interval {
        /// The number of tokens that one interval returns.
        refill: u64,
        /// The length of an interval.
        every: u64,
        /// The maximum number of tokens.
        capacity: u64,
    },
    /// A count that restarts with each window.
    Window {
        /// The maximum that is admitted in one window.
        limit: u64,
        /// The maximum that is counted in one window; it exceeds `limit` if denied requests are
        /// counted in full.
        most: u64,
        /// The start and the length of the windows.
        grid: &'l Window,
    },
    /// Two windows, weighted by overlap.
    Weighted {
        /// The maximum of the weighted sum.
        limit: u64,
        /// The length of a window.
        window: u64,
    },
    /// Sub-windows.
    Buckets {
        /// The maximum sum of the sub-windows that are added up.
        limit: u64,
        /// The length of a sub-window.
        width: u64,
        /// The number of sub-windows that are added up.
        summed: usize,
    },
    /// The instants of admitted requests.
    Log {
        /// For each window its maximum and its length.
        windows: Vec<(u64, Span)>,
    },
    /// The start times of held concurrency slots: a log with one window.
    Lease {
        /// The maximum number of slots in use.
        limit: u64,
        /// The lease: how long a slot is held without renewal.
        lease: Span,
    },
}

/// The numbers of one kernel, and how denied requests are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'l> {
    /// The kernel's numbers.
    pub numbers: Numbers<'l>,
    /// How a denied request affects the count.
    pub denials: Denials,
}

/// The unit in which a kernel's state is counted. A state that was left in other terms has to be
/// converted. A state that was left in the same terms has the same meaning under any limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Terms {
    /// One unit takes `numerator / denominator` microseconds, in lowest terms.
    Schedule {
        /// At least 1.
        numerator: u64,
        /// At least 1.
        denominator: u64,
    },
    /// Tokens that return together at the end of an interval.
    Interval {
        /// The number of tokens that one interval returns, at least 1.
        refill: u64,
        /// The length of an interval in microseconds, at least 1.
        every: u64,
    },
    /// Windows that start with the first request of a key.
    FirstRequest {
        /// The length of a window in microseconds, at least 1.
        window: u64,
    },
    /// All other kernels: the state itself contains what a conversion needs, and a digest
    /// distinguishes terms.
    Digest(u32),
}

impl Terms {
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        match *self {
            Self::Schedule {
                numerator,
                denominator,
            } => digest.numbers(&[0, numerator, denominator]),
            Self::Interval { refill, every } => digest.numbers(&[1, refill, every]),
            Self::FirstRequest { window } => digest.numbers(&[2, window]),
            Self::Digest(other) => digest.numbers(&[3, other.into()]),
        }
    }
}

/// Returns the terms of the states of `limits`, one for each kernel, in the order of [`numbers`].
pub fn terms(limits: &Limits) -> impl ExactSizeIterator<Item = Terms> {
    limits.members().iter().map(|member| member.kernel.terms())
}

/// Returns the kernels of `limits` at `cost`. The order is the same for all limits with the same
/// [`terms`].
pub fn numbers(limits: &Limits, cost: Cost) -> impl ExactSizeIterator<Item = Member<'_>> {
    limits.members().iter().map(move |member| Member {
        numbers: member.kernel.numbers(cost.units()),
        denials: member.denials,
    })
}

/// Returns a 28-bit number that almost certainly differs between limits that decide differently. It
/// is the same in every process.
#[must_use]
pub fn fingerprint(limits: &Limits) -> u32 {
    limits.numbers_fingerprint()
}

/// The state of one kernel for one key as plain numbers. Instants are in microseconds since the
/// epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Held {
    /// The theoretical arrival time.
    Schedule(Exact),
    /// A bucket that is refilled by intervals.
    Interval {
        /// When the bucket is full again.
        full_at: u64,
        /// The number of tokens that the last refill returns.
        last: u64,
    },
    /// A window.
    Window {
        /// The units spent in it.
        count: u64,
        /// When it ends.
        end: u64,
    },
    /// Two windows, the previous and the current one.
    Weighted {
        /// The index of the current window since the epoch.
        index: u64,
        /// The units spent in the previous window.
        previous: u64,
        /// The units spent in the current window.
        current: u64,
        /// The length of a window.
        window: u64,
    },
    /// Sub-windows.
    Buckets {
        /// The index of the newest sub-window since the epoch.
        newest: u64,
        /// The length of a sub-window.
        width: u64,
        /// The units spent in each sub-window, the newest last.
        counts: Vec<u64>,
    },
    /// The admitted requests.
    Log {
        /// The longest window with which the log was last used.
        longest: u64,
        /// Instants and costs, oldest first. A cost is at most 2,047.
        stamps: Vec<(u64, u64)>,
    },
    /// The held concurrency slots.
    Lease {
        /// The lease: how long a slot is held without renewal.
        longest: u64,
        /// Instants and costs, oldest first. A cost is at most 2,047.
        stamps: Vec<(u64, u64)>,
    },
}

/// One charge, evaluated again on the state that a remote store returned. The steps and their order
/// are the same as in the memory store.
#[derive(Debug)]
pub struct Replay<'a> {
    question: Question<'a>,
    /// The limits whose state exceeds them and loses information when it is converted. For each of
    /// them, the time until the original state would admit the cost.
    inexact: Vec<(usize, Retry)>,
}

impl<'a> Replay<'a> {
    /// Starts with the state that is `held` for the charge's key: one state for each kernel, each
    /// with its terms, or `None` for an unknown key. A state in other terms is converted as of
    /// `now`. A refund is applied here.
    #[must_use]
    pub fn open(
        charge: &Charge<'a>,
        held: Option<Vec<(Terms, Held)>>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let limits = charge.limits;
        let (cell, inexact) = match held {
            None => (limits.fresh(), Vec::new()),
            Some(held) => {
                let (terms, states): (Vec<Terms>, Vec<State>) = held
                    .into_iter()
                    .map(|(terms, held)| (terms, State::from(held)))
                    .unzip();
                limits.convert(
                    (Cell::from_states(states), &terms),
                    now,
                    charge.cost.units(),
                )
            }
        };
        Self {
            question: Question::open(charge, cell, now, effect),
            inexact,
        }
    }

    /// Starts with a state that was written by a clock ahead of `now`: the state is converted and
    /// then clamped. Then no limit has more spent than one that was charged to its maximum at `now`,
    /// and none has less spent than the state said.
    #[must_use]
    pub fn open_clamped(
        charge: &Charge<'a>,
        held: Vec<(Terms, Held)>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let (terms, states): (Vec<Terms>, Vec<State>) = held
            .into_iter()
            .map(|(terms, held)| (terms, State::from(held)))
            .unzip();
        let (cell, limits) = (Cell::from_states(states), charge.limits);
        let (mut cell, _) = limits.convert((cell, &terms), now, charge.cost.units());
        limits.clamp(&mut cell, now);
        Self {
            question: Question::open(charge, cell, now, effect),
            inexact: Vec::new(),
        }
    }

    /// Returns true if the states needed no conversion or were converted without loss.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.inexact.is_empty()
    }

    /// Returns the limits, by index in the rule, whose state was not converted exactly because it
    /// exceeds them. The second value is the time until the original state would admit the cost.
    #[must_use]
    pub fn inexact(&self) -> &[(usize, Retry)] {
        &self.inexact
    }

    /// Evaluates the limits. Returns true if they admit the request; the limits of a shadow rule
    /// always do.
    pub fn ask(&mut self, now: Timestamp) -> bool {
        self.question.ask(now)
    }

    /// Charges the cost, given whether the request as a whole is `admitted`.
    pub fn settle(&mut self, admitted: bool, now: Timestamp) {
        self.question.settle(admitted, now);
    }

    /// Appends the outcome of every limit.
    pub fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        self.question.report(now, outcomes);
    }

    /// Returns the current states, one for each kernel, and the instant from which they can be
    /// dropped without changing any decision.
    #[must_use]
    pub fn held(&self) -> (Vec<Held>, Timestamp) {
        let states = self.question.cell.states().iter().map(Held::from).collect();
        (states, self.question.cell.expires())
    }
}

/// Returns the instant from which these states can be dropped without changing any decision.
#[must_use]
pub fn expires(held: &[Held]) -> Timestamp {
    let states = held.iter().cloned().map(State::from);
    states
        .map(|state| state.expires())
        .max()
        .unwrap_or_default()
}

impl From<Held> for State {
    fn from(held: Held) -> Self {
        match held {
            Held::Schedule(tat) => Self::Schedule(tat),
            Held::Interval { full_at, last } => Self::Interval(IntervalState { full_at, last }),
            Held::Window { count, end } => Self::Window(WindowState { count, end }),
            Held::Weighted {
                index,
                previous,
                current,
                window,
            } => Self::Weighted(Box::new(WeightedState {
                index,
                previous,
                current,
                window: window.max(1),
            })),
            Held::Buckets {
                newest,
                width,
                counts,
            } => Self::Buckets(Box::new(BucketsState::from_counts(newest, width, &counts))),
            Held::Log { longest, stamps } => Self::Log(log_of(longest, stamps)),
            Held::Lease { longest, stamps } => Self::Lease(log_of(longest, stamps)),
        }
    }
}

fn log_of(longest: u64, stamps: Vec<(u64, u64)>) -> Box<LogState> {
    let stamps = stamps.into_iter().map(|(at, cost)| Stamp::of(at, cost));
    let longest = Span::from_micros(longest);
    Box::new(LogState::from_stamps(stamps.collect(), longest))
}

impl From<&State> for Held {
    fn from(state: &State) -> Self {
        match state {
            State::Schedule(tat) => Self::Schedule(*tat),
            State::Interval(state) => Self::Interval {
                full_at: state.full_at,
                last: state.last,
            },
            State::Window(state) => Self::Window {
                count: state.count,
                end: state.end,
            },
            State::Weighted(state) => Self::Weighted {
                index: state.index,
                previous: state.previous,
                current: state.current,
                window: state.window,
            },
            State::Buckets(state) => Self::Buckets {
                newest: state.newest,
                width: state.width,
                counts: state.oldest_first().collect(),
            },
            State::Log(state) => Self::Log {
                longest: state.longest().as_micros(),
                stamps: state.stamps().map(Stamp::parts).collect(),
            },
            State::Lease(state) => Self::Lease {
                longest: state.longest().as_micros(),
                stamps: state.stamps().map(Stamp::parts).collect(),
            },
        }
    }
}
