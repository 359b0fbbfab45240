//! What a request asks for: a path and a query.

use std::borrow::Cow;

use http::Uri;

use crate::path;

/// The target of a request.
#[derive(Clone, Debug)]
pub(crate) struct Target<'r> {
    /// In normal form.
    pub(crate) path: Cow<'r, str>,
    query: Cow<'r, str>,
}

impl<'r> Target<'r> {
    /// Reads `/path?query` or `https://host/path?query`.
    pub(crate) fn read(uri: Cow<'r, str>) -> Self {
        match uri {
            Cow::Borrowed(uri) => {
                let (path, query) = split(uri);
                Self {
                    path: path::normal(path),
                    query: Cow::Borrowed(query),
                }
            }
            Cow::Owned(uri) => {
                let (path, query) = split(&uri);
                Self {
                    path: Cow::Owned(path::normal(path).into_owned()),
                    query: Cow::Owned(query.to_owned()),
                }
            }
        }
    }

    /// The target of a request as a server has read it.
    pub(crate) fn of(uri: &'r Uri) -> Self {
        Self {
            path: path::normal(uri.path()),
            query: Cow::Borrowed(uri.query().unwrap_or_default()),
        }
    }

    /// The first parameter `name` of the query, decoded.
    pub(crate) fn parameter(&self, name: &str) -> Option<String> {
        let mut parameters = self
            .query
            .split('&')
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        parameters
            .find(|(key, _)| decoded(key) == name)
            .map(|(_, value)| decoded(value))
    }
}

/// Splits a target into its path and its query.
fn split(uri: &str) -> (&str, &str) {
    let (before, query) = uri.split_once('?').unwrap_or((uri, ""));
    let path = match before.split_once("://") {
        Some((_, rest)) if !before.starts_with('/') => rest.find('/').map_or("", |at| &rest[at..]),
        _ => before,
    };
    (path.split('#').next().unwrap_or(path), query)
}

/// `%41` is `A`, `+` is a space.
fn decoded(text: &str) -> String {
    let mut octets = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = if first == b'%' {
            tail.get(..2).and_then(path::octet)
        } else {
            None
        };
        octets.push(escaped.unwrap_or(if first == b'+' { b' ' } else { first }));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&octets).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_with_and_without_a_host() {
        for (uri, path, q) in [
            ("/p?q=1", "/p", Some("1")),
            ("https://h.example/p?q=1", "/p", Some("1")),
            ("https://h.example", "/", None),
            ("/p#part?q=1", "/p", Some("1")),
            ("/p?a=https://h/x&q=", "/p", Some("")),
            ("/x/../p?%71=a%2Bb+c%2&q=2", "/p", Some("a+b c%2")),
        ] {
            for uri in [Cow::Borrowed(uri), Cow::Owned(uri.to_owned())] {
                let target = Target::read(uri);
                assert_eq!(target.path, path);
                assert_eq!(target.parameter("q").as_deref(), q, "{target:?}");
            }
        }
    }
}
