//! The stored form of an override: a JSON document, either in Redis or as one line of a file.

use serde_json::{Value, json};
use tidegate_core::{
    Override, OverrideError, OverrideTarget, Overrides, Replacement, Timestamp, bounds,
};

use super::id;

/// An override, or a removal of an override, with its rule and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OverrideDocument {
    rule: String,
    target: OverrideTarget,
    /// The override; `None` if the override was removed.
    found: Option<Override>,
}

impl OverrideDocument {
    pub(crate) fn new(rule: &str, target: &OverrideTarget, found: &Override) -> Self {
        Self {
            rule: rule.to_owned(),
            target: target.clone(),
            found: Some(found.clone()),
        }
    }

    pub(crate) fn removal(rule: &str, target: &OverrideTarget) -> Self {
        Self {
            rule: rule.to_owned(),
            target: target.clone(),
            found: None,
        }
    }

    /// Applies the change, and returns the replaced or removed override.
    pub(crate) fn apply(
        self,
        overrides: &Overrides,
        now: Timestamp,
    ) -> Result<Option<Override>, OverrideError> {
        match self.found {
            Some(found) => overrides.set(&self.rule, &self.target, found, now),
            None => Ok(overrides.remove(&self.rule, &self.target)),
        }
    }

    /// Returns the ID of the override.
    pub(crate) fn id(&self) -> Vec<u8> {
        id::of_override(&self.rule, &self.target)
    }

    /// Returns whether the document removes an override, or whether its override has ended at
    /// `now`.
    pub(crate) fn is_obsolete(&self, now: Timestamp) -> bool {
        let found = self.found.as_ref();
        found.is_none_or(|found| !found.is_unexpired(now))
    }

    pub(crate) fn into_override(self) -> Option<Override> {
        self.found
    }

    /// Formats the document on one line.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let values: Vec<&str> = self.target.values().collect();
        let of = if self.target.is_pattern() {
            "pattern"
        } else {
            "key"
        };
        let mut document = json!({"rule": self.rule, of: values});
        match &self.found {
            None => document["removed"] = true.into(),
            Some(found) => {
                match &found.replacement {
                    Replacement::Limits(limits) => document["limits"] = json!(limits),
                    Replacement::Factor(factor) => document["factor"] = factor.to_string().into(),
                    Replacement::Plan(plan) => document["plan"] = json!(plan),
                }
                document["until_us"] = json!(found.until.map(Timestamp::as_micros));
                document["reason"] = json!(found.reason);
            }
        }
        document.to_string().into_bytes()
    }

    /// Reads a document.
    pub(crate) fn read(document: &Value) -> Result<Self, String> {
        let wrong = |field: &str| format!("`{field}` is missing or invalid");
        let texts = |value: &Value| {
            let texts = value.as_array()?.iter();
            texts
                .map(|text| text.as_str().map(Box::from))
                .collect::<Option<Vec<Box<str>>>>()
        };
        let rule = document["rule"]
            .as_str()
            .ok_or_else(|| wrong("rule"))?
            .to_owned();
        let key = texts(&document["key"]).map(OverrideTarget::Key);
        let target = key.or_else(|| texts(&document["pattern"]).map(OverrideTarget::Pattern));
        let target = target
            .filter(|target| target.values().len() <= bounds::MAX_KEY_ENTRIES)
            .ok_or_else(|| wrong("key"))?;
        if document["removed"] == true {
            return Ok(Self {
                rule,
                target,
                found: None,
            });
        }
        let replacement = if let Some(limits) = texts(&document["limits"]) {
            Replacement::Limits(limits.into())
        } else if let Some(factor) = document["factor"].as_str() {
            let factor = factor.parse();
            Replacement::Factor(factor.map_err(|_| wrong("factor"))?)
        } else {
            let plan = document["plan"].as_str();
            Replacement::Plan(plan.ok_or_else(|| wrong("limits"))?.into())
        };
        let found = Override {
            replacement,
            until: document["until_us"].as_u64().map(Timestamp::from_micros),
            reason: document["reason"].as_str().unwrap_or_default().into(),
        };
        Ok(Self {
            rule,
            target,
            found: Some(found),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::id::StoredId, *};

    #[test]
    fn documents_and_ids_survive_a_round_trip() {
        let until = Some(Timestamp::from_micros(1_700_000_000_000_001));
        let limits = Replacement::Limits(Box::new(["200/min".into(), "5/s burst 3".into()]));
        for (values, replacement, until) in [
            (&["alice"][..], limits, until),
            (
                &["acme-*", ""],
                Replacement::Factor("1.5x".parse().unwrap()),
                None,
            ),
            (&[], Replacement::Plan("pro\n\"".into()), until),
        ] {
            let target = OverrideTarget::of(values);
            let found = Override {
                replacement,
                until,
                reason: "launch \u{1F680}\n".into(),
            };
            let document = OverrideDocument::new("api", &target, &found);
            let encoded = document.encode();
            assert!(!encoded.contains(&b'\n'), "a document has one line");
            let removal = OverrideDocument::removal("api", &target);
            for document in [document, removal] {
                let value: Value = serde_json::from_slice(&document.encode()).unwrap();
                assert_eq!(OverrideDocument::read(&value), Ok(document.clone()));
                // An ID without values belongs to a rule without key entries.
                let parsed = StoredId::Override("api".to_owned(), target.clone());
                assert_eq!(id::parse(&document.id()), Some(parsed));
            }
        }
    }

    #[test]
    fn a_damaged_document_is_described() {
        for (text, field) in [
            ("{}", "rule"),
            (r#"{"rule": "api"}"#, "key"),
            (r#"{"rule": "api", "key": [7]}"#, "key"),
            (r#"{"rule": "api", "key": ["a"]}"#, "limits"),
            (r#"{"rule": "api", "key": ["a"], "factor": "x"}"#, "factor"),
        ] {
            let value = serde_json::from_str(text).unwrap();
            let problem = OverrideDocument::read(&value).unwrap_err();
            assert!(problem.contains(&format!("`{field}`")), "{text}: {problem}");
        }
    }
}
