//! Property tests. The tests compare every algorithm with a simple reference model (its twin), and
//! check every documented guarantee over all intervals. The tests also check the store with floods
//! of keys, concurrent threads, restarts and changed limits.
//!
//! A failing property prints its smallest counterexample and its seed. Former counterexamples are
//! named tests in `regressions`.

#![cfg(not(loom))]

mod blocks;
mod calendars;
mod clock_jumps;
mod concurrency_slots;
mod elastic;
mod flood;
mod full;
mod handover;
mod implied;
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
