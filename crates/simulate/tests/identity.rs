//! Tests that replaying the log of a request trace gives the same decisions as the live limiter.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

use std::{fmt::Write as _, fs, sync::Arc};

use tidegate::{Clock, Limiter, RateLimiter};
use tidegate_config::Config;
use tidegate_core::{Cost, Effect, MemoryStore, Request, Scratch, Span, Timestamp};
use tidegate_simulate::{
    EntryMapping, LogFormat, LogSource, Logs, RulesUnderTest, Simulation, SimulationHandle,
    SimulationReport,
};

/// One rule for each algorithm, and for each option that changes what is counted.
const RULES: &str = "
rules:
  - {name: gcra, key: [ip], limits: [{algorithm: gcra, rate: 3/s, burst: 2}]}
  - {name: bucket, key: [customer], limits: [{algorithm: token_bucket, capacity: 9, refill: 2/s}]}
  - {name: interval, key: [customer], limits: [{algorithm: token_bucket, capacity: 11, refill: 3/s, refill_mode: interval}]}
  - {name: meter, key: [path], limits: [{algorithm: leaky_bucket, capacity: 12, leak: 4/s}]}
  - {name: queue, when: {path: /b}, limits: [{algorithm: leaky_bucket, capacity: 5, leak: 2/s, queue: true}]}
  - {name: window, key: [ip, path], limits: [{algorithm: fixed_window, limit: 7, window: 3s}]}
  - {name: calendar, key: [ip], limits: [{algorithm: fixed_window, limit: 150, anchor: {calendar: day}}]}
  - {name: log, key: [ip], limits: [5/2s, 20/10s], algorithm: sliding_window_log}
  - {name: counter, key: [customer], limits: [{algorithm: sliding_window_counter, limit: 14, window: 5s, buckets: 10}]}
  - {name: weighted, key: [customer], limits: [{algorithm: sliding_window_counter, limit: 16, window: 5s}]}
  - {name: soft, key: [ip], soft: 50%, limits: [4/s]}
  - {name: strict, key: [ip], count_denied: true, limits: [{algorithm: fixed_window, limit: 9, window: 4s}]}
  - {name: costly, when: {path: /a}, key: [customer], cost: units, limits: [40/3s]}
  - {name: elastic, key: [customer], limits: [3/s], elastic: {extra: 100%, unused: {rule: all, share: 50%}}}
  - {name: all, limits: [120/10s]}
  - {name: watched, mode: shadow, key: [path], limits: [2/s]}
";

/// For each rule, the number of requests to which it applied, and the number of requests that it
/// denied.
type Tally = std::collections::BTreeMap<String, (u64, u64)>;

/// A small random number generator, so that the trace is the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Each rule is tested alone, so that a denial by another rule does not hide the tested rule's
/// decision.
#[test]
fn a_replayed_trace_gets_the_decisions_of_the_live_limiter() {
    let all: Vec<&str> = RULES
        .lines()
        .filter(|line| line.contains("name:"))
        .collect();
    let alone = all.iter().map(|rule| format!("rules:\n{rule}\n"));
    let files: Vec<String> = alone.filter(|file| Config::parse(file).is_ok()).collect();
    assert_eq!(
        files.len(),
        all.len() - 1,
        "only the elastic rule needs another"
    );
    for file in files.iter().map(String::as_str).chain([RULES]) {
        let (log, live) = live(file);
        let report = replay(file, &log);
        let replayed: Tally = report
            .rules
            .iter()
            .map(|rule| (rule.rule.clone(), (rule.requests, rule.denied)))
            .collect();
        assert_eq!(replayed, live, "{file}");
        if file == RULES {
            let denials = replayed.values().filter(|(_, denied)| *denied > 0).count();
            assert!(denials > 3, "the trace reaches few limits: {replayed:?}");
        } else {
            assert!(
                replayed.values().all(|(_, denied)| *denied > 20),
                "{replayed:?}"
            );
        }
    }
}

/// Decides a trace with a limiter on a manual clock. Returns the log of the trace, and the rules'
/// decisions.
fn live(file: &str) -> (String, Tally) {
    let config = Config::parse(file).unwrap();
    let mut now = Timestamp::from_micros(1_795_325_114_000_000);
    let clock = Clock::manual(now);
    let store = MemoryStore::new(config.memory);
    let limiter = Limiter::new(config.rules, store, clock.clone());
    let mut tally: Tally = limiter
        .rules()
        .iter()
        .map(|rule| (rule.name().to_owned(), (0, 0)))
        .collect();
    let mut numbers = Numbers(7);
    let mut log = String::new();
    for _ in 0..3_000 {
        now = now.after(Span::from_micros(numbers.below(120_000)));
        clock.set(now);
        let ip = format!("203.0.113.{}", numbers.below(3));
        let path = ["/a", "/b"][usize::try_from(numbers.below(2)).unwrap()];
        let customer = ["acme", "umbrella"][usize::try_from(numbers.below(2)).unwrap()];
        let units = (1 + numbers.below(9)).to_string();
        let entries = [
            ("ip", &*ip),
            ("path", path),
            ("customer", customer),
            ("units", &*units),
        ];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        for (rule, is_denied) in decide(&limiter, &request) {
            let counts = tally.get_mut(&rule).unwrap();
            counts.0 += 1;
            counts.1 += u64::from(is_denied);
        }
        writeln!(
            log,
            r#"{{"time":{},"client":"{ip}","path":"{path}","customer":"{customer}","units":{units}}}"#,
            now.as_micros()
        )
        .unwrap();
    }
    (log, tally)
}

/// Returns the decision of each rule that applies.
fn decide(limiter: &impl RateLimiter, request: &Request<'_>) -> Vec<(String, bool)> {
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let checked = limiter
        .check(&rules, &mut scratch, request, Effect::Charge)
        .ready();
    let verdict = checked.unwrap().unwrap();
    let mut decided: Vec<(String, bool)> = Vec::new();
    for line in &verdict.lines {
        let rule = line.rule.unwrap().to_owned();
        match decided.last_mut() {
            Some((last, is_denied)) if *last == rule => *is_denied |= !line.outcome.allowed,
            _ => decided.push((rule, !line.outcome.allowed)),
        }
    }
    decided
}

fn replay(file: &str, log: &str) -> SimulationReport {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.json");
    fs::write(&path, log).unwrap();
    let rules = RulesUnderTest::new("rules.yaml", Config::parse(file).unwrap());
    let logs = Logs {
        sources: vec![LogSource::File(path)],
        format: LogFormat::Detect,
        mappings: ["customer=customer", "units=units"]
            .map(|mapping| EntryMapping::parse(mapping).unwrap())
            .into(),
    };
    Simulation::of(&rules)
        .run(&logs, &Arc::new(SimulationHandle::default()))
        .unwrap()
}
