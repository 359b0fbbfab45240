//! A request: the entries that describe it, and its cost.

use crate::{
    eval::{Cost, RequestError},
    limit::bounds,
};

/// A request to be rate limited: the entries that describe it, and its cost.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Cost, Request};
///
/// let entries = [("ip", "203.0.113.9"), ("path", "/login")];
/// let request = Request::new(&entries, Cost::ONE).unwrap();
/// assert_eq!(request.entry("path"), Some("/login"));
///
/// let twice = [("ip", "203.0.113.9"), ("ip", "203.0.113.10")];
/// assert_eq!(Request::new(&twice, Cost::ONE).unwrap_err().field, "entries.ip");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    entries: &'a [(&'a str, &'a str)],
    cost: Cost,
    body_costs: Option<&'a [(u64, Cost)]>,
}

impl<'a> Request<'a> {
    /// Creates a request from `entries`, which are name-value pairs.
    ///
    /// # Errors
    ///
    /// Rejects more than [`bounds::MAX_ENTRIES`] entries, an empty or duplicate name, a name longer
    /// than [`bounds::MAX_ENTRY_NAME_BYTES`], and a value longer than
    /// [`bounds::MAX_ENTRY_VALUE_BYTES`]. If the error is about an entry with a name, its field is
    /// `entries.<name>`.
    pub fn new(entries: &'a [(&'a str, &'a str)], cost: Cost) -> Result<Self, RequestError> {
        if entries.len() > bounds::MAX_ENTRIES {
            let problem = over(entries.len(), "entries", bounds::MAX_ENTRIES);
            return Err(RequestError::new("entries", problem));
        }
        for (index, (name, value)) in entries.iter().enumerate() {
            check_entry(name, value)?;
            if entries[..index].iter().any(|(earlier, _)| earlier == name) {
                let problem = "is given twice; give every entry once";
                return Err(RequestError::new(field(name), problem));
            }
        }
        Ok(Self {
            entries,
            cost,
            body_costs: None,
        })
    }

    /// Adds the costs read from the request body, each with the [scope](super::Rule::key_scope) of
    /// its rule. If a rule's cost depends on the body and the rule is not in the list, the rule
    /// charges the default of its [`BodyCost`](super::BodyCost). Without this call, every rule
    /// charges [`Self::cost`].
    #[must_use]
    pub fn with_body_costs(self, costs: &'a [(u64, Cost)]) -> Self {
        Self {
            body_costs: Some(costs),
            ..self
        }
    }

    /// Returns whether [`Self::new`] accepts one more entry with this `value` in addition to
    /// `others` valid entries.
    #[must_use]
    pub fn has_room(others: usize, value: &str) -> bool {
        others < bounds::MAX_ENTRIES && value.len() <= bounds::MAX_ENTRY_VALUE_BYTES
    }

    /// Returns the value of the entry `name`.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&'a str> {
        let named = self.entries.iter().find(|(known, _)| *known == name);
        named.map(|(_, value)| *value)
    }

    /// Returns the entries as name-value pairs, in their original order.
    #[must_use]
    pub fn entries(&self) -> &'a [(&'a str, &'a str)] {
        self.entries
    }

    /// Returns the cost.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Returns the costs read from the body, if it was available.
    pub(super) fn body_costs(&self) -> Option<&'a [(u64, Cost)]> {
        self.body_costs
    }
}

/// Returns the error field for the entry `name`. The name comes from the client, so it is escaped
/// and truncated.
pub(super) fn field(name: &str) -> String {
    const SHOWN: usize = 64;
    let mut field = String::from("entries.");
    field.extend(name.chars().take(SHOWN).flat_map(char::escape_debug));
    if name.chars().nth(SHOWN).is_some() {
        field.push('…');
    }
    field
}

fn check_entry(name: &str, value: &str) -> Result<(), RequestError> {
    if name.is_empty() {
        let problem = "an entry's name must not be empty";
        return Err(RequestError::new("entries", problem));
    }
    if name.len() > bounds::MAX_ENTRY_NAME_BYTES {
        let (bytes, most) = (name.len(), bounds::MAX_ENTRY_NAME_BYTES);
        let problem = format!("the name has {bytes} bytes, which exceeds the maximum of {most}");
        return Err(RequestError::new(field(name), problem));
    }
    if value.len() > bounds::MAX_ENTRY_VALUE_BYTES {
        let problem = over(value.len(), "bytes", bounds::MAX_ENTRY_VALUE_BYTES);
        return Err(RequestError::new(field(name), problem));
    }
    Ok(())
}

fn over(count: usize, what: &str, most: usize) -> String {
    format!("{count} {what} exceed the maximum of {most}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(entries: &[(&str, &str)]) -> RequestError {
        Request::new(entries, Cost::ONE).unwrap_err()
    }

    #[test]
    fn a_malformed_entry_error_names_the_entry() {
        assert_eq!(refused(&[("", "x")]).field, "entries");
        assert_eq!(
            refused(&[("a", "x"), ("b", ""), ("a", "y")]).field,
            "entries.a"
        );
        assert_eq!(refused(&[("a", &"x".repeat(8_193))]).field, "entries.a");
        let long = refused(&[(&"n".repeat(257), "x")]);
        assert_eq!(long.field, format!("entries.{}…", "n".repeat(64)));
        assert_eq!(
            long.problem,
            "the name has 257 bytes, which exceeds the maximum of 256"
        );
    }

    #[test]
    fn at_most_64_entries_are_accepted() {
        let names: Vec<String> = (0..65).map(|n| format!("e{n}")).collect();
        let entries: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
        assert!(Request::new(&entries[..64], Cost::ONE).is_ok());
        assert_eq!(refused(&entries).field, "entries");
    }

    #[test]
    fn control_characters_in_a_name_are_escaped_in_errors() {
        assert_eq!(
            refused(&[("a\r\n", ""), ("a\r\n", "")]).field,
            "entries.a\\r\\n"
        );
    }
}
