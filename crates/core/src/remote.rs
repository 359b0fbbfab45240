//! What a store needs that keeps its states, and charges them, somewhere else: inside Redis, say.
//!
//! Such a store sends [`numbers`] away, where a few additions and comparisons decide. What comes back is the state
//! from before, and a [`Replay`] makes the same decision on it once more, with the kernels that decide
//! everywhere: every number that a caller sees is computed here.
//!
//! ```text
//!   numbers(limits, cost) ──▶  the store: admits or not, charges, keeps  ──▶  state before, now
//!                                                                                    │
//!   outcomes, field by field  ◀──  Replay::report  ◀──  settle  ◀──  ask  ◀──  open ◀┘
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
pub use crate::{kernel::Exact, member::Denials};

/// The numbers of one kernel at one cost, multiplied out: who has them needs only to add, carry and compare.
/// Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Numbers<'l> {
    /// A theoretical arrival time.
    Schedule {
        /// A microsecond has so many parts.
        fraction: u64,
        /// How long the cost lasts; `None` if it never fits.
        lasting: Option<Exact>,
        /// How far the arrival time may lie ahead of the clock.
        tau: Exact,
        /// Whether what is admitted is told when it starts, and so cannot be moved forward.
        queue: bool,
    },
    /// Tokens that come back an interval's worth at once.
    Interval {
        /// What an interval brings.
        refill: u64,
        /// How long it is.
        every: u64,
        /// The most tokens.
        capacity: u64,
    },
    /// A count that starts again with each window.
    Window {
        /// The most in one window.
        limit: u64,
        /// The most that is counted in one.
        most: u64,
        /// Where windows begin and end.
        grid: &'l Window,
    },
    /// Two windows, weighted.
    Weighted {
        /// The most.
        limit: u64,
        /// The length of a window.
        window: u64,
    },
    /// Sub-windows.
    Buckets {
        /// The most in those that are summed.
        limit: u64,
        /// The length of a bucket.
        width: u64,
        /// How many are summed.
        summed: usize,
    },
    /// The instants of what was admitted.
    Log {
        /// The most in each window, and how long that is.
        windows: Vec<(u64, Span)>,
    },
    /// The instants of those who hold a place: a log of one window.
    Lease {
        /// The most at once.
        limit: u64,
        /// How long a place is held at most.
        lease: Span,
    },
}

/// The numbers of a kernel, and how it is charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'l> {
    /// The kernel's numbers.
    pub numbers: Numbers<'l>,
    /// What becomes of its count when the request is denied.
    pub denials: Denials,
}

/// What the state of a kernel is counted in. A state that was left in other terms has to be converted; one that was left in the
/// same terms means the same under any limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Terms {
    /// One unit lasts `numerator / denominator` microseconds, in lowest terms.
    Schedule {
        /// At least 1.
        numerator: u64,
        /// At least 1.
        denominator: u64,
    },
    /// Tokens that come back an interval's worth at once.
    Interval {
        /// What an interval brings, at least 1.
        refill: u64,
        /// How many microseconds it has, at least 1.
        every: u64,
    },
    /// Windows that begin with the first request.
    FirstRequest {
        /// How many microseconds one has, at least 1.
        window: u64,
    },
    /// All else: the state holds what a conversion needs, and a digest tells terms apart.
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

/// What the states of `limits` are counted in, one a kernel, in the order of [`numbers`].
pub fn terms(limits: &Limits) -> impl ExactSizeIterator<Item = Terms> {
    limits.members().iter().map(|member| member.kernel.terms())
}

/// The kernels of `limits`, at `cost`, in an order that never changes under the same [`terms`].
pub fn numbers(limits: &Limits, cost: Cost) -> impl ExactSizeIterator<Item = Member<'_>> {
    limits.members().iter().map(move |member| Member {
        numbers: member.kernel.numbers(cost.units()),
        denials: member.denials,
    })
}

/// A number of 28 bits that differs, almost surely, between limits that decide differently, and not between processes.
#[must_use]
pub fn fingerprint(limits: &Limits) -> u32 {
    limits.numbers_fingerprint()
}

/// What a kernel remembers of a key, in plain numbers; instants are in microseconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Held {
    /// The theoretical arrival time.
    Schedule(Exact),
    /// A bucket that is refilled by intervals.
    Interval {
        /// When it is full again.
        full_at: u64,
        /// What the last refill brings.
        last: u64,
    },
    /// A window.
    Window {
        /// What was spent in it.
        count: u64,
        /// When it ends.
        end: u64,
    },
    /// Two windows.
    Weighted {
        /// The number of the current window since the epoch.
        index: u64,
        /// What was spent in the one before.
        previous: u64,
        /// What was spent in this one.
        current: u64,
        /// The length of a window.
        window: u64,
    },
    /// Sub-windows.
    Buckets {
        /// The number of the newest since the epoch.
        newest: u64,
        /// The length of one.
        width: u64,
        /// What was spent in each, the newest last.
        counts: Vec<u64>,
    },
    /// What was admitted.
    Log {
        /// The longest window that the log was last used with.
        longest: u64,
        /// Instants and costs, oldest first; one cost is at most 2,047.
        stamps: Vec<(u64, u64)>,
    },
    /// Who holds a place.
    Lease {
        /// How long a place is held at most.
        longest: u64,
        /// Instants and costs, oldest first; one cost is at most 2,047.
        stamps: Vec<(u64, u64)>,
    },
}

/// One charge, decided again on the state that a store elsewhere found: the same questions in the same order
/// as in the memory store.
#[derive(Debug)]
pub struct Replay<'a> {
    question: Question<'a>,
    /// The limits whose state holds more than they allow and loses some of it when it is converted, each with the time
    /// until it would be admitted by the state as it was left.
    inexact: Vec<(usize, Retry)>,
}

impl<'a> Replay<'a> {
    /// Begins with what is `held` of the charge's key, one state a kernel, each with the terms that it was left in; `None` for a key
    /// that is not known. A state left in other terms is converted as of `now`, and what is to be given back is.
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

    /// Whether the states were converted without loss, or needed no conversion.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.inexact.is_empty()
    }

    /// The limits whose state holds more than they allow, by their index in the rule, each with the time until the cost is admitted
    /// while the state stays as it was left.
    #[must_use]
    pub fn inexact(&self) -> &[(usize, Retry)] {
        &self.inexact
    }

    /// Asks the limits; true if they let the request pass, as those of a shadow rule always do.
    pub fn ask(&mut self, now: Timestamp) -> bool {
        self.question.ask(now)
    }

    /// Spends what is to be spent, given whether the request as a whole is `admitted`.
    pub fn settle(&mut self, admitted: bool, now: Timestamp) {
        self.question.settle(admitted, now);
    }

    /// Appends what every limit answers.
    pub fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        self.question.report(now, outcomes);
    }

    /// The states as they are now, one a kernel, and the instant from which forgetting them changes nothing.
    #[must_use]
    pub fn held(&self) -> (Vec<Held>, Timestamp) {
        let states = self.question.cell.states().iter().map(Held::from).collect();
        (states, self.question.cell.expires())
    }
}

/// The instant from which forgetting these states changes nothing.
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
