//! Conditions that select the requests to which a rule applies.

use super::{ActiveHours, Pattern, Request, RuleError, pattern::Work};
use crate::{limit::bounds, time::Timestamp};

/// A condition on one entry of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    entry: Box<str>,
    pattern: Pattern,
}

impl Condition {
    /// Requires that the entry `entry` matches `pattern`.
    ///
    /// # Errors
    ///
    /// Rejects an empty name and a name longer than [`bounds::MAX_ENTRY_NAME_BYTES`], because no
    /// request can have such an entry.
    pub fn new(entry: &str, pattern: Pattern) -> Result<Self, RuleError> {
        check_name(entry)?;
        Ok(Self {
            entry: entry.into(),
            pattern,
        })
    }

    pub(super) fn holds(&self, request: &Request<'_>) -> bool {
        self.evaluate(request, &mut Work::unbounded())
    }

    fn evaluate(&self, request: &Request<'_>, work: &mut Work) -> bool {
        self.pattern.evaluate(request.entry(&self.entry), work)
    }

    pub(super) fn entry(&self) -> &str {
        &self.entry
    }

    /// Returns the name of the entry and its pattern.
    pub(super) fn parts(&self) -> (&str, &Pattern) {
        (&self.entry, &self.pattern)
    }

    pub(super) fn pattern(&self) -> &Pattern {
        &self.pattern
    }
}

/// A list of conditions that must all hold, optionally only at certain times. An empty list always
/// holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct When {
    conditions: Box<[Condition]>,
    schedule: Option<ActiveHours>,
}

impl When {
    /// Requires all of `conditions`.
    #[must_use]
    pub fn all(conditions: Vec<Condition>) -> Self {
        Self {
            conditions: conditions.into(),
            schedule: None,
        }
    }

    /// Requires `schedule` to hold, in addition to the conditions.
    #[must_use]
    pub fn during(mut self, schedule: ActiveHours) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Returns true if the conditions hold for `request`. Does not evaluate the schedule.
    #[must_use]
    pub fn holds_for(&self, request: &Request<'_>) -> bool {
        self.conditions
            .iter()
            .all(|condition| condition.holds(request))
    }

    /// Returns true if the conditions hold for `request` and the schedule holds at `now`.
    #[must_use]
    pub fn holds_at(&self, request: &Request<'_>, now: Timestamp) -> bool {
        self.holds(request, now, &mut Work::unbounded())
    }

    /// Returns true if every request matches, because there are no conditions and no schedule.
    #[must_use]
    pub fn is_always(&self) -> bool {
        self.conditions.is_empty() && self.schedule.is_none()
    }

    /// Returns true if the conditions hold for `request` at `now`, and counts the pattern
    /// evaluations in `work`. The result is only valid if `work` is not exhausted.
    pub(super) fn holds(&self, request: &Request<'_>, now: Timestamp, work: &mut Work) -> bool {
        let mut conditions = self.conditions.iter();
        let conditions = conditions.all(|condition| condition.evaluate(request, work));
        // Evaluate the schedule last, because a schedule is more expensive than a condition.
        conditions && self.schedule().is_none_or(|schedule| schedule.holds(now))
    }

    /// Returns the names of the entries used in the conditions, without duplicates.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        let conditions = self.iter().enumerate();
        let firsts = conditions.filter(|(number, condition)| {
            let mut before = self.conditions[..*number].iter();
            before.all(|earlier| earlier.entry != condition.entry)
        });
        firsts.map(|(_, condition)| &*condition.entry)
    }

    /// Returns the maximum number of pattern evaluations for checking the conditions.
    pub(super) fn weight(&self) -> usize {
        let weights = self.iter().map(|condition| condition.pattern.weight());
        weights.fold(0, usize::saturating_add)
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Condition> {
        self.conditions.iter()
    }

    pub(super) fn schedule(&self) -> Option<&ActiveHours> {
        self.schedule.as_ref()
    }
}

/// Rejects an invalid entry name.
pub(super) fn check_name(entry: &str) -> Result<(), RuleError> {
    let most = bounds::MAX_ENTRY_NAME_BYTES;
    if entry.is_empty() {
        return Err(RuleError::new("", "the name of an entry must not be empty"));
    }
    if entry.len() > most {
        let problem = format!(
            "the entry name has {} bytes, which exceeds the maximum of {most}",
            entry.len()
        );
        return Err(RuleError::new("", problem));
    }
    Ok(())
}
