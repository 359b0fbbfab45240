//! Overrides: limits that replace a rule's limits for single keys, or for all keys that match a
//! pattern. Overrides can be changed at any time, and are kept when the rules are reloaded.
//!
//! A request is charged to the first of the following limits that exists:
//!
//! 1. the override for exactly its key;
//! 2. the override with the longest pattern that matches its key;
//! 3. the limits of its [plan](super::Plans);
//! 4. the rule's own limits.
//!
//! An override with a factor multiplies the limits that would apply without overrides: those of the
//! plan or the rule's own.
//!
//! The limits of overrides, plans and rules share the key's state, so spent units are kept when the
//! limits change.

mod key_filter;
mod key_override;
mod key_overrides;
mod patterns;
mod replacement;
mod rule_overrides;
mod stored;

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
};

pub(super) use self::rule_overrides::KeyHash;
use self::{
    key_filter::KeyFilter,
    stored::{Generation, StoredOverride},
};
pub use self::{replacement::Replacement, rule_overrides::RuleOverrides};
use super::{Rule, RuleError};
use crate::{limit::bounds, time::Timestamp};

/// The keys of a rule to which an override applies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OverrideTarget {
    /// The key with these values, in the order of the rule's key entries.
    Key(Vec<Box<str>>),
    /// The keys whose values match these patterns, in the order of the rule's key entries.
    /// [`Pattern::text`](super::Pattern::text) describes the patterns.
    Pattern(Vec<Box<str>>),
}

impl OverrideTarget {
    /// Returns the target for `values`: a pattern if a value contains a `*`, otherwise a key.
    #[must_use]
    pub fn of(values: &[&str]) -> Self {
        let is_pattern = values.iter().any(|value| value.contains('*'));
        let values = values.iter().map(|value| Box::from(*value)).collect();
        if is_pattern {
            Self::Pattern(values)
        } else {
            Self::Key(values)
        }
    }

    /// Returns the values of the key, or the patterns.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &str> {
        let (Self::Key(values) | Self::Pattern(values)) = self;
        values.iter().map(|value| &**value)
    }

    /// Returns whether the target is a pattern.
    #[must_use]
    pub fn is_pattern(&self) -> bool {
        matches!(self, Self::Pattern(_))
    }
}

/// An override: the limits that apply to certain keys instead of their rule's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The limits that apply instead of the rule's limits.
    pub replacement: Replacement,
    /// When the override expires; `None` if it lasts until it is removed.
    pub until: Option<Timestamp>,
    /// The reason given by the operator, at most [`bounds::MAX_REASON_BYTES`].
    pub reason: Box<str>,
}

impl Override {
    /// Returns whether the override has not expired at `now`.
    #[must_use]
    pub fn is_unexpired(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// The reason why an override cannot be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverrideError {
    /// The override is invalid for its rule.
    Invalid(RuleError),
    /// There are already [`bounds::MAX_OVERRIDES`] overrides.
    TooMany,
    /// The rule already has [`bounds::MAX_OVERRIDE_PATTERNS`] overrides with patterns.
    TooManyPatterns,
}

impl From<RuleError> for OverrideError {
    fn from(error: RuleError) -> Self {
        Self::Invalid(error)
    }
}

impl fmt::Display for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(error) => error.fmt(f),
            Self::TooMany => write!(
                f,
                "the maximum of {} overrides is reached; remove some first",
                bounds::MAX_OVERRIDES
            ),
            Self::TooManyPatterns => write!(
                f,
                "the maximum of {} patterns for one rule is reached; remove some first",
                bounds::MAX_OVERRIDE_PATTERNS
            ),
        }
    }
}

impl std::error::Error for OverrideError {}

/// The overrides of all rules. Clones share the overrides, so a change through one clone takes
/// effect in all clones.
#[derive(Clone, Debug, Default)]
pub struct Overrides(Arc<OverrideRegistry>);

#[derive(Debug, Default)]
struct OverrideRegistry {
    by_rule: Mutex<HashMap<Box<str>, Arc<RuleOverrides>>>,
    count: AtomicUsize,
    filter: Arc<KeyFilter>,
    /// The number of times that a replacement of all overrides was begun.
    generation: AtomicU32,
}

impl Overrides {
    /// Returns the overrides of the rule with this name. The rule does not have to exist yet. The
    /// overrides apply as soon as the rule exists.
    #[must_use]
    pub fn of_rule(&self, rule: &str) -> Arc<RuleOverrides> {
        let mut by_rule = self.by_rule();
        if let Some(overrides) = by_rule.get(rule) {
            return Arc::clone(overrides);
        }
        let overrides = Arc::new(RuleOverrides::new(Arc::clone(&self.0.filter)));
        by_rule.insert(rule.into(), Arc::clone(&overrides));
        overrides
    }

    /// Returns the overrides of each rule that has any, sorted by rule name.
    #[must_use]
    pub fn by_name(&self) -> Vec<(Box<str>, Arc<RuleOverrides>)> {
        let by_rule = self.by_rule();
        let used = by_rule
            .iter()
            .filter(|(_, overrides)| !overrides.is_empty());
        let mut used: Vec<_> = used
            .map(|(name, overrides)| (name.clone(), Arc::clone(overrides)))
            .collect();
        used.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        used
    }

