//! Spans for decisions in distributed tracing.
//!
//! The spans use the `tracing` crate and have the target [`TARGET`]. The spans are off until the
//! program calls [`enable`]. While the spans are off, the only overhead is one atomic load per
//! decision.
//!
//! ```text
//! client span ── traceparent ──▶ decide     a request to a listener; its rule and its outcome
//!                                  ├─ redis     the wait for Redis, if Redis decides
//!                                  └─ traceparent ──▶ upstream   (in the reverse proxy)
//! ```
//!
//! No attribute contains a key or the value of an entry.

use std::{fmt, sync::OnceLock};

use http::HeaderMap;
use tidegate_core::{Exactness, Reason, Source, Verdict};
use tracing::{Span, field::Empty};

use crate::metrics::ListenerKind;

/// The target of the spans.
pub const TARGET: &str = "tidegate::trace";

/// Reads and writes the trace context of spans in headers (W3C Trace Context).
pub trait Propagator: fmt::Debug + Send + Sync {
    /// Makes the span in `headers` the parent of `span`. Ignores invalid headers.
    fn extract(&self, headers: &HeaderMap, span: &Span);

    /// Writes the context of `span` into `headers`.
    fn inject(&self, span: &Span, headers: &mut HeaderMap);

    /// Returns the trace ID of `span`, as 32 hexadecimal digits; `None` if the trace is not
    /// exported.
    fn trace_id(&self, span: &Span) -> Option<String>;
}

static PROPAGATOR: OnceLock<Box<dyn Propagator>> = OnceLock::new();

/// Turns spans on for this process. Returns false if spans were already on.
pub fn enable(propagator: Box<dyn Propagator>) -> bool {
    PROPAGATOR.set(propagator).is_ok()
}

/// The outcome of a decision, for its span.
#[derive(Clone, Copy, Debug)]
pub struct TracedOutcome<'a> {
    /// `allowed`, or the reason for the denial.
    pub outcome: &'a str,
    /// The rule of the verdict.
    pub rule: Option<&'a str>,
    /// The exactness of the decision.
    pub exactness: Option<Exactness>,
    /// The component that decided.
    pub source: Option<Source>,
    /// The number of limits that were evaluated.
    pub limits: usize,
}

impl<'a> TracedOutcome<'a> {
    fn of(verdict: &Verdict<'a>) -> Self {
        Self {
            outcome: outcome(verdict.reason),
            rule: verdict.rule,
            exactness: Some(verdict.exactness),
            source: Some(verdict.source),
            limits: verdict.lines.len(),
        }
    }
}

/// Returns the outcome that a span records: `allowed`, or the reason for the denial.
#[must_use]
pub fn outcome(reason: Option<Reason>) -> &'static str {
    reason.map_or("allowed", Reason::as_str)
}

/// Creates a span named `name` for a request to `listener`. The trace context in `headers` is the
/// parent of the span. If tracing is off, the span is empty.
#[must_use]
pub fn request_span(listener: ListenerKind, name: &'static str, headers: &HeaderMap) -> Span {
    let Some(propagator) = PROPAGATOR.get() else {
        return Span::none();
    };
    let span = decision_span(listener, name);
    propagator.extract(headers, &span);
    span
}

/// Creates a span for a decision without an HTTP request, such as a Redis protocol command. The
/// span has no parent. If tracing is off, the span is empty.
#[must_use]
pub fn command_span(listener: ListenerKind) -> Span {
    match PROPAGATOR.get() {
        Some(_) => decision_span(listener, "decide"),
        None => Span::none(),
    }
}

fn decision_span(listener: ListenerKind, name: &'static str) -> Span {
    tracing::info_span!(
        target: TARGET,
        "decide",
        otel.name = name,
        otel.kind = "server",
        tidegate.listener = listener.as_str(),
        tidegate.rule = Empty,
        tidegate.outcome = Empty,
        tidegate.exactness = Empty,
        tidegate.source = Empty,
        tidegate.limits = Empty,
    )
}

/// Creates a span for the time during which a decision waits for Redis. The span is a child of the
/// current span. If tracing is off, the span is empty.
pub(crate) fn redis_span() -> Span {
    if PROPAGATOR.get().is_none() {
        return Span::none();
    }
    tracing::info_span!(
        target: TARGET,
        "redis",
        otel.kind = "client",
        db.system.name = "redis",
        db.operation.name = "EVALSHA",
    )
}

/// Records `verdict` in the span of its request.
pub(crate) fn record_verdict(listener: ListenerKind, verdict: &Verdict<'_>) {
    if PROPAGATOR.get().is_some() {
        record(listener, &TracedOutcome::of(verdict));
    }
}

/// Works like [`record_verdict`], but calls `verdict` only if tracing is on.
pub(crate) fn record_with<'r>(listener: ListenerKind, verdict: impl FnOnce() -> Verdict<'r>) {
    if PROPAGATOR.get().is_some() {
        record(listener, &TracedOutcome::of(&verdict()));
    }
}

/// Records the outcome of a decision in the span of its request. A Redis protocol command that is
/// decided without a call to Redis has no span. A decision without a span gets a separate span
/// without a duration.
pub fn record(listener: ListenerKind, decided: &TracedOutcome<'_>) {
    if PROPAGATOR.get().is_none() {
        return;
    }
    let current = Span::current();
    let is_own = |span: &Span| span.metadata().is_some_and(|data| data.target() == TARGET);
    let span = if is_own(&current) {
        current
    } else {
        decision_span(listener, "decide")
    };
    span.record("tidegate.outcome", decided.outcome);
    span.record("tidegate.limits", decided.limits);
    if let Some(rule) = decided.rule {
        span.record("tidegate.rule", rule);
    }
    if let Some(exactness) = decided.exactness {
        span.record("tidegate.exactness", exactness.as_str());
    }
    if let Some(source) = decided.source {
        span.record("tidegate.source", source.as_str());
    }
}

/// Returns the trace ID of the current span; `None` if tracing is off or the trace is not exported.
pub(crate) fn trace_id() -> Option<String> {
    PROPAGATOR.get()?.trace_id(&Span::current())
}

/// Writes the context of the current span into `headers`, so that the receiver of the request
/// continues the trace. If tracing is off, the headers stay unchanged.
pub fn inject(headers: &mut HeaderMap) {
    if let Some(propagator) = PROPAGATOR.get() {
        propagator.inject(&Span::current(), headers);
    }
}
