//! The limits that were built last: building one takes longer than deciding on it.

use std::sync::Arc;

use tidegate_core::{LimitError, LimitSpec, Limits};

use super::{Problem, fields::Place};

/// Limits by the specs from which they were built.
#[derive(Debug, Default)]
pub(super) struct LimitsCache {
    built: Vec<(Vec<LimitSpec>, Arc<Limits>)>,
    /// Whose turn it is to make room.
    next: usize,
}

impl LimitsCache {
    /// How many are kept. Callers use a handful of limits; whoever uses more builds them anew.
    const KEPT: usize = 16;

    /// The limits of `specs`, each of which stands in the request at its `place`.
    pub(super) fn limits(
        &mut self,
        specs: Vec<LimitSpec>,
        place: fn(usize) -> Place,
    ) -> Result<Arc<Limits>, Problem> {
        if let Some((_, limits)) = self.built.iter().find(|(known, _)| *known == specs) {
            return Ok(Arc::clone(limits));
        }
        let limits = Arc::new(build(&specs, place)?);
        let entry = (specs, Arc::clone(&limits));
        if self.built.len() < Self::KEPT {
            self.built.push(entry);
        } else {
            self.built[self.next] = entry;
            self.next = (self.next + 1) % Self::KEPT;
        }
        Ok(limits)
    }
}

/// Builds every limit, or finds everything that is wrong with any of them.
fn build(specs: &[LimitSpec], place: fn(usize) -> Place) -> Result<Limits, Problem> {
    let (mut limits, mut problems) = (Vec::new(), Vec::new());
    for (index, spec) in specs.iter().enumerate() {
        match spec.build() {
            Ok(limit) => limits.push(limit),
            Err(errors) => {
                problems.extend(errors.into_iter().map(|error| refused(place(index), error)))
            }
        }
    }
    if !problems.is_empty() {
        return Err(Problem::several(problems));
    }
    Limits::new(limits).map_err(|error| refused(Place::Body, error))
}

fn refused(place: Place, error: LimitError) -> Problem {
    Problem::bad(format!("{place}{}", error.field), error.problem)
}

#[cfg(test)]
mod tests {
    use tidegate_core::{AlgorithmName, Limit, notation};

    use super::*;

    #[test]
    fn limits_are_those_of_the_specs_however_many_there_are() {
        let mut cache = LimitsCache::default();
        for _ in 0..2 {
            for count in 1..100 {
                let rate = notation::rate(&format!("{count}/s")).unwrap();
                let limits = cache
                    .limits(
                        vec![LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)],
                        Place::Limit,
                    )
                    .unwrap();
                assert_eq!(limits.iter().map(Limit::quota).collect::<Vec<_>>(), [count]);
            }
        }
        assert_eq!(cache.built.len(), LimitsCache::KEPT);
    }
}
