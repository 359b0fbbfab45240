//! Builds the limits that are sent with requests, and describes errors in them.

use tidegate_core::{LimitError, LimitSpec, Limits};
use tidegate_net::Problem;

use super::fields::FieldLocation;

/// Builds all limits, or reports all errors in them. `location` maps an index in `specs` to a
/// location in the request.
pub(super) fn build_limits(
    specs: &[LimitSpec],
    location: fn(usize) -> FieldLocation,
) -> Result<Limits, Problem> {
    let (mut limits, mut problems) = (Vec::new(), Vec::new());
    for (index, spec) in specs.iter().enumerate() {
        match spec.build() {
            Ok(limit) => limits.push(limit),
            Err(errors) => problems.extend(
                errors
                    .into_iter()
                    .map(|error| refused(location(index), error)),
            ),
        }
    }
    if !problems.is_empty() {
        return Err(Problem::several(problems));
    }
    Limits::new(limits).map_err(|error| refused(FieldLocation::Body, error))
}

fn refused(location: FieldLocation, error: LimitError) -> Problem {
    Problem::bad(format!("{location}{}", error.field), error.problem)
}
