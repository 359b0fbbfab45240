//! Prepares a request for evaluation: extracts the entries that the rules use, with the same code
//! that the reverse proxy uses for live requests.

use http::request::Parts;
use tidegate_core::RuleSet;
use tidegate_identity::{EntrySources, RequestEntries};

/// The request entries that the rules use: the index of each entry's name, and its value.
pub(crate) type EntryValues = Box<[(usize, Box<str>)]>;

/// Extracts entries for one rule set.
#[derive(Debug)]
pub(crate) struct EntryExtractor {
    sources: EntrySources,
    names: Vec<Box<str>>,
}

impl EntryExtractor {
    pub(crate) fn new(rules: &RuleSet, identity: &tidegate_config::Identity) -> Self {
        let mut sources = EntrySources::default();
        sources.set_trust(identity.trust.clone());
        if let Some(geoip) = &identity.geoip {
            sources.set_geoip(geoip.clone());
        }
        for (name, derived) in &identity.derived {
            sources.add_derived(name, derived.clone());
        }
        Self {
            sources,
            names: rules.entry_names().map(Box::from).collect(),
        }
    }

    /// Returns the names of all entries that the rules use.
    pub(crate) fn names(&self) -> &[Box<str>] {
        &self.names
    }

    /// Returns the values of the entries.
    ///
    /// # Errors
    ///
    /// If the request is ambiguous, returns the reason why the proxy would reject it.
    pub(crate) fn extract(&self, parts: &Parts) -> Result<EntryValues, String> {
        let request = RequestEntries::new(parts, &self.sources);
        let values = self.names.iter().enumerate().filter_map(|(at, name)| {
            let value = request.entry(name).transpose()?;
            Some(value.map(|value| (at, Box::from(&*value))))
        });
        let values: Result<_, tidegate_identity::AmbiguousRequest> = values.collect();
        values.map_err(|ambiguous| ambiguous.to_string())
    }
}
