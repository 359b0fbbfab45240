//! The cookies of a request.

use std::borrow::Cow;

use http::{HeaderMap, header::COOKIE};
use percent_encoding::percent_decode;

use crate::{AmbiguousRequest, ambiguous::single_value};

/// Returns the decoded value of the cookie `name`, which is the source of the entry `entry`.
///
/// RFC 6265 gives the percent sign no meaning, but many frameworks decode it. No encoder escapes a
/// letter, a digit or one of `-._~`. A value with a needless escape is rejected, because some
/// services decode the escape and others do not. All other escapes are decoded, so that `a%3Db` and
/// `a=b` have the same count.
///
/// # Errors
///
/// Returns [`AmbiguousRequest`] if there are several values, or if a value escapes a character
/// needlessly.
pub(crate) fn cookie_entry<'r>(
    entry: &str,
    headers: &'r HeaderMap,
    name: &str,
) -> Result<Option<Cow<'r, str>>, AmbiguousRequest> {
    let mut values = Vec::new();
    for value in cookies(headers, name) {
        if hides_letters(value) {
            return Err(AmbiguousRequest::HiddenLetters(entry.into()));
        }
        values.push(match percent_decode(value).into() {
            Cow::Borrowed(bytes) => String::from_utf8_lossy(bytes),
            Cow::Owned(bytes) => Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()),
        });
    }
    single_value(entry, values.into_iter())
}

/// Returns true if `value` contains an escaped character that does not need escaping.
fn hides_letters(value: &[u8]) -> bool {
    let escaped = |escape: &[u8]| match escape {
        [b'%', digits @ ..] => {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 16).ok()
        }
        _ => None,
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    value.windows(3).filter_map(escaped).any(is_plain)
}

/// Returns the values of all cookies named `name`, without surrounding quotation marks.
fn cookies<'r>(headers: &'r HeaderMap, name: &str) -> impl Iterator<Item = &'r [u8]> {
    let lines = headers.get_all(COOKIE).iter();
    let pairs = lines
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
        .filter_map(|pair| {
            let equals = pair.iter().position(|byte| *byte == b'=')?;
            Some((pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii()))
        });
    let named = pairs.filter(move |(known, _)| *known == name.as_bytes());
    named.map(|(_, value)| {
        let bare = value
            .strip_prefix(b"\"")
            .and_then(|rest| rest.strip_suffix(b"\""));
        bare.unwrap_or(value)
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn all_cookies_of_a_name_are_found() {
        let mut headers = HeaderMap::new();
        for line in [
            "a=1; session=\"x=y\";empty=",
            "session=late; c = 3 ;=; ;flag",
        ] {
            headers.append(COOKIE, HeaderValue::from_static(line));
        }
        for (name, expected) in [
            ("a", &["1"][..]),
            ("session", &["x=y", "late"]),
            ("empty", &[""]),
            ("c", &["3"]),
            ("flag", &[]),
            ("A", &[]),
            ("d", &[]),
        ] {
            let found: Vec<_> = cookies(&headers, name).collect();
            let expected: Vec<_> = expected.iter().map(|text| text.as_bytes()).collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_cookie_has_one_spelling() {
        let read = |line: &'static str| {
            let mut headers = HeaderMap::new();
            headers.append(COOKIE, HeaderValue::from_static(line));
            cookie_entry("cookie.s", &headers, "s").map(|value| value.map(Cow::into_owned))
        };
        for (line, expected) in [
            ("s=abc", "abc"),
            ("s=a%3Db%2f", "a=b/"),
            ("s=a%3db; s=a=b", "a=b"),
            ("s=100%", "100%"),
            ("s=%zz%+1", "%zz%+1"),
            ("s=%ff", "\u{fffd}"),
            // Values are decoded only once, because services decode only once.
            ("s=%2561bc", "%61bc"),
        ] {
            assert_eq!(read(line), Ok(Some(expected.into())), "{line}");
        }
        for line in ["s=%61bc", "s=ab%43", "s=a%2D", "s=x; s=%78"] {
            assert_eq!(
                read(line),
                Err(AmbiguousRequest::HiddenLetters("cookie.s".into())),
                "{line}"
            );
        }
        assert_eq!(
            read("s=a; s=b"),
            Err(AmbiguousRequest::Repeated("cookie.s".into()))
        );
        assert_eq!(read("t=%61"), Ok(None));
    }
}
