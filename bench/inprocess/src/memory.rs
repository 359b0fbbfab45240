//! Bytes per key: the resident memory of the process with keys, minus the resident memory without
//! keys.
//!
//! Each limiter is filled in a new process, so that it cannot reuse memory freed by another
//! limiter.

use std::{env, fs, process::Command};

use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Span,
    Timestamp,
};

use crate::{
    keys::key,
    limiters::{BenchLimiter, Governor, Hashbrown, Throttlecrab, Tidegate},
    report::verdict,
};

/// The numbers of keys and of sliding window logs.
pub struct Size {
    pub keys: usize,
    pub logs: usize,
}

/// The size for which the targets are defined.
pub const FULL: Size = Size {
    keys: 1_000_000,
    logs: 100_000,
};

/// A small run, which tests within a second that the benchmark works. Its results are meaningless.
pub const SMOKE: Size = Size {
    keys: 10_000,
    logs: 1_000,
};

/// The number of timestamps per sliding window log.
const ENTRIES: usize = 60;

const LOGS: &str = "tidegate logs";

/// Runs this program once per limiter, and prints the table.
pub fn run(size: &Size) {
    println!("| limiter | keys | bytes per key | at the peak |");
    println!("| --- | --- | --- | --- |");
    let mut ours = 0.0;
    let names = [
        Tidegate::NAME,
        Hashbrown::NAME,
        Governor::NAME,
        Throttlecrab::NAME,
    ];
    for name in names {
        let held = in_a_fresh_process(name, size.keys);
        let a_key = |bytes: usize| bytes as f64 / size.keys as f64;
        println!(
            "| {name}, GCRA | {} | {:.1} | {:.1} |",
            size.keys,
            a_key(held.now),
            a_key(held.peak)
        );
        if name == Tidegate::NAME {
            ours = a_key(held.now);
        }
    }
    let logs = in_a_fresh_process(LOGS, size.logs);
    let a_key = |bytes: usize| bytes as f64 / size.logs as f64;
    println!(
        "| tidegate, sliding window log with {ENTRIES} timestamps | {} | {:.1} | {:.1} |",
        size.logs,
        a_key(logs.now),
        a_key(logs.peak)
    );
    println!();
    println!(
        "- {ours:.1} bytes per GCRA key, target 64: {}",
        verdict(ours, 64.0)
    );
    let megabytes = logs.now as f64 / 1e6;
    println!(
        "- {megabytes:.1} MB for {} sliding window logs, target 80 MB for 100,000: {}",
        size.logs,
        verdict(megabytes, 80.0)
    );
}

/// Resident memory in bytes, minus the resident memory of the process without keys.
struct Held {
    now: usize,
    peak: usize,
}

fn in_a_fresh_process(name: &str, keys: usize) -> Held {
    let program = env::current_exe().expect("the benchmark knows its own program");
    let output = Command::new(program)
        .args(["--memory-of", name, &keys.to_string()])
        .output()
        .expect("it runs itself");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "filling {name} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut numbers = text
        .split_whitespace()
        .map(|word| word.parse().expect("two numbers"));
    Held {
        now: numbers.next().expect("the bytes now"),
        peak: numbers.next().expect("the bytes at the peak"),
    }
}

/// Runs in the new process: fills a limiter, measures, checks, and prints.
///
/// # Panics
///
/// Panics if the limiter does not limit every key, because a limiter that discards keys would need
/// no memory.
pub fn child(name: &str, keys: usize) {
    let held = match name {
        Tidegate::NAME => fill::<Tidegate>(keys),
        Governor::NAME => fill::<Governor>(keys),
        Throttlecrab::NAME => fill::<Throttlecrab>(keys),
        Hashbrown::NAME => fill::<Hashbrown>(keys),
        LOGS => fill_logs(keys),
        unknown => panic!("unknown limiter {unknown:?}"),
    };
    println!("{} {}", held.now, held.peak);
}

fn fill<L: BenchLimiter>(keys: usize) -> Held {
    let before = resident("VmRSS");
    let limiter = L::new(2);
    let mut admit = limiter.decider();
    for attempt in 0..2 {
        let admitted = (0..keys).filter(|&number| admit(&key(number))).count();
        assert_eq!(admitted, keys, "{} refused in pass {attempt}", L::NAME);
    }
    let held = Held {
        now: resident("VmRSS") - before,
        peak: resident("VmHWM") - before,
    };
    let admitted = (0..keys).filter(|&number| admit(&key(number))).count();
    assert_eq!(
        admitted,
        0,
        "{} forgot keys that are being limited",
        L::NAME
    );
    held
}

/// Fills the sliding window logs in the same way as real traffic: with about one request per second
/// and key, at irregular times.
fn fill_logs(keys: usize) -> Held {
    let minute = Span::from_secs(60);
    let limit = Limit::new(Algorithm::SlidingWindowLog {
        limit: ENTRIES as u64,
        window: minute,
    });
    let limits =
        Limits::new(vec![limit.expect("sixty a minute is in range")]).expect("one limit is enough");
    let before = resident("VmRSS");
    let store = MemoryStore::new(MemoryBounds::default());
    let mut outcomes = Vec::new();
    let mut admit = |number: usize, micros: u64| {
        let key = key(number);
        let charge = Charge::new(key.as_bytes(), &limits, Cost::ONE).expect("the keys are short");
        let now = Timestamp::from_micros(1_700_000_000_000_000 + micros);
        matches!(
            store.check(&[charge], now, Effect::Charge, &mut outcomes),
            Decision::Admitted
        )
    };
    let step = 59_000_000 / (keys * ENTRIES) as u64;
    let mut micros = 0;
    for pass in 0..ENTRIES {
        for turn in 0..keys {
            micros += step;
            // Each pass visits the keys in a different order. 7,919 is a prime that does not divide
            // the number of keys.
            let number = (turn * 7_919 + pass * 31_337) % keys;
            assert!(
                admit(number, micros),
                "refused entry {pass} of key {number}"
            );
        }
    }
    let held = Held {
        now: resident("VmRSS") - before,
        peak: resident("VmHWM") - before,
    };
    assert!(
        (0..keys).all(|number| !admit(number, micros)),
        "a log that is full admitted one more"
    );
    held
}

/// Returns a field of `/proc/self/status`, in bytes.
fn resident(field: &str) -> usize {
    let status =
        fs::read_to_string("/proc/self/status").expect("Linux reports the memory of a process");
    let line = status
        .lines()
        .find(|line| line.starts_with(field))
        .expect("the field is there");
    let kibibytes: usize = line
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .expect("a number");
    kibibytes * 1_024
}
