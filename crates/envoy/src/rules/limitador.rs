//! The limits of a Limitador limits file.
//!
//! ```text
//! {namespace: api, max_value: 10, seconds: 60,
//!  conditions: ["descriptors[0]['req.method'] == 'POST'"],   all must hold
//!  variables: ["descriptors[0]['user_id']"]}                 one counter for each value
//! ```
//!
//! A limit of a namespace applies to a request if all of its conditions hold and all of its
//! variables have values. All limits that apply are checked.

use std::sync::Arc;

use super::DescriptorRule;
use crate::Descriptor;

/// The entry name that marks a condition in a counter key. No variable has this name.
const CONDITION: &str = "?";

/// A limit in a namespace.
#[derive(Clone, Debug)]
pub(crate) struct LimitadorLimit {
    pub(crate) id: Option<Box<str>>,
    pub(crate) name: Option<Box<str>>,
    pub(crate) max_value: u64,
    pub(crate) seconds: u64,
    pub(crate) conditions: Box<[LimitadorCondition]>,
    pub(crate) variables: Box<[LimitadorVariable]>,
    pub(crate) rule: Arc<DescriptorRule>,
}

/// A condition on an entry of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LimitadorCondition {
    /// The condition as written in the file.
    pub(crate) source: Box<str>,
    pub(crate) entry: EntryPath,
    /// Whether the entry's value must be equal to `value` or different from it.
    pub(crate) comparison: EqualityOperator,
    pub(crate) value: Box<str>,
}

/// A comparison of two strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EqualityOperator {
    Equal,
    NotEqual,
}

/// A variable: an entry for which each value has a separate counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LimitadorVariable {
    /// The variable as written in the file.
    pub(crate) source: Box<str>,
    pub(crate) entry: EntryPath,
}

/// A reference to an entry of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntryPath {
    /// The index of the descriptor in the request.
    pub(crate) descriptor: usize,
    pub(crate) key: Box<str>,
}

impl LimitadorLimit {
    /// Returns the values of the variables, if the limit applies to `descriptors`.
    pub(crate) fn values<'r>(&self, descriptors: &'r [Descriptor]) -> Option<Vec<&'r str>> {
        let hold = self
            .conditions
            .iter()
            .all(|condition| condition.holds(descriptors));
        let variables = self.variables.iter().filter(|_| hold);
        let values: Option<Vec<&str>> = variables
            .map(|variable| variable.entry.value_in(descriptors))
            .collect();
        values.filter(|_| hold)
    }

    /// Returns the entries of the counter key for these variable values. As in Limitador, the key
    /// contains neither the limit's maximum nor its name, so that a change of the maximum or the
    /// name does not reset the counter.
    pub(crate) fn key_parts<'l>(
        &'l self,
        values: &'l [&str],
    ) -> impl Iterator<Item = (&'l str, &'l str)> {
        let variables = self.variables.iter().zip(values);
        let variables = variables.map(|(variable, value)| (&*variable.source, *value));
        self.condition_parts().chain(variables)
    }

    /// Returns the key entries that all counters of the limit have in common.
    pub(crate) fn condition_parts(&self) -> impl Iterator<Item = (&str, &str)> {
        let conditions = self.conditions.iter();
        conditions.map(|condition| (CONDITION, &*condition.source))
    }

    /// Returns the variables and values of a counter. `parts` are the key entries after the
    /// conditions. Returns `None` if the key belongs to another limit.
    pub(crate) fn variables_of(&self, parts: Vec<(&str, &str)>) -> Option<Vec<(Box<str>, String)>> {
        if parts.len() != self.variables.len() {
            return None;
        }
        let pairs = self.variables.iter().zip(parts);
        let of_variable = |(variable, (name, value)): (&LimitadorVariable, (&str, &str))| {
            let is_own = *variable.source == *name;
            is_own.then(|| (variable.source.clone(), value.to_owned()))
        };
        pairs.map(of_variable).collect()
    }

    /// Returns the path that identifies the limit in metrics.
    pub(crate) fn path(&self) -> String {
        match &self.name {
            Some(name) => name.to_string(),
            None => format!("{} in {} s", self.max_value, self.seconds),
        }
    }
}

impl LimitadorCondition {
    /// Returns whether the condition holds. As in Limitador, a condition on a missing entry does
    /// not hold.
    fn holds(&self, descriptors: &[Descriptor]) -> bool {
        let Some(value) = self.entry.value_in(descriptors) else {
            return false;
        };
        match self.comparison {
            EqualityOperator::Equal => *value == *self.value,
            EqualityOperator::NotEqual => *value != *self.value,
        }
    }
}

impl EntryPath {
    /// Returns the value of the entry. If the key occurs more than once, returns the last value.
    fn value_in<'r>(&self, descriptors: &'r [Descriptor]) -> Option<&'r str> {
        let entries = descriptors.get(self.descriptor)?.entries.iter();
        let mut found = entries.rev().filter(|(key, _)| **key == *self.key);
        found.next().map(|(_, value)| value.as_str())
    }
}
