//! Where the cases record a defect of envoyproxy/ratelimit that we do not have, and what is right instead.
//!
//! Such a case says so in its `quirk`, and stands as it was found, because it tells what the original answers.

use crate::format::{Case, Expect};

/// The steps that are answered otherwise: the case, the number of the step, and what we answer.
const CORRECTED: &[(&str, usize, &str)] = &[
    // `a` = `b_c` and `a_b` = `c` are two counts.
    (
        "quirk-counter-collision",
        1,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 3, unit: MINUTE}, limit_remaining: 2, duration_until_reset: 60}]}",
    ),
    // A limit by the hour and one by the minute are two counts.
    (
        "quirk-unit-collision",
        1,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 3, unit: MINUTE}, limit_remaining: 2, duration_until_reset: 60}]}",
    ),
    // A reload that raises a limit helps at once: what was known to be over is forgotten.
    (
        "local-cache-raised-limit",
        2,
        "{overall_code: OK, statuses: [{code: OK, current_limit: {requests_per_unit: 100, unit: HOUR}, limit_remaining: 96, duration_until_reset: 2755}]}",
    ),
];

/// What step number `step` of `case` is to answer.
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
