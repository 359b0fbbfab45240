//! Measures the nanoseconds per decision and thread, for several numbers of keys and threads.
//!
//! In each round, every limiter starts empty and is first charged once for every key; this phase is
//! not measured. In the measured phase, every key is requested the same number of times, in random
//! order. Half of these requests are allowed and half are denied. The exact number is known in
//! advance and checked, because a limiter that admits everything would be fast.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use crate::{
    keys,
    limiters::{
        BenchLimiter, Governor, Harness, HarnessAndClock, Hashbrown, INTERVAL, Library,
        Throttlecrab, Tidegate,
    },
    report::{self, Cell},
};

/// The numbers of keys, decisions and rounds.
pub struct Size {
    pub keys: &'static [usize],
    pub decisions: usize,
    pub rounds: usize,
}

/// The size for which the targets are defined.
pub const FULL: Size = Size {
    keys: &[1, 10_000, 1_000_000],
    decisions: 4_000_000,
    rounds: 7,
};

/// A small run, which takes a few seconds and only tests that the benchmark works. Its times are
/// meaningless.
pub const SMOKE: Size = Size {
    keys: &[1, 1_000],
    decisions: 20_000,
    rounds: 2,
};

/// The size for comparing the library with its store. It has more rounds, because the difference is
/// small.
pub const LIBRARY: Size = Size {
    keys: &[1, 10_000],
    decisions: 4_000_000,
    rounds: 21,
};

const THREADS: [usize; 2] = [1, 2];

type Measure = fn(&Load, usize) -> f64;

const LIMITERS: [(&str, Measure); 7] = [
    (Governor::NAME, nanos_per_decision::<Governor>),
    (Tidegate::NAME, nanos_per_decision::<Tidegate>),
    (Library::NAME, nanos_per_decision::<Library>),
    (Hashbrown::NAME, nanos_per_decision::<Hashbrown>),
    (Throttlecrab::NAME, nanos_per_decision::<Throttlecrab>),
    (Harness::NAME, nanos_per_decision::<Harness>),
    (HarnessAndClock::NAME, nanos_per_decision::<HarnessAndClock>),
];

/// Measures everything, and prints the table.
pub fn run(size: &Size) {
    let cells = measure(size, &LIMITERS);
    report::print_speed(&LIMITERS.map(|(name, _)| name), &cells);
}

/// Measures the library, its store and governor, and prints the table.
pub fn run_library(size: &Size) {
    let limiters = [LIMITERS[0], LIMITERS[1], LIMITERS[2]];
    let cells = measure(size, &limiters);
    report::print_speed(&limiters.map(|(name, _)| name), &cells);
}

fn measure(size: &Size, limiters: &[(&str, Measure)]) -> Vec<Cell> {
    let loads: Vec<Load> = size
        .keys
        .iter()
        .map(|&keys| Load::new(keys, size.decisions))
        .collect();
    let mut cells: Vec<Cell> = loads
        .iter()
        .flat_map(|load| THREADS.map(|threads| Cell::new(load.keys.len(), threads, limiters.len())))
        .collect();
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        for (load, cells) in loads.iter().zip(cells.chunks_mut(THREADS.len())) {
            for cell in cells {
                measure_round(round, load, cell, limiters);
            }
        }
    }
    cells
}

/// Measures one round of one cell. Each round starts with a different limiter.
fn measure_round(round: usize, load: &Load, cell: &mut Cell, limiters: &[(&str, Measure)]) {
    for turn in 0..limiters.len() {
        let index = (round + turn) % limiters.len();
        let nanos = limiters[index].1(load, cell.threads);
        cell.nanos[index].push(nanos);
    }
}

/// The keys of a round, and the order of the initial charges and of the measured requests.
struct Load {
    keys: Vec<String>,
    filling: Vec<u32>,
    order: Vec<u32>,
    attempts: usize,
}

impl Load {
    fn new(keys: usize, decisions: usize) -> Self {
        let attempts = decisions.div_ceil(keys).next_multiple_of(2);
        Self {
            keys: keys::keys(keys),
            filling: keys::shuffled(keys, 1, 1),
            order: keys::shuffled(keys, attempts, 2),
            attempts,
        }
    }

    /// Returns the capacity per key: one unit for the initial charge, and one unit for every second
    /// request.
    fn capacity(&self) -> u32 {
        u32::try_from(self.attempts / 2 + 1).expect("attempts are fewer than 2^32")
    }
}

fn nanos_per_decision<L: BenchLimiter>(load: &Load, threads: usize) -> f64 {
    let limiter = L::new(load.capacity());
    let begun = Instant::now();
    let filled = ask(&limiter, &load.keys, &load.filling);
    assert_eq!(filled, load.keys.len(), "{} refused a new key", L::NAME);

    let share = load.order.len() / threads;
    let barrier = Barrier::new(threads);
    let results: Vec<(usize, Duration)> = thread::scope(|scope| {
        let workers: Vec<_> = load
            .order
            .chunks_exact(share)
            .map(|order| {
                let (limiter, barrier) = (&limiter, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let start = Instant::now();
                    let admitted = ask(limiter, &load.keys, order);
                    (admitted, start.elapsed())
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a limiter panicked"))
            .collect()
    });

    let admitted = results.iter().map(|(admitted, _)| admitted).sum();
    assert_admitted::<L>(load, threads, admitted, begun.elapsed());
    let total: Duration = results.iter().map(|(_, time)| *time).sum();
    total.as_secs_f64() * 1e9 / (share * threads) as f64
}

/// Makes one decision for each index in `order`, and returns how many requests were admitted.
fn ask<L: BenchLimiter>(limiter: &L, keys: &[String], order: &[u32]) -> usize {
    let mut admit = limiter.decider();
    order
        .iter()
        .filter(|&&index| admit(&keys[index as usize]))
        .count()
}

/// Checks that exactly half of the requests were admitted. On a very slow machine, additional
/// requests may be admitted, because tokens are refilled during the round.
fn assert_admitted<L: BenchLimiter>(
    load: &Load,
    threads: usize,
    admitted: usize,
    elapsed: Duration,
) {
    let expected = if L::LIMITS {
        load.order.len() / 2
    } else {
        load.order.len()
    };
    let came_back =
        usize::try_from(elapsed.as_secs() / INTERVAL.as_secs()).expect("a round is short");
    let most = expected
        + if L::LIMITS {
            came_back * load.keys.len()
        } else {
            0
        };
    assert!(
        (expected..=most).contains(&admitted),
        "{} at {} keys and {threads} threads admitted {admitted}, and should have admitted {expected} to {most}",
        L::NAME,
        load.keys.len(),
    );
}
