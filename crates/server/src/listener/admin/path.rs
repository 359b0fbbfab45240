//! Paths with data in their segments. Each segment is percent-decoded separately, so that a key may
//! contain a slash.

use std::net::IpAddr;

use hyper::StatusCode;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use tidegate_core::{Rule, RuleSet};
use tidegate_http::Trust;

use super::Problem;
use crate::config::report::{nearest, shown};

pub(super) struct Path(Vec<String>);

impl Path {
    pub(super) fn parse(path: &str) -> Result<Self, Problem> {
        let segments = path.strip_prefix('/').unwrap_or(path).split('/');
        let decoded =
            segments.map(|segment| percent_decode_str(segment).decode_utf8().map(Into::into));
        let decoded = decoded.collect::<Result<_, _>>();
        decoded
            .map(Self)
            .map_err(|_| Problem::bad("path", "a segment is not UTF-8 after percent-decoding"))
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// The rule and key that a request refers to.
#[derive(Clone, Copy)]
pub(super) struct KeyTarget<'a> {
    pub(super) rule: &'a str,
    /// The values of the key as they appear in the path.
    pub(super) key: &'a [&'a str],
    pub(super) trust: &'a Trust,
}

impl KeyTarget<'_> {
    /// Returns the rule of that name and the encoded key.
    pub(super) fn find<'r>(&self, rules: &'r RuleSet) -> Result<(&'r Rule, Vec<u8>), Problem> {
        let rule = rules.rule(self.rule);
        let rule = rule.ok_or_else(|| no_rule(rules, self.rule))?;
        Ok((rule, rule.encode_key(self.key)?))
    }

    /// Returns a hint if the key has an address in a form that the listeners never use as a key.
    pub(super) fn hint(&self, rule: &Rule) -> Option<String> {
        let mut entries = rule.key().zip(self.key);
        let (_, written) = entries.find(|(name, _)| *name == "ip")?;
        match self.trust.counted_text(written) {
            Some(counted) if counted != *written => Some(format!(
                "the listeners count this address as `{counted}`: use that instead, unless clients send this form with `raw`"
            )),
            None if is_network(written) => Some(String::from(
                "a network of this size is not a key, so it has no counter and no block; match it with `cidr` in a rule's `when`",
            )),
            _ => None,
        }
    }

    /// Adds the hint, if there is one, to `document`.
    pub(super) fn hinted(&self, mut document: Value, rule: &Rule) -> Value {
        if let (Some(hint), Value::Object(members)) = (self.hint(rule), &mut document) {
            let hint = match members.get("hint").and_then(Value::as_str) {
                Some(other) => format!("{hint}; {other}"),
                None => hint,
            };
            members.insert("hint".to_owned(), hint.into());
        }
        document
    }

    /// Builds a 404 with the hint, if there is one.
    pub(super) fn nothing(&self, what: &str, rule: &Rule) -> Problem {
        let hint = self.hint(rule).map(|hint| format!("; {hint}"));
        let detail = format!("{what}{}", hint.unwrap_or_default());
        Problem::new(StatusCode::NOT_FOUND, detail)
    }
}

fn is_network(written: &str) -> bool {
    written.split_once('/').is_some_and(|(address, bits)| {
        address.parse::<IpAddr>().is_ok() && bits.parse::<u8>().is_ok()
    })
}

fn no_rule(rules: &RuleSet, wanted: &str) -> Problem {
    let names: Vec<&str> = rules.iter().map(Rule::name).collect();
    let hint = match nearest(wanted, &names) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => "GET /v1/rules lists them".to_owned(),
    };
    let detail = format!("there is no rule \"{}\"; {hint}", shown(wanted));
    Problem::new(StatusCode::NOT_FOUND, detail)
}
