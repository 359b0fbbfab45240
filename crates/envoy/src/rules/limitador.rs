//! The limits of a Limitador limits file.
//!
//! ```text
//! {namespace: api, max_value: 10, seconds: 60,
//!  conditions: ["descriptors[0]['req.method'] == 'POST'"],   all must hold
//!  variables: ["descriptors[0]['user_id']"]}                 one counter for each value
//! ```
//!
//! Every limit of a namespace whose conditions hold, and whose variables have values, applies.

use std::sync::Arc;

use super::Rule;
use crate::Descriptor;

/// The name of a condition in the key of a counter. No variable has it.
const CONDITION: &str = "?";

/// A limit of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct LimitadorLimit {
    pub(crate) id: Option<Box<str>>,
    pub(crate) name: Option<Box<str>>,
    pub(crate) max_value: u64,
    pub(crate) seconds: u64,
    pub(crate) conditions: Box<[Condition]>,
    pub(crate) variables: Box<[Variable]>,
    pub(crate) rule: Arc<Rule>,
}

/// A condition on an entry of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    /// The text in the file.
    pub(crate) source: Box<str>,
    pub(crate) entry: EntryPath,
    /// Whether the entry must have the value, or must have another value.
    pub(crate) comparison: Comparison,
    pub(crate) value: Box<str>,
}

/// A comparison of two texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
}

/// A variable: an entry whose values have separate counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    /// The text in the file.
    pub(crate) source: Box<str>,
    pub(crate) entry: EntryPath,
}

/// An entry of a descriptor.
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

    /// Returns the parts of the key of a counter with these values. As in Limitador, the maximum
    /// and the name are not part of it, so that they can be changed without losing the count.
    pub(crate) fn key_parts<'l>(
        &'l self,
        values: &'l [&str],
    ) -> impl Iterator<Item = (&'l str, &'l str)> {
        let variables = self.variables.iter().zip(values);
        let variables = variables.map(|(variable, value)| (&*variable.source, *value));
        self.condition_parts().chain(variables)
    }

    /// Returns the parts of the key that all counters of the limit have.
    pub(crate) fn condition_parts(&self) -> impl Iterator<Item = (&str, &str)> {
        let conditions = self.conditions.iter();
        conditions.map(|condition| (CONDITION, &*condition.source))
    }

    /// Returns the variables and values of a counter from the parts of its key after the
    /// conditions; `None` if the key belongs to another limit.
    pub(crate) fn variables_of(&self, parts: Vec<(&str, &str)>) -> Option<Vec<(Box<str>, String)>> {
        if parts.len() != self.variables.len() {
            return None;
        }
        let pairs = self.variables.iter().zip(parts);
        let of_variable = |(variable, (name, value)): (&Variable, (&str, &str))| {
            let is_own = *variable.source == *name;
            is_own.then(|| (variable.source.clone(), value.to_owned()))
        };
        pairs.map(of_variable).collect()
    }

    /// Returns the path under which the limit is counted in metrics.
    pub(crate) fn path(&self) -> String {
        match &self.name {
            Some(name) => name.to_string(),
            None => format!("{} in {} s", self.max_value, self.seconds),
        }
    }
}

impl Condition {
    /// Returns whether the condition holds. It does not hold without the entry, as in Limitador.
    fn holds(&self, descriptors: &[Descriptor]) -> bool {
        let Some(value) = self.entry.value_in(descriptors) else {
            return false;
        };
        match self.comparison {
            Comparison::Equal => *value == *self.value,
            Comparison::NotEqual => *value != *self.value,
        }
    }
}

impl EntryPath {
    /// Returns the value of the entry; the last one if the key is repeated.
    fn value_in<'r>(&self, descriptors: &'r [Descriptor]) -> Option<&'r str> {
        let entries = descriptors.get(self.descriptor)?.entries.iter();
        let mut found = entries.rev().filter(|(key, _)| **key == *self.key);
        found.next().map(|(_, value)| value.as_str())
    }
}
