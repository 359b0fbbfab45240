//! Support for stores that keep and charge their states remotely, such as in Redis.
//!
//! Such a store sends [`numbers`] to the remote side, where a few additions and comparisons decide.
//! The reply contains the state before the decision. A [`Replay`] repeats the decision on that
//! state with the same algorithms that the memory store uses, so every number that a caller sees is
//! computed here.
//!
//! ```text
//!   numbers(limits, cost) ──▶  remote: admit or deny, charge, keep  ──▶  state before, now
//!                                                                              │
//!   outcomes, in order  ◀── Replay::report ◀── apply ◀── evaluate ◀── open ◀────┘
//! ```

use crate::{
    algorithm::{
        BucketsState, IntervalState, LogState, Outcome, RetryAfter, Stamp, State, WeightedState,
        WindowState,
    },
    eval::{Charge, Cost, Effect, Evaluation, KeyState, Limits},
    time::{Span, Timestamp},
};
pub use crate::{
    algorithm::{Exact, Numbers, Terms},
    eval::DenialCounting,
    time::CLOCK_JUMP,
};

/// The parameters of one group of limits, and how denied requests are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupNumbers<'l> {
    /// The parameters of the limits.
    pub numbers: Numbers<'l>,
    /// How a denied request affects the count.
    pub denials: DenialCounting,
}

/// Returns the terms (units) of the states of `limits`, one for each group of limits that share a
/// state, in the order of [`numbers`].
pub fn terms(limits: &Limits) -> impl ExactSizeIterator<Item = Terms> {
    limits.groups().iter().map(|group| group.kernel.terms())
}

/// Returns the parameters of each group of `limits` at `cost`. The order is the same for all limits
/// with the same [`terms`].
pub fn numbers(limits: &Limits, cost: Cost) -> impl ExactSizeIterator<Item = GroupNumbers<'_>> {
    limits.groups().iter().map(move |group| GroupNumbers {
        numbers: group.kernel.numbers(cost.units()),
        denials: group.denials,
    })
}

/// Returns a 28-bit digest of `limits`. Limits that decide differently have different digests,
/// except for rare collisions. The digest of the same limits is the same in every process.
#[must_use]
pub fn fingerprint(limits: &Limits) -> u32 {
    limits.numbers_fingerprint()
}

/// The state of one group of limits for one key as plain numbers. Instants are in microseconds
/// since the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteState {
    /// The theoretical arrival time.
    Gcra(Exact),
    /// A bucket that is refilled by intervals.
    Interval {
        /// When the bucket is full again.
        full_at: u64,
        /// The number of tokens that the last refill returns.
        last: u64,
    },
    /// A window.
    Window {
        /// The units spent in the window.
        count: u64,
        /// When the window ends.
        end: u64,
    },
    /// Two windows: the previous window and the current window.
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
    evaluation: Evaluation<'a>,
    /// The limits whose state exceeds the limit, so that the conversion of the state loses spent
    /// units. With each limit: the time until the original state would admit the cost.
    inexact: Vec<(usize, RetryAfter)>,
}

impl<'a> Replay<'a> {
    /// Starts with the state that was found for the charge's key: one state for each group of
    /// limits, each with its terms, or `None` for an unknown key. A state in other terms is
    /// converted as of `now`. A refund is applied here.
    #[must_use]
    pub fn open(
        charge: &Charge<'a>,
        states: Option<Vec<(Terms, RemoteState)>>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let limits = charge.limits;
        let (key_state, inexact) = match states {
            None => (limits.fresh(), Vec::new()),
            Some(states) => {
                let (terms, states): (Vec<Terms>, Vec<State>) = states
                    .into_iter()
                    .map(|(terms, state)| (terms, State::from(state)))
                    .unzip();
                limits.convert(
                    KeyState::from_states(states),
                    &terms,
                    now,
                    charge.cost.units(),
                )
            }
        };
        Self {
            evaluation: Evaluation::open(charge, key_state, now, effect),
            inexact,
        }
    }

