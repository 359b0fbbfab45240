//! Property tests. These tests compare every algorithm with a naive reference model (its twin),
//! check every documented guarantee over all intervals, and test the store with floods of keys,
//! threads, restarts and changed limits.
//!
//! A failing property prints its smallest counterexample and its seed. Former counterexamples are
//! named tests in `regressions`.

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
