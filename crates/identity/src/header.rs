//! Converts header values to strings.

use std::{borrow::Cow, fmt};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{COOKIE, FORWARDED},
};

use crate::client_ip::X_FORWARDED_FOR;

/// Returns a header's value without surrounding white space, which is not part of the value (RFC
/// 9110, section 5.5). The value may contain any byte. Invalid UTF-8 becomes U+FFFD, so that a
/// value with invalid UTF-8 can still be part of a key.
#[must_use]
pub fn header_text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes().trim_ascii())
}

/// Joins all lines of a header with `separator`. Returns `None` if the header is absent.
#[must_use]
pub fn joined_header<'r>(
    headers: &'r HeaderMap,
    name: &str,
    separator: &str,
) -> Option<Cow<'r, str>> {
    let mut lines = headers.get_all(name).iter();
    let first = header_text(lines.next()?);
    Some(lines.fold(first, |joined, line| {
        Cow::Owned(format!("{joined}{separator}{}", header_text(line)))
    }))
}

/// Splits a value into lines. Some proxies, such as Envoy, join all lines of a header into one
/// value, with commas between the lines. These proxies do not add spaces, so a comma followed by
/// white space is part of a line.
///
/// If the lines stayed joined, a client could send a second line of a header that a rule uses as a
/// key, and thereby get a new counter.
pub fn joined_lines(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(value);
    std::iter::from_fn(move || {
        let joined = rest?;
        let is_joint =
            |at: &usize| joined[*at] == b',' && !matches!(joined.get(at + 1), Some(b' ' | b'\t'));
        // `at` is the position of a comma, so both ranges are within `joined`.
        let Some(at) = (0..joined.len()).find(is_joint) else {
            rest = None;
            return Some(joined);
        };
        rest = Some(&joined[at + 1..]);
        Some(&joined[..at])
    })
}

/// The maximum number of header lines in a request, counted after joined lines have been split.
pub const MAX_HEADER_LINES: usize = 1_000;

/// The request has more than [`MAX_HEADER_LINES`] header lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyHeaderLines;

impl fmt::Display for TooManyHeaderLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the request has more than {MAX_HEADER_LINES} header lines; send fewer"
        )
    }
}

impl std::error::Error for TooManyHeaderLines {}

/// Returns true for headers that [`split_joined_headers`] must not split. The lines of `Cookie` are
/// joined with semicolons and not with commas. The address lists `Forwarded` and `X-Forwarded-For`
/// are split by their parsers.
#[must_use]
pub fn is_never_split(name: &HeaderName) -> bool {
    [COOKIE, FORWARDED, X_FORWARDED_FOR].contains(name)
}

/// For a proxy that joins header lines, returns `headers` with one value for each line that the
/// client sent. Headers for which [`is_never_split`] returns true are unchanged.
///
/// # Errors
///
/// Fails if there would be more than [`MAX_HEADER_LINES`] lines. The function never drops lines
/// that exceed the maximum, because a client could hide a line among the dropped lines.
pub fn split_joined_headers(headers: &HeaderMap) -> Result<HeaderMap, TooManyHeaderLines> {
    let mut split = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let mut append = |value| {
            if split.len() >= MAX_HEADER_LINES {
                return Err(TooManyHeaderLines);
            }
            split
                .try_append(name, value)
                .map_err(|_| TooManyHeaderLines)
        };
        if is_never_split(name) || !value.as_bytes().contains(&b',') {
            append(value.clone())?;
            continue;
        }
        for line in joined_lines(value.as_bytes()) {
            // The conversion never fails, because any part of a valid header value is valid.
            if let Ok(line) = HeaderValue::from_bytes(line) {
                append(line)?;
            }
        }
    }
    Ok(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_at_commas_without_a_space() {
        for (joined, expected) in [
            ("", &[""][..]),
            ("a", &["a"]),
            ("a,b", &["a", "b"]),
            ("a, b", &["a, b"]),
            ("a,\tb,c", &["a,\tb", "c"]),
            (",a,", &["", "a", ""]),
            ("a,,b", &["a", "", "b"]),
        ] {
            let lines: Vec<_> = joined_lines(joined.as_bytes()).collect();
            let expected: Vec<_> = expected.iter().map(|line| line.as_bytes()).collect();
            assert_eq!(lines, expected, "{joined}");
        }
    }

    #[test]
    fn cookies_and_lists_of_addresses_are_not_split() {
        let mut headers = HeaderMap::new();
        let unsplit = ["cookie", "forwarded", "x-forwarded-for"];
        for (name, value) in [("x-a", "1,2"), ("x-a", "3")] {
            headers.append(name, HeaderValue::from_static(value));
        }
        for name in unsplit {
            headers.append(name, HeaderValue::from_static("a=1,2"));
        }
        let split = split_joined_headers(&headers).unwrap();
        let lines: Vec<_> = split.get_all("x-a").iter().collect();
        assert_eq!(lines, ["1", "2", "3"]);
        for name in unsplit {
            let lines: Vec<_> = split.get_all(name).iter().collect();
            assert_eq!(lines, ["a=1,2"], "{name}");
        }
    }

    #[test]
    fn too_many_lines_are_an_error() {
        for (lines, is_split) in [(MAX_HEADER_LINES, true), (MAX_HEADER_LINES + 1, false)] {
            let mut headers = HeaderMap::new();
            let value = ",".repeat(lines - 1);
            headers.append("x-a", HeaderValue::from_str(&value).unwrap());
            let split = split_joined_headers(&headers);
            assert_eq!(
                split.map(|split| split.len()).ok(),
                is_split.then_some(lines)
            );
        }
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_str(&",".repeat(40_000)).unwrap());
        assert_eq!(split_joined_headers(&headers), Err(TooManyHeaderLines));
    }
}