    /// Starts with a state that was written by a clock ahead of `now`: the state is converted and
    /// then clamped. Afterwards, no limit has more units spent than a limit that was charged to its
    /// maximum at `now`. Apart from this maximum, no limit has fewer units spent than in the
    /// original state.
    #[must_use]
    pub fn open_clamped(
        charge: &Charge<'a>,
        states: Vec<(Terms, RemoteState)>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let (terms, states): (Vec<Terms>, Vec<State>) = states
            .into_iter()
            .map(|(terms, state)| (terms, State::from(state)))
            .unzip();
        let (key_state, limits) = (KeyState::from_states(states), charge.limits);
        let (mut key_state, _) = limits.convert(key_state, &terms, now, charge.cost.units());
        limits.clamp(&mut key_state, now);
        Self {
            evaluation: Evaluation::open(charge, key_state, now, effect),
            inexact: Vec::new(),
        }
    }

    /// Returns true if the states needed no conversion or were converted without loss.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.inexact.is_empty()
    }

    /// Returns the limits, by index in the rule, whose state was not converted exactly because the
    /// state exceeds the limit. The second value is the time until the original state would admit
    /// the cost.
    #[must_use]
    pub fn inexact(&self) -> &[(usize, RetryAfter)] {
        &self.inexact
    }

    /// Evaluates the limits. Returns true if the limits admit the request; the limits of a shadow
    /// rule always admit it.
    pub fn evaluate(&mut self, now: Timestamp) -> bool {
        self.evaluation.evaluate(now)
    }

    /// Charges the cost. `admitted` is the decision on the request as a whole.
    pub fn apply(&mut self, admitted: bool, now: Timestamp) {
        self.evaluation.apply(admitted, now);
    }

    /// Appends the outcome of every limit.
    pub fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        self.evaluation.report(now, outcomes);
    }

    /// Returns the current states, one for each group of limits, and the instant from which the
    /// states can be dropped without changing any decision.
    #[must_use]
    pub fn states(&self) -> (Vec<RemoteState>, Timestamp) {
        let states = self
            .evaluation
            .key_state
            .states()
            .iter()
            .map(RemoteState::from)
            .collect();
        (states, self.evaluation.key_state.expires())
    }
}

/// Returns the instant from which these states can be dropped without changing any decision.
#[must_use]
pub fn expires(states: &[RemoteState]) -> Timestamp {
    let states = states.iter().cloned().map(State::from);
    states
        .map(|state| state.expires())
        .max()
        .unwrap_or_default()
}

impl From<RemoteState> for State {
    fn from(state: RemoteState) -> Self {
        match state {
            RemoteState::Gcra(tat) => Self::Gcra(tat),
            RemoteState::Interval { full_at, last } => {
                Self::Interval(IntervalState { full_at, last })
            }
            RemoteState::Window { count, end } => Self::Window(WindowState { count, end }),
            RemoteState::Weighted {
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
            RemoteState::Buckets {
                newest,
                width,
                counts,
            } => Self::Buckets(Box::new(BucketsState::from_counts(newest, width, &counts))),
            RemoteState::Log { longest, stamps } => Self::Log(log_of(longest, stamps)),
            RemoteState::Lease { longest, stamps } => Self::Lease(log_of(longest, stamps)),
        }
    }
}

fn log_of(longest: u64, stamps: Vec<(u64, u64)>) -> Box<LogState> {
    let stamps = stamps.into_iter().map(|(at, cost)| Stamp::of(at, cost));
    let longest = Span::from_micros(longest);
    Box::new(LogState::from_stamps(stamps.collect(), longest))
}

impl From<&State> for RemoteState {
    fn from(state: &State) -> Self {
        match state {
            State::Gcra(tat) => Self::Gcra(*tat),
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
