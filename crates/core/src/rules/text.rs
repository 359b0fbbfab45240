//! Formats conditions in the notation of the rules file, so that operators can inspect a running
//! server.

use std::fmt;

use super::{ActiveHours, Condition, Days, Pattern, When, pattern::PatternKind};

/// Formats conditions like `{path: /api/**, time: [22:00-06:00], zone: Europe/Berlin}`. Conditions
/// that always hold are formatted as `{}`.
impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        joined(f, self.iter())?;
        if let Some(schedule) = self.schedule() {
            let comma = if self.iter().len() > 0 { ", " } else { "" };
            write!(f, "{comma}{schedule}")?;
        }
        f.write_str("}")
    }
}

impl fmt::Display for ActiveHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.hours().is_empty() {
            f.write_str("time: [")?;
            joined(f, self.hours())?;
            f.write_str("], ")?;
        }
        if self.days() != Days::ALL {
            f.write_str("days: [")?;
            joined(f, self.days().names())?;
            f.write_str("], ")?;
        }
        write!(f, "zone: {}", self.zone_name())
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Word(self.entry()), self.pattern())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            PatternKind::Exact(text) => Exact(text).fmt(f),
            PatternKind::Glob(glob) => Word(&glob.to_string()).fmt(f),
            PatternKind::Regex(regex) => write!(f, "{{regex: {}}}", QuotedString(regex.as_str())),
            PatternKind::Cidr(nets) => {
                f.write_str("{cidr: [")?;
                joined(f, nets.iter())?;
                f.write_str("]}")
            }
            PatternKind::Route(route) => write!(f, "{{route: {}}}", Word(route.as_str())),
            PatternKind::Present => f.write_str("{present: true}"),
            PatternKind::Any(any) => {
                let others = any.others();
                let mut exact: Vec<Exact<'_>> = any.exact().map(|text| Exact(text)).collect();
                exact.sort_unstable();
                f.write_str("[")?;
                joined(f, &exact)?;
                if !exact.is_empty() && !others.is_empty() {
                    f.write_str(", ")?;
                }
                joined(f, others)?;
                f.write_str("]")
            }
            PatternKind::All(patterns) => {
                f.write_str("{all: [")?;
                joined(f, patterns)?;
                f.write_str("]}")
            }
            PatternKind::Not(pattern) if matches!(pattern.kind(), PatternKind::Present) => {
                f.write_str("{present: false}")
            }
            PatternKind::Not(pattern) => write!(f, "{{not: {pattern}}}"),
        }
    }
}

/// An exact value. A value with a star is formatted as `{is: "a*"}`, because a plain `a*` is a
/// glob.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Exact<'t>(pub(super) &'t str);

impl fmt::Display for Exact<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains('*') {
            write!(f, "{{is: {}}}", QuotedString(self.0))
        } else {
            Word(self.0).fmt(f)
        }
    }
}

/// A string that is quoted if YAML could misread it without quotes.
pub(super) struct Word<'t>(pub(super) &'t str);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_plain(self.0) {
            f.write_str(self.0)
        } else {
            QuotedString(self.0).fmt(f)
        }
    }
}

/// Returns whether `text` can be written without quotes, so that YAML still reads the same string.
/// YAML would read a leading star as an alias, and a leading hyphen as a list item or a number.
fn is_plain(text: &str) -> bool {
    /// The words that YAML 1.1 or 1.2 reads as a Boolean, null or a number, ignoring letter case.
    const WORDS: [&str; 11] = [
        "true", "false", "null", "yes", "no", "on", "off", "y", "n", ".inf", ".nan",
    ];
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.*".contains(&byte);
    let is_word = || WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    text.bytes().all(is_safe)
        && !text.is_empty()
        && !text.starts_with(['*', '-'])
        && !is_word()
        && !may_be_number(text)
}

/// Returns whether YAML could read `text` as a number or a date. Returns false for an address such
/// as `10.0.0.1`, which has too many dots for a number.
fn may_be_number(text: &str) -> bool {
    let is_numeric = |byte: u8| byte.is_ascii_hexdigit() || b"._-xXoO".contains(&byte);
    text.starts_with(|first: char| first.is_ascii_digit() || first == '.')
        && text.bytes().all(is_numeric)
        && text.matches('.').count() <= 1
}

