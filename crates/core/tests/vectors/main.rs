//! Runs the test vectors against the memory store.

#![cfg(not(loom))]

mod compare;
mod folder;
mod format;
mod prediction;
mod runner;

use tidegate_core::{Charge, MemoryBounds, MemoryStore, RetryAfter, Span, Timestamp, Verdict};

use self::{
    folder::Report,
    runner::{Answer, Ask, Subject},
};

#[test]
fn vectors_hold_in_the_memory_store() {
    folder::run(|_| InMemory(MemoryStore::new(MemoryBounds::default()))).assert_success();
}

/// Checks that the runner reports wrong expectations in test vectors.
#[test]
fn wrong_vectors_fail() {
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
    report.assert_failures(&expected);
    let unknown = "[{id: x, ops: [{at: 0, alowed: true}]}]";
    assert!(format::parse(unknown).unwrap_err().contains("alowed"));
}

/// Checks that the runner's predictions detect wrong wait times reported by a system under test.
#[test]
fn wrong_waits_fail() {
    let text = "[{id: lie, start: 2026-01-01T00:00:00Z, limits: [{algorithm: gcra, rate: 1, period_ms: 1000}],
        generate: {every_ms: 100, for_ms: 1100}}]";
    let case = &format::parse(text).unwrap()[0];
    let failures = |retry_after| {
        let honest = InMemory(MemoryStore::new(MemoryBounds::default()));
        runner::run_case(
            case,
            &mut Liar {
                honest,
                retry_after,
            },
        )
    };
    let short = failures(Span::from_millis(100));
    assert_eq!(short[0], "lie: at 200ms: denied although the wait is over");
    let long = failures(Span::from_secs(9));
    assert_eq!(long[0], "lie: at 200ms: the end of the wait has moved");
    let last = "lie: at 1s: admitted before the wait was over";
    assert_eq!(long.last().unwrap(), last);
}

struct InMemory(MemoryStore);

/// A system under test that reports a wrong wait time with every denial.
struct Liar {
    honest: InMemory,
    retry_after: Span,
}

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

impl Subject for Liar {
    fn answer(&mut self, ask: &Ask<'_>) -> Result<Answer, String> {
        let answer = self.honest.answer(ask)?;
        let retry = if answer.allowed {
            answer.retry
        } else {
            RetryAfter::After(self.retry_after)
        };
        Ok(Answer { retry, ..answer })
    }

    fn block(&mut self, key: &str, span: Span, now: Timestamp) -> Result<(), String> {
        self.honest.block(key, span, now)
    }

    fn unblock(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        self.honest.unblock(key, now)
    }

    fn reset(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        self.honest.reset(key, now)
    }
}
