//! Compares a response with the expectations in the test vector, field by field.

use std::fmt::Display;

use tidegate_core::{RetryAfter, Span};

use super::{
    format::{Op, Wait},
    runner::Answer,
};

/// Returns a description of each field that is specified by the operation and differs in the
/// response.
pub(crate) fn compare(op: &Op, answer: &Answer, precision: Span) -> Result<Vec<String>, String> {
    let mut differences = Vec::new();
    differ(
        "allowed",
        op.allowed,
        Some(answer.allowed),
        &mut differences,
    );
    let reason = answer.reason.as_deref().unwrap_or("none");
    differ(
        "reason",
        op.reason.as_deref(),
        Some(reason),
        &mut differences,
    );
    differ(
        "over_limit",
        op.over_limit,
        answer.over_limit,
        &mut differences,
    );
    let asked = reason != "blocked";
    if op.remaining.is_some() && answer.remaining.is_none() && asked {
        differences.push("remaining: expected a number, got none".to_owned());
    }
    differ(
        "remaining",
        op.remaining,
        answer.remaining,
        &mut differences,
    );
    let retry_ms = op
        .retry_ms
        .as_ref()
        .map(|wait| wait.span(Span::from_millis));
    let retry_us = op
        .retry_us
        .as_ref()
        .map(|wait| wait.span(Span::from_micros));
    for expected in [retry_ms, retry_us].into_iter().flatten() {
        let expected = match expected? {
            RetryAfter::After(span) => RetryAfter::After(round_up(span, precision)),
            RetryAfter::Never => RetryAfter::Never,
        };
        differ(
            "retry",
            Some(Shown(expected)),
            Some(Shown(answer.retry)),
            &mut differences,
        );
    }
    let mut spans = |field: &str, millis: Option<u64>, micros: Option<u64>, got: Option<Span>| {
        let millis = millis.map(Span::from_millis);
        for expected in [millis, micros.map(Span::from_micros)]
            .into_iter()
            .flatten()
        {
            let expected = round_up(expected, precision);
            differ(field, Some(expected), got, &mut differences);
        }
    };
    spans("reset", op.reset_ms, op.reset_us, answer.reset);
    spans("delay", op.delay_ms, op.delay_us, answer.delay);
    Ok(differences)
}

fn differ<T: PartialEq + Display>(
    field: &str,
    expected: Option<T>,
    got: Option<T>,
    differences: &mut Vec<String>,
) {
    if let (Some(expected), Some(got)) = (expected, got)
        && expected != got
    {
        differences.push(format!("{field}: expected {expected}, got {got}"));
    }
}

#[derive(PartialEq)]
struct Shown(RetryAfter);

impl Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            RetryAfter::After(span) => write!(f, "{span}"),
            RetryAfter::Never => f.write_str("never"),
        }
    }
}

impl Wait {
    fn span(&self, unit: impl Fn(u64) -> Span) -> Result<RetryAfter, String> {
        match self {
            Self::Units(units) => Ok(RetryAfter::After(unit(*units))),
            Self::Word(word) if word == "never" => Ok(RetryAfter::Never),
            Self::Word(word) => Err(format!("a wait is a number or never, not {word}")),
        }
    }
}

fn round_up(span: Span, precision: Span) -> Span {
    let unit = precision.as_micros();
    Span::from_micros(span.as_micros().div_ceil(unit) * unit)
}
