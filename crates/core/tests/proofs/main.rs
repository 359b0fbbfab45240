//! The proofs: every kernel against its naive twin, every promise over all intervals, and the store under
//! floods, threads, restarts and changes of its limits.
//!
//! A failing property prints its smallest counterexample and seed; the ones that once failed stand as named
//! tests in `regressions`.

#![cfg(not(loom))]

mod blocks;
mod calendars;
mod clock_jumps;
mod elastic;
mod flood;
mod full;
mod places;
mod promises;
mod regressions;
mod restart;
mod same_as_twin;
mod settlements;
mod strategies;
mod succession;
mod threads;
mod twin;
mod waits;
mod world;
