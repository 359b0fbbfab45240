//! Converts header values to strings.

use std::borrow::Cow;

use http::{HeaderMap, HeaderValue};

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
