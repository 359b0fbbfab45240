//! Paths whose segments are data: percent-decoded one by one, so that a slash in a key stays in the key.

use percent_encoding::percent_decode_str;
use tidegate_core::{Rule, RuleSet};

use super::Problem;

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

/// The rule of that name, and the bytes of one of its keys.
pub(super) fn rule_and_key<'r>(
    rules: &'r RuleSet,
    rule: &str,
    key: &[&str],
) -> Result<(&'r Rule, Vec<u8>), Problem> {
    let Some(rule) = rules.rule(rule) else {
        let detail = format!("there is no rule \"{rule}\"; GET /v1/rules lists them");
        return Err(Problem::new(hyper::StatusCode::NOT_FOUND, detail));
    };
    let key = rule.encode_key(key)?;
    Ok((rule, key))
}
