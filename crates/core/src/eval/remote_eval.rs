//! Support for stores that keep the states of keys in a remote database such as Redis.
//!
//! A remote store sends the parameters of the limits ([`numbers`]) to the database. The database
//! decides with a few additions and comparisons, and replies with the state before the decision. A
//! [`Replay`] repeats the decision on the returned state with the memory store's algorithms.
//! Therefore, this process and not the database computes all numbers that are reported to a caller.
//!
//! ```text
//!   numbers(limits, cost) ──▶  remote: admit or deny, charge, keep  ──▶  state before, now
//!                                                                              │
//!   outcomes, in order  ◀── Replay::report ◀── apply ◀── evaluate ◀── open ◀────┘
//! ```

use crate::{
    algorithm::{
        BucketsState, IntervalState, KernelState, LogState, Outcome, Stamp, WeightedState,
        WindowState,
    },
    eval::{Charge, Cost, Effect, Evaluation, KeyState, Limits},
    time::{Span, Timestamp},
};
pub use crate::{
    algorithm::{ExactMicros, Numbers, Terms},
    eval::{DenialCounting, DrainTimes},
    time::CLOCK_JUMP,
};

/// The parameters of a limit group, and how denied requests are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupNumbers<'l> {
    /// The precomputed parameters of the limits.
    pub numbers: Numbers<'l>,
    /// How a denied request affects the count of the limits.
    pub denials: DenialCounting,
}

/// Returns the units of measure ([`Terms`]) of the states of `limits`, for each group of limits
/// that share a state. [`numbers`] returns the groups in the same order.
pub fn terms(limits: &Limits) -> impl ExactSizeIterator<Item = Terms> {
    limits.groups().iter().map(|group| group.kernel.terms())
}

/// Returns the parameters for a request of `cost`, for each group of `limits` that share a state.
/// Two rules whose limits have the same [`terms`] have their groups in the same order.
pub fn numbers(limits: &Limits, cost: Cost) -> impl ExactSizeIterator<Item = GroupNumbers<'_>> {
    limits.groups().iter().map(move |group| GroupNumbers {
        numbers: group.kernel.numbers(cost.units()),
        denials: group.denials,
    })
}

/// Returns a 28-bit digest of `limits`. Limits that can lead to different decisions have different
/// digests, except for rare collisions. Equal limits have the same digest in every process.
#[must_use]
pub fn parameters_digest(limits: &Limits) -> u32 {
    limits.parameters_digest()
}

/// The state of a key for one limit group, as plain numbers. Instants are in microseconds since the
/// epoch, and durations are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteState {
    /// GCRA: the theoretical arrival time.
    Gcra(ExactMicros),
    /// A token bucket refilled at intervals.
    Interval {
        /// The instant at which the bucket is full again.
        full_at: u64,
        /// The number of tokens added by the refill at `full_at`.
        last: u64,
    },
    /// A fixed window.
    Window {
        /// The units spent in the window.
        count: u64,
        /// The instant at which the window ends.
        end: u64,
    },
    /// A sliding window counter over two fixed windows: the previous window and the current window.
    Weighted {
        /// The index of the current window, counted from the epoch.
        index: u64,
        /// The units spent in the previous window.
        previous: u64,
        /// The units spent in the current window.
        current: u64,
        /// The length of a window.
        window: u64,
    },
    /// A sliding window counter with sub-windows.
    Buckets {
        /// The index of the newest sub-window, counted from the epoch.
        newest: u64,
        /// The length of a sub-window.
        width: u64,
        /// The units spent in each sub-window, oldest first.
        counts: Vec<u64>,
    },
    /// A sliding window log: the admitted requests.
    Log {
        /// The length of the longest window when the log was last used.
        longest: u64,
        /// The instant and the cost of each entry, oldest first. The cost of an entry is at most
        /// 2,047.
        stamps: Vec<(u64, u64)>,
    },
    /// The held concurrency slots.
    Lease {
        /// The lease: how long a slot stays held without a renewal.
        longest: u64,
        /// The instant and the cost of each entry, oldest first. The cost of an entry is at most
        /// 2,047.
        stamps: Vec<(u64, u64)>,
    },
}

/// A second evaluation of a charge, on the state returned by a remote store. The replay and the
/// memory store take the same steps in the same order.
#[derive(Debug)]
pub struct Replay<'a> {
    evaluation: Evaluation<'a>,
    /// If the conversion of the state lost spent units, the times after which the unconverted state
    /// has drained; otherwise empty.
    drain_times: DrainTimes,
}

