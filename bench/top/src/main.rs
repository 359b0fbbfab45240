//! Compares Tidegate's sketch for top talkers with the three sketches in the `heavykeeper` crate.
//!
//! Each sketch lists the 100 most frequent of 1,000,000 keys after 4,000,000 additions. The table
//! contains the time per addition, the memory, how many of the 100 keys are found, and the errors
//! in their counts. `--smoke` uses 40,000 additions and only tests that the benchmark works.

mod decisions;

use std::{
    collections::{HashMap, HashSet},
    hash::BuildHasher,
    hint::black_box,
    time::Instant,
};

use foldhash::fast::RandomState;
use heavykeeper::{BucketedTopK, CuckooTopK, TopK};
use tidegate_core::top::{Sketch, top_keys};

/// The number of most frequent keys to find.
const WANTED: usize = 100;

/// The number of distinct keys.
const KEYS: u32 = 1_000_000;

/// The number of keys that each sketch keeps.
const KEPT: usize = 1_000;

/// The width and depth of the `heavykeeper` sketches, as in its own benchmarks.
const WIDTH: usize = 4_096;
const DEPTH: usize = 4;
const DECAY: f64 = 0.9;

const ROUNDS: usize = 5;

/// A key in a list, with its estimated count and, if the sketch reports it, the error bound.
type Row = (Vec<u8>, u64, Option<u64>);

/// The result of running a sketch on a stream of additions.
struct Answer {
    nanos: f64,
    bytes: usize,
    rows: Vec<Row>,
}

fn timed<S>(
    additions: &[u32],
    keys: &[Vec<u8>],
    mut sketch: S,
    add: impl Fn(&mut S, &[u8]),
) -> (f64, S) {
    let began = Instant::now();
    for &key in additions {
        add(&mut sketch, black_box(&keys[key as usize]));
    }
    let nanos = began.elapsed().as_secs_f64() * 1e9;
    (nanos / additions.len() as f64, sketch)
}

/// Runs Tidegate's sketch with its default size.
fn tidegate(additions: &[u32], keys: &[Vec<u8>]) -> Answer {
    space_saving(additions, keys, KEPT)
}

/// Runs Tidegate's sketch with about as much memory as the other sketches use.
fn tidegate_large(additions: &[u32], keys: &[Vec<u8>]) -> Answer {
    space_saving(additions, keys, 4 * KEPT)
}

fn space_saving(additions: &[u32], keys: &[Vec<u8>], kept: usize) -> Answer {
    let hasher = RandomState::default();
    let (nanos, sketch) = timed(additions, keys, Sketch::new(kept), |sketch, key| {
        let hash = u32::try_from(hasher.hash_one(key) >> 32).unwrap_or(0);
        sketch.add(key, hash, 1);
    });
    let summary = sketch.summary();
    let rows = top_keys([&summary], WANTED);
    let rows = rows
        .iter()
        .map(|top| (top.key.to_vec(), top.estimate, Some(top.error)));
    Answer {
        nanos,
        bytes: sketch.heap_bytes(),
        rows: rows.collect(),
    }
}

/// Runs a `heavykeeper` sketch. All of them have the same functions, but no common trait.
macro_rules! heavykeeper {
    ($name:ident, $sketch:ident) => {
        fn $name(additions: &[u32], keys: &[Vec<u8>]) -> Answer {
            let sketch: $sketch<Vec<u8>> = $sketch::new(KEPT, WIDTH, DEPTH, DECAY);
            let (nanos, sketch) = timed(additions, keys, sketch, |sketch, key| {
                sketch.add(key, 1);
            });
            let mut list = sketch.list();
            list.sort_by_key(|node| std::cmp::Reverse(node.count));
            let rows = list.into_iter().take(WANTED);
            Answer {
                nanos,
                bytes: sketch.mem_bytes(Vec::capacity),
                rows: rows.map(|node| (node.item, node.count, None)).collect(),
            }
        }
    };
}

heavykeeper!(top_k, TopK);
heavykeeper!(bucketed, BucketedTopK);
heavykeeper!(cuckoo, CuckooTopK);

/// A random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in 0..1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "positions are below the number of keys"
)]
fn zipf(count: usize, exponent: f64) -> Vec<u32> {
    let mut sums = Vec::with_capacity(KEYS as usize);
    let mut sum = 0.0;
    for rank in 1..=KEYS {
        sum += f64::from(rank).powf(-exponent);
        sums.push(sum);
    }
    let mut random = Random(7);
    let mut draw = || sums.partition_point(|&below| below < random.part() * sum) as u32;
    (0..count).map(|_| draw().min(KEYS - 1)).collect()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the remainder is below the number of keys"
)]
fn uniform(count: usize) -> Vec<u32> {
    let mut random = Random(11);
    (0..count)
        .map(|_| (random.next() % u64::from(KEYS)) as u32)
        .collect()
}

