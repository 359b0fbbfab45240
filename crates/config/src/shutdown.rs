//! `shutdown`: timing of the graceful shutdown.

use std::time::Duration;

use tidegate_core::{Span, notation};

use super::{
    report::Report,
    value::{Fields, Value},
};

/// The maximum of `pre_stop_delay` and of `drain`.
const LONGEST: Span = Span::from_secs(3_600);

/// The maximum of `handover`. During this time, requests wait, and the server handles no signal.
const LONGEST_HANDOVER: Span = Span::from_secs(60);

/// Timing of the graceful shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownConfig {
    /// `shutdown.pre_stop_delay`: how long the server reports not-ready but still serves new
    /// requests. The default is no delay; the maximum is an hour.
    pub pre_stop_delay: Duration,
    /// `shutdown.drain`: the time that requests in progress have to finish after `pre_stop_delay`,
    /// 1 ms to an hour; default 10 s.
    pub drain: Duration,
    /// `shutdown.handover`: how long an upgrade waits for requests in progress, 1 ms to a minute;
    /// default 1 s. With the memory store, an upgrade waits twice: until HTTP/2 connections have
    /// closed, while new connections wait, and then until all requests are decided, while all
    /// further requests wait.
    pub handover: Duration,
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        Self {
            pre_stop_delay: Duration::ZERO,
            drain: Duration::from_secs(10),
            handover: Duration::from_secs(1),
        }
    }
}

pub(super) fn shutdown(file: &Fields<'_>, report: &mut Report) -> ShutdownConfig {
    let mut shutdown = ShutdownConfig::default();
    let known = &["pre_stop_delay", "drain", "handover"];
    let what = "a map such as {pre_stop_delay: 5s, drain: 10s}";
    let value = file.get("shutdown");
    let Some(fields) = value.and_then(|value| value.fields(report, what, known)) else {
        return shutdown;
    };
    if let Some(delay) = fields.get("pre_stop_delay")
        && delay.scalar() != Some("off")
    {
        let what = "a duration such as 5s, or off";
        shutdown.pre_stop_delay = time(delay, what, LONGEST, report).unwrap_or_default();
    }
    if let Some(value) = fields.get("drain") {
        let drain = time(value, "a duration such as 10s", LONGEST, report);
        shutdown.drain = drain.unwrap_or(shutdown.drain);
    }
    if let Some(value) = fields.get("handover") {
        let handover = time(value, "a duration such as 1s", LONGEST_HANDOVER, report);
        shutdown.handover = handover.unwrap_or(shutdown.handover);
    }
    shutdown
}

fn time(value: &Value<'_>, what: &str, longest: Span, report: &mut Report) -> Option<Duration> {
    let span = value.parsed(report, what, notation::span)?;
    if span < Span::from_millis(1) || span > longest {
        value.wrong(report, format!("must be 1ms to {longest}"));
        return None;
    }
    Some(Duration::from_micros(span.as_micros()))
}
