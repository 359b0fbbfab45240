//! The time per decision as the number of keys grows. A sweep or a rehash in a limiter is visible
//! as a peak.

use std::time::{Duration, Instant};

use crate::{
    keys,
    limiters::{BenchLimiter, Governor, Throttlecrab, Tidegate},
    report::median,
};

/// The numbers of keys at which times are measured, and the number of rounds.
pub struct Size {
    pub steps: &'static [usize],
    pub rounds: usize,
}

/// Up to four million keys.
pub const FULL: Size = Size {
    steps: &[
        10_000, 30_000, 100_000, 172_000, 300_000, 1_000_000, 2_000_000, 4_000_000,
    ],
    rounds: 3,
};

/// A small run, which takes less than a second and only tests that the benchmark works.
pub const SMOKE: Size = Size {
    steps: &[1_000, 10_000],
    rounds: 2,
};

/// The number of decisions for existing keys in each step.
const ASKED: usize = 500_000;

/// A capacity that no key exhausts.
const ROOM: u32 = 1_000;

/// The measurements of one step in one round.
#[derive(Clone, Copy)]
struct Step {
    known: f64,
    new: f64,
    worst: Duration,
}

/// Measures, and prints the table.
pub fn run(size: &Size) {
    let keys = keys::keys(*size.steps.last().expect("there is a step"));
    println!(
        "| limiter | keys | ns per decision, known keys | ns per decision, new keys | \
         slowest single decision |"
    );
    println!("| --- | --- | --- | --- | --- |");
    let mut rows: [Vec<Vec<Step>>; 3] = Default::default();
    for round in 0..size.rounds {
        eprintln!("growth {} of {}", round + 1, size.rounds);
        rows[0].push(grow::<Tidegate>(size, &keys));
        rows[1].push(grow::<Governor>(size, &keys));
        rows[2].push(grow::<Throttlecrab>(size, &keys));
    }
    for (name, rounds) in [Tidegate::NAME, Governor::NAME, Throttlecrab::NAME]
        .into_iter()
        .zip(&rows)
    {
        print(name, size, rounds);
    }
}

/// Prints the lowest of the rounds' worst times. A disturbance on the machine affects only one
/// round, but a peak that the limiter causes occurs in every round.
fn print(name: &str, size: &Size, rounds: &[Vec<Step>]) {
    for (index, keys) in size.steps.iter().enumerate() {
        let steps: Vec<Step> = rounds.iter().map(|round| round[index]).collect();
        let known = median(&steps.iter().map(|step| step.known).collect::<Vec<_>>());
        let new = median(&steps.iter().map(|step| step.new).collect::<Vec<_>>());
        let worst = steps
            .iter()
            .map(|step| step.worst)
            .min()
            .unwrap_or_default();
        println!(
            "| {name} | {keys} | {known:.0} | {new:.0} | {:.0} us |",
            worst.as_secs_f64() * 1e6
        );
    }
}

/// Fills one limiter step by step.
fn grow<L: BenchLimiter>(size: &Size, keys: &[String]) -> Vec<Step> {
    let limiter = L::new(ROOM);
    let mut admit = limiter.decider();
    let mut held = 0;
    size.steps
        .iter()
        .map(|&to| {
            let (new, worst_new) = each_timed(&keys[held..to], &mut admit);
            held = to;
            let order = keys::shuffled(to, 1, 3);
            let order = &order[..to.min(ASKED)];
            let start = Instant::now();
            let admitted = order
                .iter()
                .filter(|&&index| admit(&keys[index as usize]))
                .count();
            let known = start.elapsed().as_secs_f64() * 1e9 / order.len() as f64;
            assert_eq!(admitted, order.len(), "{} refused below its limit", L::NAME);
            let again: Vec<String> = order
                .iter()
                .map(|&index| keys[index as usize].clone())
                .collect();
            let (_, worst_known) = each_timed(&again, &mut admit);
            Step {
                known,
                new,
                worst: worst_new.max(worst_known),
            }
        })
        .collect()
}

/// Returns the mean time in nanoseconds, including the time for reading the clock, and the longest
/// time.
fn each_timed(keys: &[String], admit: &mut impl FnMut(&String) -> bool) -> (f64, Duration) {
    let start = Instant::now();
    let mut before = start;
    let mut worst = Duration::ZERO;
    for key in keys {
        assert!(admit(key), "refused below the limit");
        let after = Instant::now();
        worst = worst.max(after - before);
        before = after;
    }
    (
        (before - start).as_secs_f64() * 1e9 / keys.len() as f64,
        worst,
    )
}
