//! Benchmark of a metrics page with six time series per rule, which is one more than in the server.
//! The results are in ADR 0017. The environment variables make the allocator keep freed memory in
//! the process. Without them, most of the time is spent on page faults, and which encoder causes
//! them depends on the order of the encoders.
//!
//! ```sh
//! MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TOP_PAD_=100000000 \
//!     cargo run --release --manifest-path bench/Cargo.toml -p metrics
//! ```

#[path = "../../../crates/net/src/prometheus.rs"]
#[allow(dead_code, reason = "the server uses all of it")]
mod prometheus;
mod writer;

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use prometheus::{Format, Metric, encode};
use writer::Text;

const OUTCOMES: [&str; 4] = ["allowed", "limit", "blocked", "store"];

const NAME: &str = "tidegate_rule_decisions_total";
const HELP: &str = "Decisions by outcome and deciding rule.";
const DECISIONS: Metric<2> = Metric::counter(NAME, ["rule", "outcome"], HELP);

const SHADOW_NAME: &str = "tidegate_rule_shadow_denials_total";
const SHADOW_HELP: &str = "Times that a limit in shadow mode would have denied a request.";
const SHADOW: Metric<1> = Metric::counter(SHADOW_NAME, ["rule"], SHADOW_HELP);

const SOFT_NAME: &str = "tidegate_rule_soft_admissions_total";
const SOFT_HELP: &str = "Times that a limit admitted a request within its soft allowance.";
const SOFT: Metric<1> = Metric::counter(SOFT_NAME, ["rule"], SOFT_HELP);

struct Rule {
    name: String,
    decisions: [AtomicU64; OUTCOMES.len()],
    shadow_denials: AtomicU64,
    soft_admissions: AtomicU64,
}

impl Rule {
    fn new(number: u64) -> Self {
        let count = |factor: u64| AtomicU64::new(number * 7_919 * factor);
        Self {
            name: format!("checkout per customer {number}"),
            decisions: [count(1_000), count(10), count(1), count(0)],
            shadow_denials: count(3),
            soft_admissions: count(100),
        }
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn by_library(rules: &Arc<[Rule]>, format: Format) -> String {
    let rules = Arc::clone(rules);
    encode(format, move |page| {
        let decisions = rules.iter().flat_map(|rule| {
            let counts = OUTCOMES.iter().zip(&rule.decisions);
            counts.map(|(outcome, count)| ([&*rule.name, *outcome], load(count)))
        });
        page.family(&DECISIONS, decisions);
        let shadow = rules.iter();
        page.family(
            &SHADOW,
            shadow.map(|rule| ([&*rule.name], load(&rule.shadow_denials))),
        );
        let soft = rules.iter();
        page.family(
            &SOFT,
            soft.map(|rule| ([&*rule.name], load(&rule.soft_admissions))),
        );
    })
}

fn by_writer(rules: &[Rule]) -> String {
    let mut text = Text::default();
    text.family(NAME, "counter", HELP);
    for rule in rules {
        for (outcome, count) in OUTCOMES.iter().zip(&rule.decisions) {
            text.sample(
                NAME,
                &[("rule", &rule.name), ("outcome", outcome)],
                load(count),
            );
        }
    }
    text.family(SHADOW_NAME, "counter", SHADOW_HELP);
    for rule in rules {
        text.sample(
            SHADOW_NAME,
            &[("rule", &rule.name)],
            load(&rule.shadow_denials),
        );
    }
    text.family(SOFT_NAME, "counter", SOFT_HELP);
    for rule in rules {
        text.sample(
            SOFT_NAME,
            &[("rule", &rule.name)],
            load(&rule.soft_admissions),
        );
    }
    text.finish()
}

const ROUNDS: usize = 51;

/// Measures `encoders` alternately, so that the machine's load affects all encoders equally.
fn measure(rules: usize, encoders: &[(&str, &dyn Fn() -> String)]) {
    let mut times: Vec<Vec<Duration>> = encoders.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for ((_, encode), times) in encoders.iter().zip(&mut times) {
            let start = Instant::now();
            black_box(encode());
            times.push(start.elapsed());
        }
    }
    for ((name, encode), mut times) in encoders.iter().zip(times) {
        times.sort_unstable();
        let allocations = allocation_counter::measure(|| drop(black_box(encode())));
        println!(
            "{rules:6} rules  {name:32} median {:7} µs  least {:7} µs  {:3} allocations  {:9} bytes at most  page {} bytes",
            times[ROUNDS / 2].as_micros(),
            times[0].as_micros(),
            allocations.count_total,
            allocations.bytes_max,
            encode().len(),
        );
    }
}

fn main() {
    // The server has labels for 1,000 rules, and one common label for all other rules.
    for number in [1_001, 10_000] {
        let rules: Arc<[Rule]> = (0..number).map(Rule::new).collect();
        assert_eq!(by_library(&rules, Format::Text), by_writer(&rules));
        let encoders: [(&str, &dyn Fn() -> String); 3] = [
            ("the former writer, text", &|| by_writer(&rules)),
            ("prometheus-client, text", &|| {
                by_library(&rules, Format::Text)
            }),
            ("prometheus-client, OpenMetrics", &|| {
                by_library(&rules, Format::OpenMetrics)
            }),
        ];
        measure(rules.len(), &encoders);
    }
}
