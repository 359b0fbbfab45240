//! Expected responses for cases in which envoyproxy/ratelimit has a defect and Tidegate does not.
//!
//! The `quirk` field of a corrected case marks it as a bug. The expectation in the case file
//! remains unchanged, because it documents envoyproxy/ratelimit's response.

use crate::format::{Case, Expect};

/// The steps to which Tidegate responds differently: the case, the number of the step, and
/// Tidegate's response.
const CORRECTED: &[(&str, usize, &str)] = &[
    // `a` = `b_c` and `a_b` = `c` have separate counters.
    (
        "quirk-counter-collision",
        1,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 3, unit: MINUTE}, limit_remaining: 2, duration_until_reset: 60}]}",
    ),
    // Per-hour and per-minute limits have separate counters.
    (
        "quirk-unit-collision",
        1,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 3, unit: MINUTE}, limit_remaining: 2, duration_until_reset: 60}]}",
    ),
    // A reload that raises a limit takes effect immediately, because it clears the local cache.
    (
        "local-cache-raised-limit",
        2,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 100, unit: HOUR}, limit_remaining: 96, duration_until_reset: 2755}]}",
    ),
];

/// Returns the expected response to step number `step` of `case`.
pub(crate) fn expectation(case: &Case, step: usize) -> Expect {
    let written = &case.steps[step].expect;
    let is_defect = case.quirk.to_lowercase().starts_with("bug");
    let corrected = CORRECTED
        .iter()
        .find(|(id, at, _)| is_defect && *id == case.id && *at == step);
    corrected.map_or_else(
        || written.clone(),
        |(_, _, text)| serde_saphyr::from_str(text).unwrap(),
    )
}
