//! Interprets scalars by the rules of YAML 1.1. For example, `yes` is true and `0x10` is a number,
//! even if the author intended a string.

use tidegate_config::yaml::Content;

/// The type of a scalar in YAML 1.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Null,
    Truth(bool),
    Whole(i128),
    Fraction(f64),
    Text,
}

/// Returns the interpretation of `content`; `None` if it is a list or a map.
pub(super) fn of(content: &Content<'_>) -> Option<Scalar> {
    match content {
        Content::Empty => Some(Scalar::Null),
        Content::Quoted(_) => Some(Scalar::Text),
        Content::Plain(text) => Some(resolve(text)),
        Content::List(_) | Content::Map(_) => None,
    }
}

fn resolve(text: &str) -> Scalar {
    match text {
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            Scalar::Truth(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Scalar::Truth(false)
        }
        _ => whole(text)
            .map(Scalar::Whole)
            .or_else(|| fraction(text).map(Scalar::Fraction))
            .unwrap_or(Scalar::Text),
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
            ("yes", Scalar::Truth(true)),
            ("Off", Scalar::Truth(false)),
            ("yEs", Scalar::Text),
            ("5", Scalar::Whole(5)),
            ("-5", Scalar::Whole(-5)),
            ("0x10", Scalar::Whole(16)),
            ("010", Scalar::Whole(8)),
            ("0b11", Scalar::Whole(3)),
            ("1_000", Scalar::Whole(1_000)),
            ("0", Scalar::Whole(0)),
            ("1.5", Scalar::Fraction(1.5)),
            ("1e3", Scalar::Fraction(1_000.0)),
            (".5", Scalar::Fraction(0.5)),
            ("0.25", Scalar::Fraction(0.25)),
            ("09", Scalar::Fraction(9.0)),
            ("-1.5", Scalar::Fraction(-1.5)),
            ("+1.5", Scalar::Fraction(1.5)),
            (".inf", Scalar::Fraction(f64::INFINITY)),
            ("+.inf", Scalar::Fraction(f64::INFINITY)),
            ("-.inf", Scalar::Fraction(f64::NEG_INFINITY)),
            ("--.inf", Scalar::Text),
            ("+-.inf", Scalar::Text),
            ("--1.5", Scalar::Text),
            ("-.nan", Scalar::Text),
            ("50.0.0.5", Scalar::Text),
            ("--5", Scalar::Text),
            ("0x-5", Scalar::Text),
            ("infinity", Scalar::Text),
            ("minute", Scalar::Text),
            ("_1", Scalar::Text),
            ("", Scalar::Text),
        ] {
            assert_eq!(resolve(text), expected, "{text}");
        }
    }
}
