//! Paths whose segments are data: percent-decoded one by one, so that a slash in a key stays in the key.

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
            .map_err(|_| Problem::bad("path", "a segment is not UTF-8 once it is percent-decoded"))
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// What an operator asks about.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) rule: &'a str,
    /// The values of the key, as they were written.
    pub(super) key: &'a [&'a str],
    pub(super) trust: &'a Trust,
}

impl Asked<'_> {
    /// `document`, with a word about an address under whose text no door counts a client that it finds out itself.
    pub(super) fn hinted(&self, mut document: Value, rule: &Rule) -> Value {
        let entries = rule.key().zip(self.key);
        let hint = entries.filter(|(name, _)| *name == "ip").find_map(|(_, value)| {
            let counted = self.trust.counted_text(value)?;
            (counted != *value).then(|| {
                format!(
                    "where a door finds out an address, it counts this one as `{counted}`: ask about that instead, unless callers of /v1/check name it like this"
                )
            })
        });
        if let (Some(hint), Value::Object(members)) = (hint, &mut document) {
            members.insert("hint".to_owned(), hint.into());
        }
        document
    }
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

/// The rule of that name, and the bytes of one of its keys.
pub(super) fn rule_and_key<'r>(
    rules: &'r RuleSet,
    rule: &str,
    key: &[&str],
) -> Result<(&'r Rule, Vec<u8>), Problem> {
    let Some(rule) = rules.rule(rule) else {
        return Err(no_rule(rules, rule));
    };
    let key = rule.encode_key(key)?;
    Ok((rule, key))
}
