//! Holding times: how long requests hold the concurrency slots of each rule.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tidegate_core::{HoldingTime, Span};

/// The maximum number of rules whose holding times are recorded. The holding times of further rules
/// are ignored.
const MAX_OBSERVED_RULES: usize = 10_000;

/// The holding time of each rule, by rule name. Limits without a rule use an empty name.
#[derive(Debug, Default)]
pub(crate) struct HoldingTimes(Mutex<HashMap<Box<str>, HoldingTime>>);

impl HoldingTimes {
    /// Returns the holding time of `rule`, if a slot of the rule has ever been released.
    pub(crate) fn of(&self, rule: &str) -> Option<HoldingTime> {
        self.lock().get(rule).copied()
    }

    /// Records a request that held slots of `rule` for the time `held`.
    pub(crate) fn observe(&self, rule: &str, held: Span) {
        let mut rules = self.lock();
        if let Some(holding_time) = rules.get_mut(rule) {
            holding_time.observe(held);
        } else if rules.len() < MAX_OBSERVED_RULES {
            rules.entry(rule.into()).or_default().observe(held);
        }
    }

    /// Discards the holding times of a rule if `is_known` returns false for the rule's name.
    pub(crate) fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.lock().retain(|rule, _| is_known(rule));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, HoldingTime>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
