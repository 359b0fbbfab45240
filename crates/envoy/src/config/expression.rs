//! Parses the expressions in a Limitador limits file. These expressions are CEL expressions, but
//! only the forms that limits use are supported:
//!
//! ```text
//! entry      descriptors[0]['req.method']   descriptors[0]["req.method"]   descriptors[0].method
//! condition  ENTRY == 'text'                ENTRY != "text"
//! ```
//!
//! In Limitador 1, entries had no `descriptors[0]`, and values did not need quotes. Tidegate also
//! accepts the forms of Limitador 1.

use crate::rules::limitador::{EntryPath, EqualityOperator, LimitadorCondition, LimitadorVariable};

/// The supported forms, for error messages.
const CONDITIONS: &str =
    "supported are descriptors[0]['key'] == 'value', != in place of ==, and key == value";
const VARIABLES: &str = "supported are descriptors[0]['key'], descriptors[0].key and key";

/// The maximum descriptor index.
const MAX_INDEX: usize = crate::MAX_DESCRIPTORS - 1;

/// An expression, and whether it is in the syntax of Limitador 1.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ParsedExpression<T> {
    pub(super) value: T,
    pub(super) is_legacy: bool,
}

/// Parses a condition.
pub(super) fn condition(source: &str) -> Result<ParsedExpression<LimitadorCondition>, String> {
    let unsupported = || format!("this condition is not supported; {CONDITIONS}");
    let (entry, rest) = entry(source.trim_start()).ok_or_else(unsupported)?;
    let rest = rest.trim_start();
    let (comparison, rest) = match (rest.strip_prefix("=="), rest.strip_prefix("!=")) {
        (Some(rest), _) => (EqualityOperator::Equal, rest),
        (_, Some(rest)) => (EqualityOperator::NotEqual, rest),
        (None, None) => return Err(unsupported()),
    };
    let (value, is_quoted) = value(rest.trim()).ok_or_else(unsupported)?;
    let is_legacy = entry.is_legacy || !is_quoted;
    // In Limitador 1, an entry had no `descriptors[0]`, and its value could be quoted or unquoted.
    // After an entry with `descriptors[0]`, CEL would read an unquoted value as a variable, so an
    // unquoted value is an error there.
    if !is_quoted && !entry.is_legacy {
        return Err(format!("the value has no quotes; {CONDITIONS}"));
    }
    let value = LimitadorCondition {
        source: source.into(),
        entry: entry.value,
        comparison,
        value: value.into(),
    };
    Ok(ParsedExpression { value, is_legacy })
}

/// Parses a variable.
pub(super) fn variable(source: &str) -> Result<ParsedExpression<LimitadorVariable>, String> {
    let unsupported = || format!("this variable is not supported; {VARIABLES}");
    let (entry, rest) = entry(source.trim_start()).ok_or_else(unsupported)?;
    if !rest.trim().is_empty() {
        return Err(unsupported());
    }
    let value = LimitadorVariable {
        source: source.into(),
        entry: entry.value,
    };
    Ok(ParsedExpression {
        value,
        is_legacy: entry.is_legacy,
    })
}

/// Parses an entry at the beginning of `text`. Returns the entry and the rest of `text`.
fn entry(text: &str) -> Option<(ParsedExpression<EntryPath>, &str)> {
    let Some(indexed) = text.strip_prefix("descriptors[") else {
        let (key, rest) = name(text)?;
        let is_function = rest.trim_start().starts_with(['(', '[']);
        let is_reserved = key == "limit" || key.starts_with("limit.") || key == "descriptors";
        let value = EntryPath {
            descriptor: 0,
            key: key.into(),
        };
        let parsed = ParsedExpression {
            value,
            is_legacy: true,
        };
        return (!is_function && !is_reserved).then_some((parsed, rest));
    };
    let (index, rest) = indexed.split_once(']')?;
    let is_number = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
    let descriptor = index
        .parse()
        .ok()
        .filter(|at| is_number && *at <= MAX_INDEX)?;
    let (key, rest) = match rest.strip_prefix('[') {
        Some(quoted) => {
            let (key, rest) = text_literal(quoted.trim_start())?;
            (key, rest.trim_start().strip_prefix(']')?)
        }
        None => {
            let (key, rest) = name(rest.strip_prefix('.')?)?;
            // In CEL, a second dot would select a field of the entry, but an entry has no fields.
            if key.contains('.') || rest.starts_with(['(', '[']) {
                return None;
            }
            (key.to_owned(), rest)
        }
    };
    let value = EntryPath {
        descriptor,
        key: key.into(),
    };
    let parsed = ParsedExpression {
        value,
        is_legacy: false,
    };
    Some((parsed, rest))
}

/// Parses a name such as `req.method` at the beginning of `text`.
fn name(text: &str) -> Option<(&str, &str)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    (starts_well && !name.ends_with('.')).then_some((name, rest))
}

