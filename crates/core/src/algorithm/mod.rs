//! The implementations of the algorithms (*kernels*), as pure functions of state, time and cost.
//!
//! Each variant of [`Algorithm`](crate::Algorithm) is implemented by one of seven kernels. A kernel
//! answers four questions about its own state. All computation on states is in this module:
//!
//! - Is this cost *denied* now?
//! - What is the state after this cost is *charged*?
//! - How much *remains*, when is the whole limit available again, and when would this cost be
//!   admitted?
//! - When does the state *expire*, so that forgetting it changes no decision?
//!
//! To add a kernel, implement [`Counter`] in a file of its own and add a line to the table at the
//! end of this file.
//!
//! For a kernel, time never runs backwards: the store passes the latest instant that it has seen.
//!
//! The documentation of each kernel states what it guarantees under **Promise**. There, `L`, `B`
//! and the capacity include the soft allowance, as in
//! [`Limit::hard_quota`](crate::limit::Limit::hard_quota). The guarantees hold for charges. They do
//! not hold if a caller requests an [`Effect::Refund`](crate::Effect::Refund), so such a caller
//! must be trusted. **Memory** is the size of the kernel's state. The store adds an entry of 48
//! bytes, which can hold 16 bytes of state inline.

mod charge_position;
mod compile;
mod counter;
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
    counter::{Counter, CounterState, is_instant},
    fixed_window::{FixedWindow, WindowState},
    gcra::{Gcra, gcd, narrow},
    interval_bucket::{Interval, IntervalState},
    sliding_buckets::{Buckets, BucketsState},
    sliding_log::{Lease, Log, LogState, Stamp},
    sliding_weighted::{Weighted, WeightedState},
};

pub use self::{
    gcra::Exact,
    numbers::{Numbers, Terms},
    outcome::{Outcome, RetryAfter},
};
use crate::time::{Span, Timestamp};

/// The status of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitStatus {
    /// The maximum cost that would be admitted now.
    pub(crate) remaining: u64,
    /// The time until the state expires. From then on, the key is decided like a new one.
    pub(crate) reset_after: Span,
}

