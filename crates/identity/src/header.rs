//! Converts header values to strings.

use std::borrow::Cow;

use http::{HeaderMap, HeaderValue, header::COOKIE};

/// Returns a header's value without surrounding white space, which is not part of the value (RFC
/// 9110, section 5.5). The value may contain any byte. Invalid UTF-8 becomes U+FFFD, so that such a
/// value can still be used in a key.
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

/// Splits a value in which a proxy has joined the lines of a header with commas, as Envoy does. The
/// proxy adds no space, so a comma before white space is a part of a line.
///
/// Without this function, a client could get a new count by a second line of a header that a rule
/// counts by.
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

/// Returns `headers` with one value for each line that the client sent, if the proxy joins lines.
/// `Cookie` is not split, because its lines are joined with a semicolon.
#[must_use]
pub fn split_joined_headers(headers: &HeaderMap) -> HeaderMap {
    let mut split = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        if name == COOKIE || !value.as_bytes().contains(&b',') {
            split.append(name, value.clone());
            continue;
        }
        for line in joined_lines(value.as_bytes()) {
            // A part of a valid value is valid. A map with too many lines is full.
            if let Ok(line) = HeaderValue::from_bytes(line)
                && split.try_append(name, line).is_err()
            {
                return split;
            }
        }
    }
    split
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
    fn cookies_are_not_split() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("cookie", "a=1,2"), ("x-a", "1,2"), ("x-a", "3")] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let split = split_joined_headers(&headers);
        let lines: Vec<_> = split.get_all("x-a").iter().collect();
        assert_eq!(lines, ["1", "2", "3"]);
        assert_eq!(split["cookie"], "a=1,2");
    }
}
