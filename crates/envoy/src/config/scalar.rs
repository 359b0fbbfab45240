//! Interprets scalars by the rules of YAML 1.1. For example, `yes` is true and `0x10` is a number,
//! even if the author intended a string.

use tidegate_config::yaml::YamlContent;

/// The type of a scalar in YAML 1.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TypedScalar {
    Null,
    Truth(bool),
    Whole(i128),
    Fraction(f64),
    Text,
}

/// Returns the interpretation of `content`; `None` if it is a list or a map.
pub(super) fn of(content: &YamlContent<'_>) -> Option<TypedScalar> {
    match content {
        YamlContent::Empty => Some(TypedScalar::Null),
        YamlContent::Quoted(_) => Some(TypedScalar::Text),
        YamlContent::Plain(text) => Some(resolve(text)),
        YamlContent::List(_) | YamlContent::Map(_) => None,
    }
}

fn resolve(text: &str) -> TypedScalar {
    match text {
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            TypedScalar::Truth(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            TypedScalar::Truth(false)
        }
        _ => whole(text)
            .map(TypedScalar::Whole)
            .or_else(|| fraction(text).map(TypedScalar::Fraction))
            .unwrap_or(TypedScalar::Text),
    }
}

fn whole(text: &str) -> Option<i128> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => (-1, &text[1..]),
        b'+' => (1, &text[1..]),
        _ => (1, text),
    };
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let digits = digits.replace('_', "");
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', b'b' | b'B', ..] => (2, &digits[2..]),
        [b'0', b'o', ..] => (8, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits.as_str()),
    };
    // The code above has parsed the sign. `from_str_radix` would accept a second sign.
    if digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(digits, radix)
        .ok()
        .map(|number| sign * number)
}

fn fraction(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    match unsigned {
        ".inf" | ".Inf" | ".INF" if text.starts_with('-') => return Some(f64::NEG_INFINITY),
        ".inf" | ".Inf" | ".INF" => return Some(f64::INFINITY),
        // YAML does not allow a sign before NaN.
        ".nan" | ".NaN" | ".NAN" if text == unsigned => return Some(f64::NAN),
        unsigned if !unsigned.starts_with(|first: char| first.is_ascii_digit() || first == '.') => {
            return None;
        }
        _ => {}
    }
    text.replace('_', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_are_parsed_as_in_yaml_1_1() {
        for (text, expected) in [
            ("yes", TypedScalar::Truth(true)),
            ("Off", TypedScalar::Truth(false)),
            ("yEs", TypedScalar::Text),
            ("5", TypedScalar::Whole(5)),
            ("-5", TypedScalar::Whole(-5)),
            ("0x10", TypedScalar::Whole(16)),
            ("010", TypedScalar::Whole(8)),
            ("0b11", TypedScalar::Whole(3)),
            ("1_000", TypedScalar::Whole(1_000)),
            ("0", TypedScalar::Whole(0)),
            ("1.5", TypedScalar::Fraction(1.5)),
            ("1e3", TypedScalar::Fraction(1_000.0)),
            (".5", TypedScalar::Fraction(0.5)),
            ("0.25", TypedScalar::Fraction(0.25)),
            ("09", TypedScalar::Fraction(9.0)),
            ("-1.5", TypedScalar::Fraction(-1.5)),
            ("+1.5", TypedScalar::Fraction(1.5)),
            (".inf", TypedScalar::Fraction(f64::INFINITY)),
            ("+.inf", TypedScalar::Fraction(f64::INFINITY)),
            ("-.inf", TypedScalar::Fraction(f64::NEG_INFINITY)),
            ("--.inf", TypedScalar::Text),
            ("+-.inf", TypedScalar::Text),
            ("--1.5", TypedScalar::Text),
            ("-.nan", TypedScalar::Text),
            ("50.0.0.5", TypedScalar::Text),
            ("--5", TypedScalar::Text),
            ("0x-5", TypedScalar::Text),
            ("infinity", TypedScalar::Text),
            ("minute", TypedScalar::Text),
            ("_1", TypedScalar::Text),
            ("", TypedScalar::Text),
        ] {
            assert_eq!(resolve(text), expected, "{text}");
        }
    }
}