/// Declares [`Kernel`] and [`State`], with a variant for each kernel of the table, and calls its
/// [`Counter`] with the state of the same variant.
macro_rules! kernels {
    ($($tag:literal $variant:ident: $counter:ty => $state:ty,)*) => {
        /// The compiled parameters of an algorithm.
        #[derive(Clone, Debug)]
        pub(crate) enum Kernel {
            $($variant($counter),)*
        }

        /// The state that a kernel keeps for a key.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) enum State {
            $($variant($state),)*
        }

        impl Kernel {
            /// Returns the parameters for a remote store (Redis), for a request of `cost`.
            pub(crate) fn numbers(&self, cost: u64) -> Numbers<'_> {
                match self {
                    $(Self::$variant(kernel) => kernel.numbers(cost),)*
                }
            }

            /// Returns the terms (units) in which a state is counted.
            pub(crate) fn terms(&self) -> Terms {
                match self {
                    $(Self::$variant(kernel) => kernel.terms(),)*
                }
            }

            /// Returns this kernel with its states counted in the units `terms`. Returns `None` if
            /// a state itself contains everything that its conversion needs.
            pub(crate) fn in_terms(&self, terms: &Terms) -> Option<Self> {
                match self {
                    $(Self::$variant(kernel) => kernel.in_terms(terms).map(Self::$variant),)*
                }
            }

            /// Returns whether [`Self::adopt`] keeps all spent units. With a slower rate, or a
            /// smaller limit of a weighted window counter, some spent units may be lost.
            pub(crate) fn adopts_all(
                &self,
                old: Option<&Self>,
                state: &State,
                now: Timestamp,
            ) -> bool {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        let old = old.and_then(|old| match old {
                            Self::$variant(old) => Some(old),
                            _ => None,
                        });
                        kernel.adopts_all(old, state, now)
                    })*
                    _ => true,
                }
            }

            /// Returns whether all numbers of a state, except instants, fit in 32 bits.
            pub(crate) fn is_small(&self) -> bool {
                let largest = match self {
                    $(Self::$variant(kernel) => kernel.largest_number(),)*
                };
                u32::try_from(largest).is_ok()
            }

            /// Returns the maximum number of heap bytes of a new key's state after `cost` is
            /// charged.
            pub(crate) fn new_entry_bytes(&self, cost: u64) -> usize {
                match self {
                    $(Self::$variant(kernel) => kernel.new_entry_bytes(cost),)*
                }
            }

            /// Returns the maximum number of bytes that charging `cost` adds to a state.
            pub(crate) fn growth_bytes(&self, state: &State, cost: u64) -> usize {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.growth_bytes(state, cost)
                    })*
                    _ => 0,
                }
            }

            /// Returns the state of a new key.
            pub(crate) fn fresh(&self) -> State {
                match self {
                    $(Self::$variant(kernel) => State::$variant(kernel.fresh().into()),)*
                }
            }

            /// Returns whether `state` can be used by this kernel without conversion.
            pub(crate) fn is_compatible(&self, state: &State) -> bool {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.is_compatible(state)
                    })*
                    _ => false,
                }
            }

            /// Returns whether `state` was written by a kernel of this variant, with any numbers.
            pub(crate) fn is_kind_of(&self, state: &State) -> bool {
                match (self, state) {
                    $((Self::$variant(_), State::$variant(_)) => true,)*
                    _ => false,
                }
            }

            /// Converts a state that was written under other parameters. `old` is the kernel that
            /// wrote the state, if known.
            ///
            /// Spent units stay spent, and anything unknown counts as spent. A state that exceeds
            /// these limits is not reduced, because servers that still use the other parameters may
            /// share the state: a denial under these limits must not change the count of those
            /// servers.
            pub(crate) fn adopt(&self, old: Option<&Self>, state: State, now: Timestamp) -> State {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(mut state)) => {
                        let old = old.and_then(|old| match old {
                            Self::$variant(old) => Some(old),
                            _ => None,
                        });
                        kernel.adopt(old, &mut state, now);
                        State::$variant(state)
                    })*
                    _ => self.fresh(),
                }
            }

            /// Returns the windows that deny `cost` now, one bit each. Only the log kernel has more
            /// than one window and uses bits other than bit 0.
            pub(crate) fn denied(&self, state: &mut State, now: Timestamp, cost: u64) -> u16 {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.denied(state, now, cost)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Charges `cost`. If the request was denied (by a limit that counts denied requests),
            /// the state grows to its maximum at most. A client that keeps sending stays denied,
            /// but never owes more than it could have spent.
            pub(crate) fn charge(&self, state: &mut State, now: Timestamp, cost: u64) {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.charge(state, now, cost);
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Clamps a state that was written while the clock was ahead. Afterwards it has at most
            /// the spent units of a key that was charged to its maximum at `at`, the instant from
            /// which time continued.
            ///
            /// A state that was not affected by the wrong clock does not change, unless it exceeds
            /// these limits. A state exceeds these limits if it was written under higher limits.
            /// Such a state is reduced to the maximum.
            pub(crate) fn clamp(&self, state: &mut State, at: Timestamp) {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => kernel.clamp(state, at),)*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Drops units that affect no decision, for a limit that charges denied requests.
            pub(crate) fn trim(&self, state: &mut State, now: Timestamp) {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => kernel.trim(state, now),)*
                    _ => {}
                }
            }

            /// Refunds up to `units`, the most recently spent ones first, and never more units than
            /// are counted.
            pub(crate) fn refund(&self, state: &mut State, now: Timestamp, units: u64) {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.refund(state, now, units);
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns the position in `state` of the charge that was just made.
            pub(crate) fn mark(state: &State) -> Mark {
                match state {
                    $(State::$variant(state) => <$counter>::mark(state),)*
                }
            }

            /// Refunds up to `units` of a charge, as far as these units are still counted. For
            /// concurrency slots, releases all slots of the charge. For GCRA, returns by how many
            /// microseconds the refund moves later charges forward; otherwise 0.
            pub(crate) fn refund_charge(
                &self,
                state: &mut State,
                now: Timestamp,
                position: &ChargePosition,
                units: u64,
            ) -> u64 {
                let units = units.min(position.cost);
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.refund_charge(state, now, position, units)
                    })*
                    _ => 0,
                }
            }

            /// Renews `units` concurrency slots held since `since`, so that their lease starts at
            /// `now`. Returns false, and changes nothing, if the slots were lost and other requests
            /// hold them now. Kernels without leases return true.
            pub(crate) fn renew(
                &self,
                state: &mut State,
                now: Timestamp,
                since: Timestamp,
                units: u64,
            ) -> bool {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.renew(state, now, since, units)
                    })*
                    _ => true,
                }
            }

            /// Returns the status of window number `part`.
            pub(crate) fn status(&self, state: &State, now: Timestamp, part: usize) -> LimitStatus {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.status(state, now, part)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns when window number `part`, which denies `cost` now, would admit it. For
            /// concurrency slots this is an estimate.
            pub(crate) fn retry(
                &self,
                state: &State,
                now: Timestamp,
                part: usize,
                cost: u64,
            ) -> RetryAfter {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.retry(state, now, part, cost)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns how far the count exceeds the limit. Only the count of a fixed window can
            /// exceed the limit.
            pub(crate) fn excess(&self, state: &State, now: Timestamp) -> u64 {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.excess(state, now)
                    })*
                    _ => 0,
                }
            }

            /// Returns the current wait of a queue minus `longest`, or zero if the wait is shorter.
            /// The cost does not matter.
            pub(crate) fn excess_delay(
                &self,
                state: &State,
                now: Timestamp,
                longest: Span,
            ) -> Span {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.excess_delay(state, now, longest)
                    })*
                    _ => Span::ZERO,
                }
            }

            /// Returns how long to delay the request whose `cost` was just charged.
            pub(crate) fn delay(&self, state: &State, now: Timestamp, cost: u64) -> Span {
                match (self, state) {
                    $((Self::$variant(kernel), State::$variant(state)) => {
                        kernel.delay(state, now, cost)
                    })*
                    _ => Span::ZERO,
                }
            }
        }

        impl State {
            /// Moves every instant in the state back by the duration `span`. At any instant, the
            /// moved state has the spent units that the original state has `span` later.
            /// Sub-windows and weighted windows are aligned to the epoch, so they move by whole
            /// windows only, and by up to one window too little.
            pub(crate) fn move_back(&mut self, span: Span) {
                match self {
                    $(Self::$variant(state) => state.move_back(span),)*
                }
            }

            /// Returns the instant from which the state can be dropped without changing any
            /// decision.
            pub(crate) fn expires(&self) -> Timestamp {
                match self {
                    $(Self::$variant(state) => state.expires(),)*
                }
            }

            /// Returns the heap bytes owned by the state.
            pub(crate) fn heap_bytes(&self) -> usize {
                match self {
                    $(Self::$variant(state) => state.heap_bytes(),)*
                }
            }

            /// Passes the number of the kernel and the numbers of the state to `put`.
            pub(crate) fn write(&self, put: &mut dyn FnMut(u64)) {
                match self {
                    $(Self::$variant(state) => {
                        put($tag);
                        state.write(put);
                    })*
                }
            }

            /// Creates a state from the numbers that [`Self::write`] has passed. Returns `None` if
            /// the numbers are not valid.
            pub(crate) fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
                type StateOf<C> = <C as Counter>::State;
                match next()? {
                    $($tag => StateOf::<$counter>::read(next).map(|state| Self::$variant(state.into())),)*
                    _ => None,
                }
            }

            /// Returns the maximum number of bytes by which a log grows when it is converted to
            /// other limits and charged.
            pub(crate) fn log_growth_bytes(&self) -> usize {
                match self {
                    $(Self::$variant(state) => state.log_growth_bytes(),)*
                }
            }
        }
    };
}

/// [`Kernel::is_compatible`] has checked the state when it was loaded.
const MISMATCH: &str = "a state that the kernel cannot use is converted when it is loaded";

// The numbers identify the kernels in snapshots.
kernels! {
    0 Gcra: Gcra => Exact,
    1 Interval: Interval => IntervalState,
    2 Window: FixedWindow => WindowState,
    3 Log: Log => Box<LogState>,
    4 Buckets: Buckets => Box<BucketsState>,
    5 Weighted: Weighted => Box<WeightedState>,
    6 Lease: Lease => Box<LogState>,
}
