//! The IDs under which overrides and blocks by entries are stored.
//!
//! ```text
//! rule | FF | k | FF | value | FF | value …            the override of a key
//! rule | FF | p | FF | pattern | FF | pattern …        the override of a pattern
//! rule | FF | b | FF | entry | FF | value | FF | …     a block; the rule is empty if it has none
//! ```
//!
//! No part of the ID contains the separator, because this byte never occurs in UTF-8.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use tidegate_core::{EntryBlockTarget, OverrideTarget};

const SEPARATOR: u8 = 0xFF;

/// A parsed ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredId {
    /// The ID of an override: its rule and its target.
    Override(String, OverrideTarget),
    /// The ID of a block by entries.
    Block(EntryBlockTarget),
}

/// Returns the ID of the override of `target` for the rule with the name `rule`.
pub(crate) fn of_override(rule: &str, target: &OverrideTarget) -> Vec<u8> {
    let kind = if target.is_pattern() { b'p' } else { b'k' };
    join(rule, kind, target.values())
}

/// Returns the ID of the block with this `target`.
pub(crate) fn of_block(target: &EntryBlockTarget) -> Vec<u8> {
    let values: Vec<String> = target
        .entries()
        .iter()
        .flat_map(|entry| [entry.name.to_string(), entry.value.to_string()])
        .collect();
    let values = values.iter().map(String::as_str);
    join(target.rule().unwrap_or_default(), b'b', values)
}

fn join<'v>(rule: &str, kind: u8, values: impl Iterator<Item = &'v str>) -> Vec<u8> {
    let mut id = rule.as_bytes().to_vec();
    id.extend_from_slice(&[SEPARATOR, kind]);
    for value in values {
        id.push(SEPARATOR);
        id.extend_from_slice(value.as_bytes());
    }
    id
}

/// Parses an ID. Returns `None` if the ID is not valid.
pub(crate) fn parse(id: &[u8]) -> Option<StoredId> {
    let mut parts = id.split(|byte| *byte == SEPARATOR);
    let rule = std::str::from_utf8(parts.next()?).ok()?;
    let kind = parts.next()?;
    let values = parts.map(|part| std::str::from_utf8(part).ok());
    let values = values.collect::<Option<Vec<&str>>>()?;
    let boxed = || values.iter().map(|value| Box::from(*value)).collect();
    match kind {
        b"k" => Some(StoredId::Override(
            rule.to_owned(),
            OverrideTarget::Key(boxed()),
        )),
        b"p" => Some(StoredId::Override(
            rule.to_owned(),
            OverrideTarget::Pattern(boxed()),
        )),
        b"b" if values.len().is_multiple_of(2) => {
            let pairs = values.chunks_exact(2).map(|pair| (pair[0], pair[1]));
            let pairs: Vec<(&str, &str)> = pairs.collect();
            let rule = Some(rule).filter(|rule| !rule.is_empty());
            EntryBlockTarget::new(rule, &pairs)
                .ok()
                .map(StoredId::Block)
        }
        _ => None,
    }
}

/// Encodes the ID of the last override or block of a page as the position of the next page.
pub(crate) fn to_position(id: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(id)
}

/// Decodes a position. Returns `None` if the text is not a position.
pub(crate) fn parse_position(text: &str) -> Option<StoredId> {
    parse(&BASE64_URL_SAFE_NO_PAD.decode(text).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_id_is_not_parsed() {
        for id in [&b"api"[..], b"api\xFFx\xFFa", b"\xFFb\xFFip", b"\xFFb"] {
            assert_eq!(parse(id), None);
        }
    }
}
