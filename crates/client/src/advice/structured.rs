//! The subset of RFC 9651 (structured fields) that the RateLimit headers use: lists and
//! dictionaries of items with parameters. As the RFC requires, a field that does not parse
//! completely is ignored.

/// The most bytes of a field, over all its lines.
pub(super) const MAX_BYTES: usize = 8 * 1024;
/// The most members of a list or dictionary.
const MAX_MEMBERS: usize = 64;
/// The most parameters of one member.
const MAX_PARAMETERS: usize = 32;

/// A bare item. Only numbers and text keep their value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bare {
    Integer(i64),
    /// In thousandths: a structured field has at most three decimals.
    Decimal(i64),
    /// A string or a token.
    Text(String),
    /// A byte sequence, a boolean or a date, which no caller needs.
    Other,
}

/// A member of a list, or of a dictionary, where `key` is its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) key: String,
    pub(super) value: Bare,
    parameters: Vec<(String, Bare)>,
}

impl Member {
    /// Returns the parameter of this name. If it occurs several times, the last one counts.
    pub(super) fn parameter(&self, name: &str) -> Option<&Bare> {
        let named = |(key, value)| (key == name).then_some(value);
        self.parameters
            .iter()
            .rev()
            .find_map(|(k, v)| named((k.as_str(), v)))
    }

    /// Returns a parameter that is a non-negative integer.
    pub(super) fn count(&self, name: &str) -> Option<u64> {
        self.parameter(name).and_then(Bare::count)
    }
}

impl Bare {
    /// Returns a non-negative integer.
    pub(super) fn count(&self) -> Option<u64> {
        match self {
            Self::Integer(number) => u64::try_from(*number).ok(),
            Self::Decimal(_) | Self::Text(_) | Self::Other => None,
        }
    }
}

/// Parses `text` as a list, whose members have empty keys.
pub(super) fn list(text: &str) -> Option<Vec<Member>> {
    members(text, |rest| {
        let value = rest.bare()?;
        rest.member(String::new(), value)
    })
}

/// Parses `text` as a dictionary.
pub(super) fn dictionary(text: &str) -> Option<Vec<Member>> {
    members(text, |rest| {
        let key = rest.key()?;
        let value = if rest.skip(b'=') {
            rest.bare()?
        } else {
            Bare::Other
        };
        rest.member(key, value)
    })
}

fn members<'a>(
    text: &'a str,
    mut read: impl FnMut(&mut Rest<'a>) -> Option<Member>,
) -> Option<Vec<Member>> {
    if text.len() > MAX_BYTES || !text.is_ascii() {
        return None;
    }
    let mut rest = Rest(text.trim_matches(' ').as_bytes());
    let mut members = Vec::new();
    while members.len() < MAX_MEMBERS {
        members.push(read(&mut rest)?);
        rest.skip_white();
        if rest.0.is_empty() {
            return Some(members);
        }
        if !rest.skip(b',') {
            return None;
        }
        rest.skip_white();
    }
    None
}