/// A stream with 100 frequent keys, each of which occurs in one of 1,000 additions. All other keys
/// occur only a few times.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the remainder is below the number of keys"
)]
fn flood(count: usize) -> Vec<u32> {
    let mut random = Random(13);
    let mut flooded = 0;
    let mut draw = || {
        let number = random.next();
        if number % 10 == 0 {
            return (number / 10 % 100) as u32;
        }
        flooded = (flooded + 1) % (KEYS - 100);
        100 + flooded
    };
    (0..count).map(|_| draw()).collect()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("--decisions") {
        let mode = arguments.next().unwrap_or_default();
        let count = arguments.next().and_then(|count| count.parse().ok());
        return decisions::run(&mode, count.unwrap_or(500), &zipf(100_000, 1.0));
    }
    let is_smoke = std::env::args().any(|argument| argument == "--smoke");
    let count = if is_smoke { 40_000 } else { 4_000_000 };
    let keys: Vec<Vec<u8>> = (0..KEYS)
        .map(|key| format!("customer-{key:08}").into_bytes())
        .collect();
    type Run = fn(&[u32], &[Vec<u8>]) -> Answer;
    let sketches: [(&str, Run); 5] = [
        ("tidegate, 1,000 keys", tidegate),
        ("tidegate, 4,000 keys", tidegate_large),
        ("heavykeeper TopK", top_k),
        ("heavykeeper BucketedTopK", bucketed),
        ("heavykeeper CuckooTopK", cuckoo),
    ];
    println!(
        "| stream | sketch | ns per addition | KiB | found of the top 100 | mean error | largest error | stated bounds that do not hold |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (stream, additions) in [
        ("Zipf, s = 1.2", zipf(count, 1.2)),
        ("Zipf, s = 1.0", zipf(count, 1.0)),
        ("100 heavy keys in a flood", flood(count)),
        ("uniform", uniform(count)),
    ] {
        let mut exact: HashMap<&[u8], u64> = HashMap::new();
        for &key in &additions {
            *exact.entry(&keys[key as usize]).or_default() += 1;
        }
        let mut ranked: Vec<u64> = exact.values().copied().collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        // Several keys may have the same count as the last key in the list.
        let least = ranked[WANTED.min(ranked.len()) - 1];
        // The sketches are measured alternately, so that other load on the machine affects all of
        // them equally.
        let mut nanos = vec![Vec::new(); sketches.len()];
        let mut answers: Vec<Option<Answer>> = sketches.iter().map(|_| None).collect();
        for round in 0..ROUNDS {
            for turn in 0..sketches.len() {
                let at = (turn + round) % sketches.len();
                let answer = sketches[at].1(&additions, &keys);
                nanos[at].push(answer.nanos);
                answers[at] = Some(answer);
            }
        }
        for ((name, _), (nanos, answer)) in sketches.iter().zip(nanos.iter_mut().zip(answers)) {
            let Some(answer) = answer else { continue };
            nanos.sort_by(f64::total_cmp);
            print_row(stream, name, nanos[ROUNDS / 2], &answer, &exact, least);
        }
    }
}

fn print_row(
    stream: &str,
    name: &str,
    nanos: f64,
    answer: &Answer,
    exact: &HashMap<&[u8], u64>,
    least: u64,
) {
    let truth = |key: &[u8]| exact.get(key).copied().unwrap_or(0);
    let found: HashSet<&[u8]> = answer.rows.iter().map(|(key, ..)| key.as_slice()).collect();
    let found = found.iter().filter(|key| truth(key) >= least).count();
    let errors = answer
        .rows
        .iter()
        .map(|(key, estimate, _)| estimate.abs_diff(truth(key)));
    let errors: Vec<u64> = errors.collect();
    let mean = errors.iter().sum::<u64>() as f64 / errors.len().max(1) as f64;
    let broken = answer.rows.iter().filter(|(key, estimate, error)| {
        error.is_some_and(|error| truth(key) > *estimate || truth(key) < estimate - error)
    });
    let states_bounds = answer.rows.iter().all(|(_, _, error)| error.is_some());
    let broken = if states_bounds {
        broken.count().to_string()
    } else {
        "states none".to_owned()
    };
    println!(
        "| {stream} | {name} | {nanos:.1} | {} | {found} | {mean:.1} | {} | {broken} |",
        answer.bytes / 1024,
        errors.iter().max().unwrap_or(&0),
    );
}
