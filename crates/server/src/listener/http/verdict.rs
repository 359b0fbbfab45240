//! Serialises a verdict as JSON.
//!
//! The serialiser is written by hand, because serde would take longer to serialise two dozen fields
//! than the decision takes.

use tidegate_core::{Line, Outcome, RetryAfter, Source, Verdict};
use tidegate_tower::RuleNames;

/// The initial buffer size in bytes. Most documents fit into this buffer without reallocation.
const USUAL_BYTES: usize = 512;

/// Returns the JSON document. Times are in milliseconds, rounded up. If a retry can never succeed,
/// `retry_after_ms` is null.
///
/// If `names` is `Hidden`, rule names and shadow limits are omitted, because clients are not
/// allowed to see them.
pub(super) fn body(verdict: &Verdict<'_>, names: RuleNames) -> Vec<u8> {
    body_with_capacity(verdict, names, 0)
}

/// Returns the document like [`body`], with capacity for `extra` bytes that the caller appends.
pub(super) fn body_with_capacity(verdict: &Verdict<'_>, names: RuleNames, extra: usize) -> Vec<u8> {
    let leading: Option<&Outcome> = verdict.leading().map(|line| &line.outcome);
    let mut json = Writer(Vec::with_capacity(USUAL_BYTES + extra));
    json.raw(r#"{"allowed":"#).truth(verdict.allowed);
    if let Some(reason) = verdict.reason {
        json.raw(r#","reason":"#).plain(reason.as_str());
    }
    if names == RuleNames::Shown {
        json.raw(r#","rule":"#).text(verdict.rule);
    }
    json.raw(r#","limit":"#)
        .number(leading.map(|outcome| outcome.limit));
    json.raw(r#","remaining":"#)
        .number(leading.map(|outcome| outcome.remaining));
    let reset_after = leading.map(|outcome| outcome.reset_after.as_millis_ceil());
    json.raw(r#","reset_after_ms":"#).number(reset_after);
    json.raw(r#","retry_after_ms":"#)
        .number(millis(verdict.retry_after));
    if verdict.leading().is_some_and(Line::is_retry_estimated) {
        json.raw(ESTIMATED);
    }
    json.raw(r#","delay_ms":"#)
        .number(Some(verdict.delay.as_millis_ceil()));
    json.raw(r#","exactness":"#)
        .plain(verdict.exactness.as_str());
    // The memory store is the default source, so it is omitted.
    if verdict.source != Source::Memory {
        json.raw(r#","source":"#).plain(verdict.source.as_str());
    }
    json.raw(r#","limits":["#);
    let is_shown = |line: &&Line<'_>| names == RuleNames::Shown || !line.shadow;
    for (index, line) in verdict.lines.iter().filter(is_shown).enumerate() {
        json.raw(if index > 0 { ",{" } else { "{" });
        if names == RuleNames::Shown {
            json.raw(r#""rule":"#).text(line.rule);
            json.raw(",");
        }
        write_line(&mut json, line);
    }
    json.raw("]}");
    json.0
}

fn write_line(json: &mut Writer, line: &Line<'_>) {
    let outcome = &line.outcome;
    json.raw(r#""policy":"#).plain(line.limit.policy());
    json.raw(r#","allowed":"#).truth(outcome.allowed);
    json.raw(r#","over_limit":"#).truth(outcome.over_limit);
    json.raw(r#","limit":"#).number(Some(outcome.limit));
    json.raw(r#","remaining":"#).number(Some(outcome.remaining));
    json.raw(r#","reset_after_ms":"#)
        .number(Some(outcome.reset_after.as_millis_ceil()));
    json.raw(r#","retry_after_ms":"#)
        .number(millis(outcome.retry_after));
    if line.is_retry_estimated() {
        json.raw(ESTIMATED);
    }
    json.raw(r#","delay_ms":"#)
        .number(Some(outcome.delay.as_millis_ceil()));
    json.raw(r#","shadow":"#).truth(line.shadow);
    json.raw("}");
}

/// A JSON field that marks the preceding `retry_after_ms` as an estimate.
const ESTIMATED: &str = r#","retry_after_estimated":true"#;

/// Returns the number of milliseconds until a retry would succeed; `None` means never.
pub(crate) fn millis(retry: RetryAfter) -> Option<u64> {
    retry.span().map(tidegate_core::Span::as_millis_ceil)
}

/// A JSON writer that writes `None` as null.
#[derive(Debug)]
struct Writer(Vec<u8>);

impl Writer {
    // Always inlined, because almost all arguments are literals, which the compiler then copies
    // directly.
    #[inline(always)]
    fn raw(&mut self, json: &str) -> &mut Self {
        self.0.extend_from_slice(json.as_bytes());
        self
    }

    fn truth(&mut self, truth: bool) {
        self.raw(if truth { "true" } else { "false" });
    }

    fn number(&mut self, number: Option<u64>) {
        match number {
            // About half of the numbers in a typical verdict are 0.
            Some(0) => self.raw("0"),
            Some(number) => self.raw(itoa::Buffer::new().format(number)),
            None => self.raw("null"),
        };
    }

    /// Writes a quoted string without escaping. The string must not contain characters that need
    /// escaping. The string is a fixed word or a policy, which may contain a time zone name.
    fn plain(&mut self, text: &str) {
        debug_assert!(is_plain(text), "{text:?}");
        self.raw("\"").raw(text).raw("\"");
    }

    /// Writes a quoted and escaped string.
    fn text(&mut self, text: Option<&str>) {
        let Some(text) = text else {
            self.raw("null");
            return;
        };
        if is_plain(text) {
            return self.plain(text);
        }
        // Writing to a buffer in memory does not fail.
        let _ = serde_json::to_writer(&mut self.0, text);
    }
}

/// Returns whether `text` needs no escaping in JSON.
fn is_plain(text: &str) -> bool {
    let is_plain = |byte: u8| !matches!(byte, b'"' | b'\\' | ..b' ');
    text.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        AlgorithmName, Anchor, Calendar, CalendarUnit, Charge, Cost, Decision, Effect, LimitSpec,
        Limits, MemoryBounds, MemoryStore, StoreDecision, Timestamp, notation,
    };

    use super::*;

    fn limits(texts: &[&str]) -> Limits {
        let limit = |text: &&str| {
            let rate = notation::rate(text).unwrap();
            LimitSpec::shorthand(rate, AlgorithmName::FixedWindow)
                .build()
                .unwrap()
        };
        Limits::new(texts.iter().map(limit).collect()).unwrap()
    }

    /// Parses the document with serde_json, so that the test does not depend on the writer.
    fn read(decision: Decision, charges: &[Charge<'_>], outcomes: &[Outcome]) -> serde_json::Value {
        let decided = StoreDecision::in_memory(decision);
        serde_json::from_slice(&body(&decided.verdict(charges, outcomes), RuleNames::Shown))
            .unwrap()
    }

    #[test]
    fn every_field_is_there_and_is_json() {
        let limits = limits(&["1/s", "5/min"]).named(r#"a "b" \ c"#);
        let charge = [Charge::new(b"k", &limits, Cost::ONE).unwrap()];
        let store = MemoryStore::new(MemoryBounds::default());
        let (now, mut outcomes) = (Timestamp::from_micros(60_000_000), Vec::new());
        store.check(&charge, now, Effect::Charge, &mut outcomes);
        let decision = store.check(&charge, now, Effect::Charge, &mut outcomes);
        let policies: Vec<&str> = limits.iter().map(|limit| limit.policy().as_ref()).collect();
        let line = |policy: &str,
                    allowed: bool,
                    limit: u64,
                    remaining: u64,
                    reset: u64,
                    retry: u64| {
            serde_json::json!({
                "rule": r#"a "b" \ c"#, "policy": policy, "allowed": allowed, "over_limit": false, "limit": limit,
                "remaining": remaining, "reset_after_ms": reset, "retry_after_ms": retry, "delay_ms": 0, "shadow": false,
            })
        };
        let expected = serde_json::json!({
            "allowed": false, "reason": "limit", "rule": r#"a "b" \ c"#, "limit": 1, "remaining": 0,
            "reset_after_ms": 1_000, "retry_after_ms": 1_000, "delay_ms": 0, "exactness": "exact",
            "limits": [line(policies[0], false, 1, 0, 1_000, 1_000), line(policies[1], true, 5, 4, 60_000, 0)],
        });
        assert_eq!(read(decision, &charge, &outcomes), expected);
    }

    /// A slot becomes free when the request that holds it completes. The server cannot know when
    /// the request completes.
    #[test]
    fn the_wait_for_a_concurrency_slot_is_marked_as_an_estimate() {
        let slots = LimitSpec {
            algorithm: Some(AlgorithmName::Concurrency),
            limit: Some(1),
            ..LimitSpec::default()
        };
        let slots = Limits::new(vec![slots.build().unwrap()]).unwrap();
        let rates = limits(&["5/min"]);
        let charges = [
            Charge::new(b"slots", &slots, Cost::ONE).unwrap(),
            Charge::new(b"rates", &rates, Cost::ONE).unwrap(),
        ];
        let (store, mut outcomes) = (MemoryStore::new(MemoryBounds::default()), Vec::new());
        let mut verdict = || {
            let now = Timestamp::from_micros(1);
            let decision = store.check(&charges, now, Effect::Charge, &mut outcomes);
            read(decision, &charges, &outcomes)
        };
        let mark = "retry_after_estimated";
        let (admitted, denied) = (verdict(), verdict());
        assert_eq!(admitted.get(mark), None);
        assert_eq!(admitted["limits"][0].get(mark), None);
        assert_eq!(
            (&denied["retry_after_ms"], &denied[mark]),
            (&100.into(), &true.into())
        );
        assert_eq!(denied["limits"][0][mark], true);
        assert_eq!(denied["limits"][1].get(mark), None, "this wait is exact");
    }

    #[test]
    fn the_source_is_written_if_there_are_several() {
        let zone = "America/Argentina/Buenos_Aires";
        let anchor = Anchor::Calendar(Calendar::new(CalendarUnit::Month, zone, None).unwrap());
        let spec = LimitSpec {
            algorithm: Some(AlgorithmName::FixedWindow),
            limit: Some(3),
            anchor: Some(anchor),
            ..LimitSpec::default()
        };
        let limits = Limits::new(vec![spec.build().unwrap()]).unwrap();
        let charge = [Charge::new(b"k", &limits, Cost::ONE).unwrap()];
        let (store, mut outcomes) = (MemoryStore::new(MemoryBounds::default()), Vec::new());
        let decision = store.check(&charge, Timestamp::default(), Effect::Charge, &mut outcomes);
        let decided = StoreDecision {
            source: Source::Redis,
            ..StoreDecision::in_memory(decision)
        };
        let body = body(&decided.verdict(&charge, &outcomes), RuleNames::Shown);
        let read: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(read["source"], "redis");
        let policy = read["limits"][0]["policy"].as_str().unwrap();
        assert!(policy.contains(zone), "{policy}");
    }

    #[test]
    fn fields_without_a_value_are_null() {
        let blocked = Decision::blocked(0, None, Timestamp::default());
        let expected = serde_json::json!({
            "allowed": false, "reason": "blocked", "rule": null, "limit": null, "remaining": null,
            "reset_after_ms": null, "retry_after_ms": null, "delay_ms": 0, "exactness": "exact", "limits": [],
        });
        assert_eq!(read(blocked, &[], &[]), expected);
    }
}