/// The bytes that are not parsed yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    fn skip(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.next();
        }
        found
    }

    fn skip_white(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t')) {
            self.next();
        }
    }

    fn take_while(&mut self, belongs: impl Fn(u8) -> bool) -> String {
        let mut taken = String::new();
        while let Some(byte) = self.peek().filter(|byte| belongs(*byte)) {
            self.next();
            taken.push(char::from(byte));
        }
        taken
    }

    fn member(&mut self, key: String, value: Bare) -> Option<Member> {
        let mut parameters = Vec::new();
        while self.skip(b';') {
            while self.skip(b' ') {}
            let name = self.key()?;
            let value = if self.skip(b'=') {
                self.bare()?
            } else {
                Bare::Other
            };
            if parameters.len() == MAX_PARAMETERS {
                return None;
            }
            parameters.push((name, value));
        }
        Some(Member {
            key,
            value,
            parameters,
        })
    }

    fn key(&mut self) -> Option<String> {
        self.peek()
            .filter(|first| first.is_ascii_lowercase() || *first == b'*')?;
        Some(self.take_while(|byte| {
            byte.is_ascii_lowercase()
                || byte.is_ascii_digit()
                || matches!(byte, b'_' | b'-' | b'.' | b'*')
        }))
    }

    fn bare(&mut self) -> Option<Bare> {
        match self.peek()? {
            b'"' => self.string(),
            b'-' | b'0'..=b'9' => self.number(),
            b':' => self.between_colons(),
            b'?' => {
                self.next();
                matches!(self.next()?, b'0' | b'1').then_some(Bare::Other)
            }
            b'@' => {
                self.next();
                matches!(self.number()?, Bare::Integer(_)).then_some(Bare::Other)
            }
            b'*' | b'a'..=b'z' | b'A'..=b'Z' => Some(Bare::Text(self.take_while(is_token))),
            _ => None,
        }
    }

    fn string(&mut self) -> Option<Bare> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next()? {
                b'"' => return Some(Bare::Text(text)),
                b'\\' => text.push(char::from(
                    self.next().filter(|byte| matches!(byte, b'"' | b'\\'))?,
                )),
                byte @ b' '..=b'~' => text.push(char::from(byte)),
                _ => return None,
            }
        }
    }

    /// Parses at most 15 digits, or 12 before the point and 3 after it, which always fit an `i64`.
    fn number(&mut self) -> Option<Bare> {
        let sign = if self.skip(b'-') { -1 } else { 1 };
        let whole = self.take_while(|byte| byte.is_ascii_digit());
        if whole.is_empty() || whole.len() > 15 {
            return None;
        }
        let number = whole.parse::<i64>().ok()?;
        if !self.skip(b'.') {
            return Some(Bare::Integer(sign * number));
        }
        let part = self.take_while(|byte| byte.is_ascii_digit());
        if whole.len() > 12 || part.is_empty() || part.len() > 3 {
            return None;
        }
        let thousandths = format!("{part:0<3}").parse::<i64>().ok()?;
        Some(Bare::Decimal(sign * (number * 1_000 + thousandths)))
    }

    fn between_colons(&mut self) -> Option<Bare> {
        self.next();
        self.take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'='));
        (self.next()? == b':').then_some(Bare::Other)
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_items_with_parameters() {
        let read =
            list("\"per \\\"s\\\"\";q=20;w=1 ,\tburst; x=1.5;ok;pk=:aGk=:;b=?1;d=@12").unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].value, Bare::Text("per \"s\"".into()));
        assert_eq!(
            (read[0].count("q"), read[0].count("w")),
            (Some(20), Some(1))
        );
        assert_eq!(read[1].value, Bare::Text("burst".into()));
        assert_eq!(read[1].parameter("x"), Some(&Bare::Decimal(1_500)));
        for other in ["ok", "pk", "b", "d"] {
            assert_eq!(read[1].parameter(other), Some(&Bare::Other), "{other}");
        }
    }

    #[test]
    fn dictionaries() {
        let read = dictionary("limit=100, remaining=50;x=1, reset=5").unwrap();
        let keys: Vec<(&str, Option<u64>)> = read
            .iter()
            .map(|m| (m.key.as_str(), m.value.count()))
            .collect();
        assert_eq!(
            keys,
            [
                ("limit", Some(100)),
                ("remaining", Some(50)),
                ("reset", Some(5))
            ]
        );
    }

    #[test]
    fn an_invalid_field_is_ignored() {
        for text in [
            "",
            "\"a",
            "\"a\\n\"",
            "\"a\";",
            "\"a\";R=1",
            "\"a\";r=",
            "\"a\" \"b\"",
            "\"a\",",
            "1234567890123456",
            "1.",
            "1.2345",
            "--1",
            "(\"a\")",
            ":a",
            "?2",
            "@1.5",
            "\u{e9}",
            "\"\u{7f}\"",
        ] {
            assert_eq!(list(text), None, "{text:?}");
        }
        assert_eq!(dictionary("=1"), None);
        assert_eq!(dictionary("A=1"), None);
    }

    #[test]
    fn bounds_hold() {
        let many = |count: usize| vec!["1"; count].join(",");
        assert_eq!(list(&many(MAX_MEMBERS)).unwrap().len(), MAX_MEMBERS);
        assert_eq!(list(&many(MAX_MEMBERS + 1)), None);
        let parameters = |count: usize| format!("1{}", ";a".repeat(count));
        assert!(list(&parameters(MAX_PARAMETERS)).is_some());
        assert_eq!(list(&parameters(MAX_PARAMETERS + 1)), None);
        assert_eq!(list(&format!("\"{}\"", "a".repeat(MAX_BYTES))), None);
    }
}
