//! Conditions: when a rule applies.

use super::{Pattern, Request, RuleError, Schedule, work::Work};
use crate::{bounds, time::Timestamp};

/// What one entry of a request must be.
#[derive(Clone, Debug)]
pub struct Condition {
    entry: Box<str>,
    pattern: Pattern,
}

impl Condition {
    /// The entry named `entry` matches `pattern`.
    ///
    /// # Errors
    ///
    /// Refuses an empty name and one over [`bounds::MAX_ENTRY_NAME_BYTES`], which no request has.
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

    pub(super) fn pattern(&self) -> &Pattern {
        &self.pattern
    }
}

/// Conditions that must all hold, perhaps at some times only. None at all always hold.
#[derive(Clone, Debug, Default)]
pub struct When {
    conditions: Box<[Condition]>,
    schedule: Option<Schedule>,
}

impl When {
    /// All of `conditions` hold.
    #[must_use]
    pub fn all(conditions: Vec<Condition>) -> Self {
        Self {
            conditions: conditions.into(),
            schedule: None,
        }
    }

    /// The conditions hold, and `schedule` does too.
    #[must_use]
    pub fn during(mut self, schedule: Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Whether the conditions hold for `request`. The schedule is not asked.
    #[must_use]
    pub fn holds_for(&self, request: &Request<'_>) -> bool {
        self.conditions
            .iter()
            .all(|condition| condition.holds(request))
    }

    /// Whether the conditions hold for `request` at `now`, and the schedule does too.
    #[must_use]
    pub fn holds_at(&self, request: &Request<'_>, now: Timestamp) -> bool {
        self.holds(request, now, &mut Work::unbounded())
    }

    /// Whether there are no conditions and no schedule, so that they hold for every request.
    #[must_use]
    pub fn is_always(&self) -> bool {
        self.conditions.is_empty() && self.schedule.is_none()
    }

    /// Whether the conditions hold for `request` at `now`, as far as `work` allows.
    pub(super) fn holds(&self, request: &Request<'_>, now: Timestamp, work: &mut Work) -> bool {
        let mut conditions = self.conditions.iter();
        let conditions = conditions.all(|condition| condition.evaluate(request, work));
        // Last, because it is the dearest.
        conditions && self.schedule().is_none_or(|schedule| schedule.holds(now))
    }

    /// The names of the entries that the conditions look at, each once.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        let conditions = self.iter().enumerate();
        let firsts = conditions.filter(|(number, condition)| {
            let mut before = self.conditions[..*number].iter();
            before.all(|earlier| earlier.entry != condition.entry)
        });
        firsts.map(|(_, condition)| &*condition.entry)
    }

    /// How many evaluations it takes at most to hold a request against the conditions.
    pub(super) fn weight(&self) -> usize {
        let weights = self.iter().map(|condition| condition.pattern.weight());
        weights.fold(0, usize::saturating_add)
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Condition> {
        self.conditions.iter()
    }

    pub(super) fn schedule(&self) -> Option<&Schedule> {
        self.schedule.as_ref()
    }
}

/// Refuses a name that no entry of a request can have.
pub(super) fn check_name(entry: &str) -> Result<(), RuleError> {
    let most = bounds::MAX_ENTRY_NAME_BYTES;
    if entry.is_empty() {
        return Err(RuleError::new("", "the name of an entry must not be empty"));
    }
    if entry.len() > most {
        let problem = format!(
            "{} bytes of name are over the maximum of {most}",
            entry.len()
        );
        return Err(RuleError::new("", problem));
    }
    Ok(())
}
