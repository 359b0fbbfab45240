//! A verdict as JSON.

use serde::{Serialize, Serializer};
use tidegate_core::{Line, Outcome, Retry, Source, Verdict};

#[derive(Serialize)]
struct Document<'v> {
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    rule: Option<&'v str>,
    limit: Option<u64>,
    remaining: Option<u64>,
    reset_after_ms: Option<u64>,
    retry_after_ms: Option<u64>,
    delay_ms: u64,
    exactness: &'static str,
    /// Absent where there is but one.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'static str>,
    #[serde(serialize_with = "lines")]
    limits: &'v [Line<'v>],
}

#[derive(Serialize)]
struct LineDocument<'v> {
    rule: Option<&'v str>,
    policy: &'v str,
    allowed: bool,
    over_limit: bool,
    limit: u64,
    remaining: u64,
    reset_after_ms: u64,
    retry_after_ms: Option<u64>,
    delay_ms: u64,
    shadow: bool,
}

/// As much as most documents take, so that they are written in one piece of memory.
const USUAL_BYTES: usize = 512;

/// The verdict's document. Times are milliseconds, rounded up; a `retry_after_ms` of null is never.
pub(super) fn body(verdict: &Verdict<'_>) -> Vec<u8> {
    let leading: Option<&Outcome> = verdict.leading().map(|line| &line.outcome);
    let document = Document {
        allowed: verdict.allowed,
        reason: verdict.reason.map(tidegate_core::Reason::as_str),
        rule: verdict.rule,
        limit: leading.map(|outcome| outcome.limit),
        remaining: leading.map(|outcome| outcome.remaining),
        reset_after_ms: leading.map(|outcome| outcome.reset_after.as_millis_ceil()),
        retry_after_ms: millis(verdict.retry_after),
        delay_ms: verdict.delay.as_millis_ceil(),
        exactness: verdict.exactness.as_str(),
        source: (verdict.source != Source::Memory).then(|| verdict.source.as_str()),
        limits: &verdict.lines,
    };
    let mut octets = Vec::with_capacity(USUAL_BYTES);
    // Serialising to memory fails only for maps with keys that are no strings.
    let _ = serde_json::to_writer(&mut octets, &document);
    octets
}

/// Milliseconds until a retry would pass; `None` is never.
pub(crate) fn millis(retry: Retry) -> Option<u64> {
    retry.span().map(tidegate_core::Span::as_millis_ceil)
}

fn lines<S: Serializer>(lines: &[Line<'_>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(lines.iter().map(line))
}

fn line<'v>(line: &Line<'v>) -> LineDocument<'v> {
    let outcome = &line.outcome;
    LineDocument {
        rule: line.rule,
        policy: line.limit.policy(),
        allowed: outcome.allowed,
        over_limit: outcome.over_limit,
        limit: outcome.limit,
        remaining: outcome.remaining,
        reset_after_ms: outcome.reset_after.as_millis_ceil(),
        retry_after_ms: millis(outcome.retry_after),
        delay_ms: outcome.delay.as_millis_ceil(),
        shadow: line.shadow,
    }
}