/// Parses the value of a condition. Returns the value, and whether it was quoted.
fn value(text: &str) -> Option<(String, bool)> {
    if text.starts_with(['\'', '"']) {
        let (value, rest) = text_literal(text)?;
        return rest.is_empty().then_some((value, true));
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':');
    let plain = !text.is_empty() && text.chars().all(is_plain);
    plain.then(|| (text.to_owned(), false))
}

/// Parses a string in single or double quotes at the beginning of `text`. A backslash escapes a
/// quote or a backslash.
fn text_literal(text: &str) -> Option<(String, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let mut literal = String::new();
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => match chars.next()?.1 {
                escaped @ ('\\' | '\'' | '"') => literal.push(escaped),
                _ => return None,
            },
            c if c == quote => return Some((literal, &text[at + 1..])),
            c => literal.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Option<(usize, String, EqualityOperator, String, bool)> {
        let ParsedExpression { value, is_legacy } = condition(text).ok()?;
        let LimitadorCondition {
            entry,
            comparison,
            value,
            ..
        } = value;
        let key = entry.key.into();
        Some((entry.descriptor, key, comparison, value.into(), is_legacy))
    }

    #[test]
    fn conditions_in_common_use_are_parsed() {
        use EqualityOperator::{Equal, NotEqual};
        for (text, descriptor, key, comparison, value, is_legacy) in [
            (
                "descriptors[0]['req.method'] == 'GET'",
                0,
                "req.method",
                Equal,
                "GET",
                false,
            ),
            (
                "descriptors[0][\"limit.toystore__a1\"] == \"1\"",
                0,
                "limit.toystore__a1",
                Equal,
                "1",
                false,
            ),
            (
                "descriptors[1].key_a!='va lue'",
                1,
                "key_a",
                NotEqual,
                "va lue",
                false,
            ),
            (
                " descriptors[12][ 'k' ]  !=  \"it's\" ",
                12,
                "k",
                NotEqual,
                "it's",
                false,
            ),
            (
                r"descriptors[0].a == 'it\'s \\'",
                0,
                "a",
                Equal,
                r"it's \",
                false,
            ),
            ("descriptors[0].a == ''", 0, "a", Equal, "", false),
            ("req.method == GET", 0, "req.method", Equal, "GET", true),
            ("user_id != 'bob'", 0, "user_id", NotEqual, "bob", true),
        ] {
            let expected = (
                descriptor,
                key.to_owned(),
                comparison,
                value.to_owned(),
                is_legacy,
            );
            assert_eq!(parsed(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_conditions_are_rejected() {
        for text in [
            "",
            "true",
            "descriptors[0].a",
            "descriptors[0].a == b",
            "descriptors[0].a == 5",
            "descriptors[0].a < '5'",
            "descriptors[0].a == 'x' && descriptors[0].b == 'y'",
            "descriptors[0].a == 'x' || true",
            "descriptors[0].a.startsWith('x')",
            "descriptors[0].a.b == 'x'",
            "descriptors[x].a == 'x'",
            "descriptors[-1].a == 'x'",
            "descriptors[512].a == 'x'",
            "descriptors[99999999999999999999].a == 'x'",
            "descriptors[0] == 'x'",
            "descriptors.a == 'x'[",
            "descriptors[0]['a] == 'x'",
            "descriptors[0].a == 'x",
            r"descriptors[0].a == '\n'",
            "has(descriptors[0].a)",
            "!(descriptors[0].a == 'x')",
            "'x' == descriptors[0].a",
            "descriptors[0].a in ['x']",
            "limit.name == 'x'",
            "size(a) == '5'",
        ] {
            let error = condition(text).map(|_| ()).unwrap_err();
            assert!(error.contains(CONDITIONS), "{text}: {error}");
        }
    }

    #[test]
    fn variables_are_parsed() {
        for (text, key, is_legacy) in [
            ("descriptors[0]['user_id']", "user_id", false),
            ("descriptors[0].user_id", "user_id", false),
            ("user_id", "user_id", true),
        ] {
            let ParsedExpression {
                value,
                is_legacy: legacy,
            } = variable(text).unwrap();
            assert_eq!((&*value.entry.key, legacy), (key, is_legacy), "{text}");
        }
        for text in [
            "",
            "descriptors[0]",
            "descriptors[0].a + 'b'",
            "string(a)",
            "'a'",
        ] {
            assert!(variable(text).unwrap_err().contains(VARIABLES), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "(descriptors\\[[0-9]{0,2}\\])?.{0,20}") {
            let _ = condition(&text);
            let _ = variable(&text);
        }

        #[test]
        fn every_quoted_value_is_read_back(key in ".{1,9}", value in ".{0,9}") {
            let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
            let text = format!("descriptors[3][{}] == {}", quoted(&key), quoted(&value));
            let expected = (3, key, EqualityOperator::Equal, value, false);
            prop_assert_eq!(parsed(&text), Some(expected));
        }
    }
}
