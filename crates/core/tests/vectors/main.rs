//! The vectors against the memory store: every `*.yaml` of the project's `vectors/` folder, or of the one
//! that the environment variable `TIDEGATE_VECTORS` names.

#![cfg(not(loom))]

mod compare;
mod format;
mod runner;

use std::path::PathBuf;

use tidegate_core::{Charge, MemoryBounds, MemoryStore, Span, Timestamp, Verdict};

use self::runner::{Answer, Ask, Report, Subject};

#[test]
fn vectors_hold_in_the_memory_store() {
    let folder = folder();
    let report = runner::run_folder(&folder, has_another_format, || {
        InMemory(MemoryStore::new(MemoryBounds::default()))
    });
    assert!(report.ran > 0, "no case ran in {}", folder.display());
    println!("{} cases ran", report.ran);
    assert_failures(&report, &[]);
}

/// The runner is no use if it passes everything.
#[test]
fn wrong_vectors_are_found_out() {
    let text = "
- {id: wrong, start: 2026-01-01T00:00:00Z, limits: [{algorithm: gcra, rate: 1, period_ms: 1000}], ops: [
    {at: 0, allowed: true, remaining: 1}, {at_us: 999999, allowed: false, retry_us: 2, reset_ms: 1},
    {at: 1000, cost: 2, allowed: false, retry_ms: 5}, {at: 1000, repeat: 2, allowed: true}],
   totals: {allowed: 1}, invalid: [{algorithm: gcra, rate: 1, period_ms: 1}], invalid_requests: [{key: a}]}
- {id: empty}";
    let mut failures = Vec::new();
    for case in format::parse(text).unwrap() {
        let mut subject = InMemory(MemoryStore::new(MemoryBounds::default()));
        failures.extend(runner::run_case(&case, &mut subject));
    }
    let report = Report { ran: 2, failures };
    let expected = [
        "wrong: op 0: remaining: expected 1, got 0",
        "wrong: op 1: retry: expected 2us, got 1us",
        "wrong: op 1: reset: expected 1ms, got 1us",
        "wrong: op 2: retry: expected 5ms, got never",
        "wrong: op 3: allowed: expected true, got false",
        "wrong: totals: allowed: expected 1, got 2",
        "wrong: invalid 0: expected a refusal that names the field, got None",
        "wrong: invalid request 0: expected a refusal that names the field, got None",
        "empty: asks for nothing",
    ];
    assert_failures(&report, &expected);
    let unknown = "[{id: x, ops: [{at: 0, alowed: true}]}]";
    assert!(format::parse(unknown).unwrap_err().contains("alowed"));
}

#[expect(
    clippy::disallowed_methods,
    reason = "whoever runs the tests says where more vectors are"
)]
fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../vectors");
    std::env::var("TIDEGATE_VECTORS").map_or_else(|_| own.into(), PathBuf::from)
}

/// The cases of Envoy's service speak of descriptors, and run against the gRPC door.
#[expect(clippy::print_stdout, reason = "nothing is skipped in silence")]
fn has_another_format(file: &str) -> bool {
    let other = file.starts_with("envoy");
    if other {
        println!("{file} has another format; the gRPC door runs it");
    }
    other
}

fn assert_failures(report: &Report, expected: &[&str]) {
    let got = report.failures.join("\n");
    assert_eq!(
        got,
        expected.join("\n"),
        "the failures of {} cases",
        report.ran
    );
}

struct InMemory(MemoryStore);

impl Subject for InMemory {
    fn answer(&mut self, ask: &Ask<'_>) -> Result<Answer, String> {
        let charge = Charge::new(ask.key.as_bytes(), ask.limits, ask.cost)
            .map_err(|problem| problem.to_string())?;
        let mut outcomes = Vec::new();
        let decision = self.0.check(&[charge], ask.now, ask.effect, &mut outcomes);
        Ok(Answer::of(&Verdict::of(&decision, &[charge], &outcomes)))
    }

    fn block(&mut self, key: &str, span: Span, now: Timestamp) -> Result<(), String> {
        let blocked = self.0.block(key.as_bytes(), Some(span), "by hand", now);
        blocked.then_some(()).ok_or_else(|| "no room".to_owned())
    }

    fn unblock(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        self.0.unblock(key.as_bytes(), now);
        Ok(())
    }

    fn reset(&mut self, key: &str, _now: Timestamp) -> Result<(), String> {
        self.0.reset(key.as_bytes());
        Ok(())
    }
}