impl<'a> Replay<'a> {
    /// Starts with `states`, the key's state returned by the remote store: one state with its
    /// [`Terms`] for each limit group, or `None` for an unknown key. A state written in other terms
    /// is converted at `now`. If the effect is a refund, the refund is applied to the state.
    #[must_use]
    pub fn open(
        charge: &Charge<'a>,
        states: Option<Vec<(Terms, RemoteState)>>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let limits = charge.limits;
        let (key_state, drain_times) = match states {
            None => (limits.fresh(), DrainTimes::default()),
            Some(states) => {
                let (terms, states): (Vec<Terms>, Vec<KernelState>) = states
                    .into_iter()
                    .map(|(terms, state)| (terms, KernelState::from(state)))
                    .unzip();
                limits.convert(
                    KeyState::from_states(states),
                    &terms,
                    now,
                    charge.cost.units(),
                )
            }
        };
        // The state with the refund then replaces the former state.
        let drain_times = match effect {
            Effect::Refund => DrainTimes::default(),
            _ => drain_times,
        };
        Self {
            evaluation: Evaluation::open(charge, key_state, now, effect),
            drain_times,
        }
    }

    /// Starts with a state that was written while the clock was ahead of `now`: converts the state
    /// and then clamps it. After clamping, each limit has at most as many spent units as if it had
    /// been exhausted at `now`. A smaller number of spent units is left unchanged.
    #[must_use]
    pub fn open_clamped(
        charge: &Charge<'a>,
        states: Vec<(Terms, RemoteState)>,
        now: Timestamp,
        effect: Effect,
    ) -> Self {
        let (terms, states): (Vec<Terms>, Vec<KernelState>) = states
            .into_iter()
            .map(|(terms, state)| (terms, KernelState::from(state)))
            .unzip();
        let (key_state, limits) = (KeyState::from_states(states), charge.limits);
        let (mut key_state, _) = limits.convert(key_state, &terms, now, charge.cost.units());
        limits.clamp(&mut key_state, now);
        Self {
            evaluation: Evaluation::open(charge, key_state, now, effect),
            drain_times: DrainTimes::default(),
        }
    }

    /// Returns true if the states did not have to be converted or were converted without loss.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.drain_times.is_empty()
    }

    /// Evaluates the limits. Returns true if the limits admit the request. In shadow mode, the
    /// limits always admit the request.
    pub fn evaluate(&mut self, now: Timestamp) -> bool {
        self.evaluation.evaluate(now)
    }

    /// Charges the cost, given the decision on the whole request (`admitted`).
    pub fn apply(&mut self, admitted: bool, now: Timestamp) {
        self.evaluation.apply(admitted, now);
    }

    /// Appends the outcome of every limit of the charge to `outcomes`.
    pub fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) {
        let first = outcomes.len();
        self.evaluation.report(now, outcomes);
        self.drain_times.correct(&mut outcomes[first..]);
    }

    /// Returns the times after which the unconverted state has drained.
    #[must_use]
    pub fn drain_times(&self) -> &DrainTimes {
        &self.drain_times
    }

    /// Returns the current states, one for each limit group, and when they expire. After the states
    /// expire, they can be dropped without changing any decision.
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

/// Returns when these states expire. After the states expire, they can be dropped without changing
/// any decision.
#[must_use]
pub fn expires(states: &[RemoteState]) -> Timestamp {
    let states = states.iter().cloned().map(KernelState::from);
    states
        .map(|state| state.expires())
        .max()
        .unwrap_or_default()
}

impl From<RemoteState> for KernelState {
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

impl From<&KernelState> for RemoteState {
    fn from(state: &KernelState) -> Self {
        match state {
            KernelState::Gcra(tat) => Self::Gcra(*tat),
            KernelState::Interval(state) => Self::Interval {
                full_at: state.full_at,
                last: state.last,
            },
            KernelState::Window(state) => Self::Window {
                count: state.count,
                end: state.end,
            },
            KernelState::Weighted(state) => Self::Weighted {
                index: state.index,
                previous: state.previous,
                current: state.current,
                window: state.window,
            },
            KernelState::Buckets(state) => Self::Buckets {
                newest: state.newest,
                width: state.width,
                counts: state.oldest_first().collect(),
            },
            KernelState::Log(state) => Self::Log {
                longest: state.longest().as_micros(),
                stamps: state.stamps().map(Stamp::parts).collect(),
            },
            KernelState::Lease(state) => Self::Lease {
                longest: state.longest().as_micros(),
                stamps: state.stamps().map(Stamp::parts).collect(),
            },
        }
    }
}