    /// Returns the number of overrides, including expired overrides that have not been removed yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Returns whether there are no overrides.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks whether an override with `replacement` can be set for `target`, a key or a pattern of
    /// `rule`.
    ///
    /// # Errors
    ///
    /// Returns an error for `key` if the target is neither a key nor a pattern of `rule`. Returns
    /// an error for `limits` or `plan` if the limits are invalid for `rule`.
    pub fn check(
        rule: &Rule,
        target: &OverrideTarget,
        replacement: &Replacement,
    ) -> Result<(), RuleError> {
        rule_overrides::check_target(rule, target)?;
        replacement.check(rule)
    }

    /// Checks whether the override `replacement` of a key of `rule` decides the requests that name
    /// `plan`, or that name no plan.
    ///
    /// # Errors
    ///
    /// Returns why the limits of the plan or of the rule apply instead: the replacement is invalid
    /// for `rule` or, if it is a factor, for these limits.
    pub fn check_active(
        rule: &Rule,
        plan: Option<&str>,
        replacement: &Replacement,
    ) -> Result<(), RuleError> {
        replacement.check_with(rule, rule.limits_without_override(plan))
    }

    /// Sets the override for `target` in the rule named `rule`, and returns the override that it
    /// replaces. The new override takes effect immediately.
    ///
    /// This method does not [check](Self::check) whether the override is valid for the rule,
    /// because overrides are restored before their rules. An invalid override has no effect.
    ///
    /// # Errors
    ///
    /// Returns an error and changes nothing if there are too many overrides, or if a pattern is
    /// invalid.
    pub fn set(
        &self,
        rule: &str,
        target: &OverrideTarget,
        new: Override,
        now: Timestamp,
    ) -> Result<Option<Override>, OverrideError> {
        let overrides = self.of_rule(rule);
        self.make_room(&overrides, target, now)?;
        let generation = self.0.generation.load(Ordering::Relaxed);
        let replaced = overrides.set(target, new, generation)?;
        if self.0.filter.is_stale(self.len()) {
            self.rebuild_filter();
        }
        if replaced.is_none() {
            self.0.count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(replaced)
    }

    /// Checks whether there is room for an override for `target` in the rule named `rule`. If there
    /// are too many overrides, overrides that have expired at `now` are removed.
    ///
    /// # Errors
    ///
    /// Returns an error if there are too many overrides or patterns, or if a request could need too
    /// many pattern evaluations.
    pub fn check_room(
        &self,
        rule: &str,
        target: &OverrideTarget,
        now: Timestamp,
    ) -> Result<(), OverrideError> {
        let overrides = self.of_rule(rule);
        self.make_room(&overrides, target, now)?;
        if overrides.get(target).is_some() {
            return Ok(());
        }
        overrides.check_room(target)
    }

    /// Removes expired overrides if there is no room for another override for `target`.
    fn make_room(
        &self,
        overrides: &RuleOverrides,
        target: &OverrideTarget,
        now: Timestamp,
    ) -> Result<(), OverrideError> {
        if self.len() < bounds::MAX_OVERRIDES || overrides.get(target).is_some() {
            return Ok(());
        }
        self.remove_ended(now);
        if self.len() < bounds::MAX_OVERRIDES {
            Ok(())
        } else {
            Err(OverrideError::TooMany)
        }
    }

    /// Returns the override for exactly `target`, even if it has expired.
    #[must_use]
    pub fn get(&self, rule: &str, target: &OverrideTarget) -> Option<Override> {
        let overrides = self.by_rule().get(rule).map(Arc::clone)?;
        overrides.get(target)
    }

    /// Begins to replace all overrides. Overrides that are not [set](Self::set) again stay active
    /// until [`Self::end_replacement`] removes them.
    pub fn begin_replacement(&self) {
        self.0.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the overrides that have not been set since [`Self::begin_replacement`], and returns
    /// their number.
    pub fn end_replacement(&self) -> usize {
        let generation = self.0.generation.load(Ordering::Relaxed);
        self.retain(|_, set_in| set_in == generation)
    }

    /// Removes and returns the override for `target`.
    pub fn remove(&self, rule: &str, target: &OverrideTarget) -> Option<Override> {
        let overrides = self.by_rule().get(rule).map(Arc::clone)?;
        let removed = overrides.remove(target)?;
        self.0.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed)
    }

    /// Removes the overrides that have expired at `now` to free their memory. Expired overrides
    /// have no effect.
    pub fn remove_ended(&self, now: Timestamp) {
        self.retain(|stored, _| stored.is_unexpired(now));
    }

    /// Removes all overrides.
    pub fn clear(&self) {
        self.retain(|_, _| false);
    }

    fn retain(&self, keep: impl Fn(&StoredOverride, Generation) -> bool) -> usize {
        if self.is_empty() {
            return 0;
        }
        let all: Vec<_> = self.by_rule().values().map(Arc::clone).collect();
        let removed: usize = all.iter().map(|rule| rule.retain(&keep)).sum();
        self.0.count.fetch_sub(removed, Ordering::Relaxed);
        removed
    }

    fn rebuild_filter(&self) {
        self.0.filter.rebuild(|visit| {
            // List the rules while the filter is locked, so that no rule with a key in the filter
            // is missed.
            let all: Vec<_> = self.by_rule().values().map(Arc::clone).collect();
            for rule in all {
                rule.for_each_hash(visit);
            }
        });
    }

    /// Poisoning is ignored: no operation leaves the map in an inconsistent state, even if it
    /// panics.
    fn by_rule(&self) -> MutexGuard<'_, HashMap<Box<str>, Arc<RuleOverrides>>> {
        self.0
            .by_rule
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
