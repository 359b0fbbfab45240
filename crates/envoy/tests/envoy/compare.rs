//! Compares a response with a test case's expectation, field by field.

use serde_json::{Value, json};
use tidegate_envoy::{CurrentLimit, DescriptorStatus, Metadata, RateLimitAnswer};

use crate::format::{Expect, LimitFields, StatusFields};

/// Returns the differences between `expected` and `got`, one line per field.
pub(crate) fn compare(expected: &Expect, got: &Result<RateLimitAnswer, String>) -> Vec<String> {
    let mut differences = Differences::default();
    match (&expected.error, got) {
        (Some(expected), Err(got)) => differences.compare("error", expected, got),
        (Some(expected), Ok(got)) => differences.compare("error", expected, &format!("{got:?}")),
        (None, Err(got)) => differences.compare("error", "none", got),
        (None, Ok(got)) => answer(expected, got, &mut differences),
    }
    differences.0
}

fn answer(expected: &Expect, got: &RateLimitAnswer, differences: &mut Differences) {
    let overall = expected.overall_code.as_deref().unwrap_or("(none given)");
    differences.compare("overall_code", overall, got.overall_code.as_str());
    differences.compare("statuses", &expected.statuses.len(), &got.statuses.len());
    for (at, (expected, got)) in expected.statuses.iter().zip(&got.statuses).enumerate() {
        status(at, expected, got, differences);
    }
    let headers: Vec<(String, String)> = got
        .response_headers
        .iter()
        .map(|header| (header.name.to_string(), header.value.clone()))
        .collect();
    differences.compare(
        "response_headers_to_add",
        &expected.response_headers_to_add,
        &headers,
    );
    differences.compare(
        "dynamic_metadata",
        &expected.dynamic_metadata,
        &got.dynamic_metadata.as_ref().map(json_of),
    );
}

fn status(
    at: usize,
    expected: &StatusFields,
    got: &DescriptorStatus,
    differences: &mut Differences,
) {
    let field = |name: &str| format!("statuses[{at}].{name}");
    differences.compare(&field("code"), expected.code.as_str(), got.code.as_str());
    differences.compare(
        &field("current_limit"),
        &expected.current_limit,
        &got.current_limit.as_ref().map(fields_of),
    );
    differences.compare(
        &field("limit_remaining"),
        &expected.limit_remaining,
        &got.limit_remaining,
    );
    let seconds = got.duration_until_reset.map(|span| {
        assert_eq!(
            span.as_micros() % 1_000_000,
            0,
            "{} is in whole seconds",
            field("duration_until_reset")
        );
        span.as_secs_ceil()
    });
    differences.compare(
        &field("duration_until_reset"),
        &expected.duration_until_reset,
        &seconds,
    );
}

fn fields_of(limit: &CurrentLimit) -> LimitFields {
    LimitFields {
        requests_per_unit: limit.requests_per_unit,
        unit: limit.unit.as_str().to_owned(),
        name: limit.name.as_deref().unwrap_or_default().to_owned(),
    }
}

/// Converts metadata to JSON. An integral number becomes an integer, because the test cases contain
/// integers.
pub(crate) fn json_of(metadata: &Metadata) -> Value {
    match metadata {
        Metadata::Null => Value::Null,
        Metadata::Truth(truth) => json!(truth),
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the number is a non-negative integer"
        )]
        Metadata::Number(number) if number.fract() == 0.0 && *number >= 0.0 => {
            json!(*number as u64)
        }
        Metadata::Number(number) => json!(number),
        Metadata::Text(text) => json!(&**text),
        Metadata::List(items) => items.iter().map(json_of).collect(),
        Metadata::Map(members) => members
            .iter()
            .map(|(name, value)| (name.to_string(), json_of(value)))
            .collect(),
    }
}

#[derive(Default)]
struct Differences(Vec<String>);

impl Differences {
    fn compare<T: PartialEq + std::fmt::Debug + ?Sized>(
        &mut self,
        field: &str,
        expected: &T,
        got: &T,
    ) {
        if expected != got {
            self.0
                .push(format!("{field}: expected {expected:?}, got {got:?}"));
        }
    }
}
