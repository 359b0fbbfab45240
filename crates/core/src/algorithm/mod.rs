//! The implementations of the rate limit algorithms, which this crate calls *kernels*. A kernel is
//! a set of pure functions of the state, the time and the cost.
//!
//! Each variant of [`Algorithm`](crate::Algorithm) is implemented by one of seven kernels. Only the
//! code in this module computes with states. For the state of a key, a kernel determines:
//!
//! - whether a request of a given cost is *denied* now;
//! - the new state after this cost is *charged* (counted against the limit);
//! - how many units *remain*, when the whole limit is available again, and when this cost would be
//!   admitted;
//! - when the state *expires*: from then on, the state can be dropped without changing any
//!   decision.
//!
//! To add a kernel, implement the trait [`Counter`] in a new file, and add a line to the `kernels!`
//! table at the end of this file.
//!
//! Kernels can rely on time never going backwards, because the store passes the latest instant it
//! has seen.
//!
//! In the section **Guarantee** of each kernel's documentation, the limit `L` and the capacity `B`
//! include the soft allowance, as in [`Limit::hard_quota`](crate::limit::Limit::hard_quota). The
//! guarantees do not hold if a caller requests an [`Effect::Refund`](crate::Effect::Refund), so
//! only trusted callers should be allowed to request refunds. The section **Memory** states the
//! size of the kernel's state for one key. In addition, the memory store needs an entry of 48 bytes
//! per key, which can hold 16 bytes of state inline.

mod charge_position;
mod compile;
mod counter;
mod exact_micros;
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
    gcra::{Gcra, GcraParameters, narrow},
    interval_bucket::{Interval, IntervalState},
    outcome::Drain,
    sliding_buckets::{Buckets, BucketsState},
    sliding_log::{Lease, Log, LogState, Stamp},
    sliding_weighted::{WeightedState, WeightedWindow},
};

pub use self::{
    exact_micros::ExactMicros,
    numbers::{Numbers, Terms},
    outcome::{Outcome, RetryAfter},
};
use crate::time::{Span, Timestamp};

/// The status of a limit for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitStatus {
    /// The maximum cost that would be admitted now.
    pub(crate) remaining: u64,
    /// The time until the key has no spent units. After this time, the store treats the key like a
    /// new key.
    pub(crate) reset_after: Span,
}