/// A string in double quotes, with YAML escapes.
struct QuotedString<'t>(&'t str);

impl fmt::Display for QuotedString<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for letter in self.0.chars() {
            // Use `escape_debug` only to detect non-printable characters, because the escapes that
            // it writes, such as `\u{7f}`, are not valid in YAML.
            let is_hidden = || letter.escape_debug().nth(1) == Some('u');
            match letter {
                '"' | '\\' => write!(f, "\\{letter}")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                '\0' => f.write_str("\\0")?,
                _ if is_hidden() => write!(f, "\\U{:08x}", u32::from(letter))?,
                _ => write!(f, "{letter}")?,
            }
        }
        f.write_str("\"")
    }
}

fn joined<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    items: impl IntoIterator<Item = T>,
) -> fmt::Result {
    for (at, item) in items.into_iter().enumerate() {
        if at > 0 {
            f.write_str(", ")?;
        }
        item.fmt(f)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Hours;

    #[test]
    fn conditions_are_printed_as_they_were_written() {
        let text = |text: &str| Pattern::text(text).unwrap();
        let condition = |entry: &str, pattern| Condition::new(entry, pattern).unwrap();
        let when = When::all(vec![
            condition("path", text("/api/**")),
            condition("header.x", text("a*b/*")),
            condition("file", text("/a/*/b**")),
            condition(
                "method",
                Pattern::any_of(vec![text("PUT"), text("GET"), text("P*")]).unwrap(),
            ),
            condition("ip", Pattern::networks(&["10.0.0.0/8"]).unwrap().negated()),
            condition("agent", Pattern::regex("bot|spider").unwrap()),
            condition("user", Pattern::absent()),
            condition("two words", text("a, b")),
        ]);
        let expected = "{path: /api/**, header.x: a*b/*, file: /a/*/b**, method: [GET, PUT, P*], \
            ip: {not: {cidr: [10.0.0.0/8]}}, agent: {regex: \"bot|spider\"}, user: {present: false}, \
            \"two words\": \"a, b\"}";
        assert_eq!(when.to_string(), expected);
        assert_eq!(When::default().to_string(), "{}");
        let hours = vec![Hours::parse("22:00-06:00").unwrap()];
        let schedule = ActiveHours::new(hours, Days::parse("sat-sun").unwrap(), "Europe/Berlin");
        let nights = When::default().during(schedule.unwrap());
        let expected = "{time: [22:00-06:00], days: [sat, sun], zone: Europe/Berlin}";
        assert_eq!(nights.to_string(), expected);
    }

    /// Without quotes, YAML would reject these strings or read them as other values.
    #[test]
    fn texts_that_yaml_would_misread_are_quoted() {
        let glob = |text: &str| Pattern::text(text).unwrap().to_string();
        for text in [
            "*bot*",
            "*",
            "-",
            "-x",
            "true",
            "False",
            "null",
            "NO",
            "y",
            ".inf",
            "123",
            "1.5",
            "1e3",
            "0x1F",
            "1_000",
            ".5",
            "2026-01-31",
            "",
            "a b",
            "a: b",
            "#a",
            "~",
        ] {
            assert_eq!(glob(text), format!("\"{text}\""));
        }
        for text in [
            "10.0.0.1", "v1", "2go", "/1", "trueish", "a*", "GET", "a-b", "1.2.3",
        ] {
            assert_eq!(glob(text), text);
        }
        assert_eq!(
            glob("a\"\\\n\u{7f}\u{feff}é'"),
            r#""a\"\\\n\U0000007f\U0000feffé'""#
        );
        let regex = Pattern::regex(r"\d+\.").unwrap();
        assert_eq!(regex.to_string(), r#"{regex: "\\d+\\."}"#);
    }

    #[test]
    fn an_exact_value_with_a_star_is_not_printed_as_a_glob() {
        let exact = |text: &str| Pattern::exact(text).unwrap();
        assert_eq!(exact("a*").to_string(), r#"{is: "a*"}"#);
        assert_eq!(exact("a*").negated().to_string(), r#"{not: {is: "a*"}}"#);
        let any = Pattern::any_of(vec![exact("b"), exact("a*"), Pattern::text("c*").unwrap()]);
        assert_eq!(any.unwrap().to_string(), r#"[{is: "a*"}, b, c*]"#);
    }
}