/// Declares the enums [`Kernel`] and [`KernelState`], which have a variant for each kernel in the
/// table. Each `Kernel` method dispatches to the [`Counter`] method of its variant, with the state
/// of the same variant.
macro_rules! kernels {
    ($($tag:literal $variant:ident: $counter:ty => $state:ty,)*) => {
        /// An algorithm with its precomputed parameters.
        #[derive(Clone, Debug)]
        pub(crate) enum Kernel {
            $($variant($counter),)*
        }

        /// The state that a kernel keeps for a key.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) enum KernelState {
            $($variant($state),)*
        }

        impl Kernel {
            /// Returns the parameters that a remote store (Redis) needs for a decision on a request
            /// of `cost`.
            pub(crate) fn numbers(&self, cost: u64) -> Numbers<'_> {
                match self {
                    $(Self::$variant(kernel) => kernel.numbers(cost),)*
                }
            }

            /// Returns the units of measure ([`Terms`]) of this kernel's states.
            pub(crate) fn terms(&self) -> Terms {
                match self {
                    $(Self::$variant(kernel) => kernel.terms(),)*
                }
            }

            /// Returns a copy of this kernel whose states have the units of measure `terms`.
            /// Returns `None` for an algorithm whose states can be converted without knowing their
            /// terms.
            pub(crate) fn in_terms(&self, terms: &Terms) -> Option<Self> {
                match self {
                    $(Self::$variant(kernel) => kernel.in_terms(terms).map(Self::$variant),)*
                }
            }

            /// Returns how long `state` takes to drain at the rate at which it was written: the
            /// time until this limit would admit `cost`, and the time until the state has no spent
            /// units. Returns `None` if [`Self::adopt`] keeps all spent units. Spent units are lost
            /// only if the new rate is slower than the old rate, or if the limit of a weighted
            /// window counter was lowered.
            pub(crate) fn drain(
                &self,
                old: Option<&Self>,
                state: &KernelState,
                now: Timestamp,
                cost: u64,
            ) -> Option<Drain> {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        let old = old.and_then(|old| match old {
                            Self::$variant(old) => Some(old),
                            _ => None,
                        });
                        kernel.drain(old, state, now, cost)
                    })*
                    _ => None,
                }
            }

            /// Returns whether all numbers in this kernel's states, except instants, fit in 32
            /// bits.
            pub(crate) fn is_small(&self) -> bool {
                let largest = match self {
                    $(Self::$variant(kernel) => kernel.largest_number(),)*
                };
                u32::try_from(largest).is_ok()
            }

            /// Returns the maximum heap size, in bytes, of a new key's state after a charge of
            /// `cost`.
            pub(crate) fn new_entry_bytes(&self, cost: u64) -> usize {
                match self {
                    $(Self::$variant(kernel) => kernel.new_entry_bytes(cost),)*
                }
            }

            /// Returns the maximum number of bytes by which the state grows when `cost` is charged.
            pub(crate) fn growth_bytes(&self, state: &KernelState, cost: u64) -> usize {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.growth_bytes(state, cost)
                    })*
                    _ => 0,
                }
            }

            /// Returns the state of a new key.
            pub(crate) fn fresh(&self) -> KernelState {
                match self {
                    $(Self::$variant(kernel) => KernelState::$variant(kernel.fresh().into()),)*
                }
            }

            /// Returns whether this kernel can use `state` without conversion.
            pub(crate) fn is_compatible(&self, state: &KernelState) -> bool {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.is_compatible(state)
                    })*
                    _ => false,
                }
            }

            /// Returns whether `state` was written by the same kind of kernel, whatever its
            /// parameters.
            pub(crate) fn is_kind_of(&self, state: &KernelState) -> bool {
                match (self, state) {
                    $((Self::$variant(_), KernelState::$variant(_)) => true,)*
                    _ => false,
                }
            }

            /// Converts a state written with other parameters, for example before the rules were
            /// reloaded. `old` is a copy of this kernel in the terms of the state (see
            /// [`Self::in_terms`]). `old` is `None` if the terms of the state (its units of
            /// measure) are unknown or not needed.
            ///
            /// Spent units still count after the conversion. If the kernel cannot tell whether a
            /// unit is still spent, the unit counts as spent. A state that exceeds the new limit is
            /// not reduced, because servers with the old parameters may still share it. A denial
            /// under the new limit must not change the count for the servers with the old
            /// parameters.
            pub(crate) fn adopt(
                &self,
                old: Option<&Self>,
                state: KernelState,
                now: Timestamp,
            ) -> KernelState {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(mut state)) => {
                        let old = old.and_then(|old| match old {
                            Self::$variant(old) => Some(old),
                            _ => None,
                        });
                        kernel.adopt(old, &mut state, now);
                        KernelState::$variant(state)
                    })*
                    _ => self.fresh(),
                }
            }

            /// Returns a bit mask of the windows that deny `cost` now. Only the sliding window log
            /// can have more than one window; all other kernels use bit 0.
            pub(crate) fn denied(&self, state: &mut KernelState, now: Timestamp, cost: u64) -> u16 {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.denied(state, now, cost)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Charges `cost`. If the limit counts denied requests, this function is also called
            /// for denied requests, but the count never exceeds its maximum. Therefore, a client
            /// that keeps sending requests stays denied, but never has to wait longer than after
            /// exhausting the limit.
            pub(crate) fn charge(&self, state: &mut KernelState, now: Timestamp, cost: u64) {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.charge(state, now, cost);
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Clamps a state that was written while the clock was ahead, before the clock was set
            /// back to `at`. The clamped state has at most as many spent units as a key that
            /// exhausted its limit at `at`.
            ///
            /// A state that the clock error did not affect changes only if it exceeds this limit
            /// because it was written under a higher limit. A state that exceeds this limit is
            /// reduced to this limit.
            pub(crate) fn clamp(&self, state: &mut KernelState, at: Timestamp) {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.clamp(state, at);
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Drops units that affect no decision. Only the states of limits that count denied
            /// requests contain units that affect no decision.
            pub(crate) fn trim(&self, state: &mut KernelState, now: Timestamp) {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.trim(state, now);
                    })*
                    _ => {}
                }
            }

            /// Refunds up to `units`, beginning with the most recently spent units. Never refunds
            /// more units than are counted in the state.
            pub(crate) fn refund(&self, state: &mut KernelState, now: Timestamp, units: u64) {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.refund(state, now, units);
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns the position of the most recent charge in `state`.
            pub(crate) fn mark(state: &KernelState) -> Mark {
                match state {
                    $(KernelState::$variant(state) => <$counter>::mark(state),)*
                }
            }

            /// Refunds up to `units` of the charge at `position` that are still counted. For
            /// concurrency slots, releases all slots of the charge. For GCRA, a refund makes later
            /// charges drain earlier; returns by how many microseconds. For other algorithms,
            /// returns 0.
            pub(crate) fn refund_charge(
                &self,
                state: &mut KernelState,
                now: Timestamp,
                position: &ChargePosition,
                units: u64,
            ) -> u64 {
                let units = units.min(position.cost);
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.refund_charge(state, now, position, units)
                    })*
                    _ => 0,
                }
            }

            /// Renews `units` concurrency slots acquired at `since`, so that their lease starts at
            /// `now`. Returns false and changes nothing if the slots were lost and too few slots
            /// are free. Kernels without leases return true.
            pub(crate) fn renew(
                &self,
                state: &mut KernelState,
                now: Timestamp,
                since: Timestamp,
                units: u64,
            ) -> bool {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.renew(state, now, since, units)
                    })*
                    _ => true,
                }
            }

            /// Returns the status of the window with index `window`; kernels with one window
            /// ignore `window`.
            pub(crate) fn status(
                &self,
                state: &KernelState,
                now: Timestamp,
                window: usize,
            ) -> LimitStatus {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.status(state, now, window)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns how long it takes until the window with index `window`, which denies `cost`
            /// now, would admit `cost`. For concurrency slots, the time is an estimate.
            pub(crate) fn retry(
                &self,
                state: &KernelState,
                now: Timestamp,
                window: usize,
                cost: u64,
            ) -> RetryAfter {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.retry(state, now, window, cost)
                    })*
                    _ => unreachable!("{MISMATCH}"),
                }
            }

            /// Returns the number of units by which the count exceeds the limit; only a fixed
            /// window returns more than 0.
            pub(crate) fn excess(&self, state: &KernelState, now: Timestamp) -> u64 {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.excess(state, now)
                    })*
                    _ => 0,
                }
            }

            /// Returns the time by which the current wait in a queueing leaky bucket exceeds
            /// `longest`, or zero if the wait is shorter. The wait does not depend on the request's
            /// cost.
            pub(crate) fn excess_delay(
                &self,
                state: &KernelState,
                now: Timestamp,
                longest: Span,
            ) -> Span {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.excess_delay(state, now, longest)
                    })*
                    _ => Span::ZERO,
                }
            }

            /// Returns how long to delay the request whose `cost` was just charged.
            pub(crate) fn delay(&self, state: &KernelState, now: Timestamp, cost: u64) -> Span {
                match (self, state) {
                    $((Self::$variant(kernel), KernelState::$variant(state)) => {
                        kernel.delay(state, now, cost)
                    })*
                    _ => Span::ZERO,
                }
            }
        }

        impl KernelState {
            /// Moves every instant in the state back by the duration `span`. At any instant, the
            /// moved state has as many spent units as the original state has `span` later.
            /// Sub-windows and weighted windows are aligned to the epoch, so `span` is rounded down
            /// to whole windows or sub-windows.
            pub(crate) fn move_back(&mut self, span: Span) {
                match self {
                    $(Self::$variant(state) => state.move_back(span),)*
                }
            }

            /// Returns when the state expires. After the expiry, the state can be dropped without
            /// changing any decision.
            pub(crate) fn expires(&self) -> Timestamp {
                match self {
                    $(Self::$variant(state) => state.expires(),)*
                }
            }

            /// Returns the number of heap bytes that the state owns.
            pub(crate) fn heap_bytes(&self) -> usize {
                match self {
                    $(Self::$variant(state) => state.heap_bytes(),)*
                }
            }

            /// Serialises the state by passing the kernel's tag, and then the state's numbers, to
            /// `put`.
            pub(crate) fn write(&self, put: &mut dyn FnMut(u64)) {
                match self {
                    $(Self::$variant(state) => {
                        put($tag);
                        state.write(put);
                    })*
                }
            }

            /// Deserialises a state from the numbers that [`Self::write`] produced. Returns `None`
            /// if the numbers are invalid.
            pub(crate) fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
                type StateOf<C> = <C as Counter>::State;
                match next()? {
                    $($tag => {
                        StateOf::<$counter>::read(next).map(|state| Self::$variant(state.into()))
                    })*
                    _ => None,
                }
            }

            /// Returns the maximum number of bytes by which a sliding window log grows when it is
            /// converted to other limits and charged.
            pub(crate) fn log_growth_bytes(&self) -> usize {
                match self {
                    $(Self::$variant(state) => state.log_growth_bytes(),)*
                }
            }
        }
    };
}

/// The panic message if a kernel receives another kernel's state. The panic is impossible, because
/// every state is checked with [`Kernel::is_compatible`] when it is loaded.
const MISMATCH: &str = "a state that the kernel cannot use is converted when it is loaded";

// In snapshots, the number at the start of a line of this table identifies the kernel.
kernels! {
    0 Gcra: Gcra => ExactMicros,
    1 Interval: Interval => IntervalState,
    2 Window: FixedWindow => WindowState,
    3 Log: Log => Box<LogState>,
    4 Buckets: Buckets => Box<BucketsState>,
    5 Weighted: WeightedWindow => Box<WeightedState>,
    6 Lease: Lease => Box<LogState>,
}
