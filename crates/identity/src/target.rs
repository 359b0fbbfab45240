//! The request target: a path and a query.

use std::borrow::Cow;

use http::Uri;

use crate::{AmbiguousRequest, path};

/// A parsed request target.
#[derive(Clone, Debug)]
pub(crate) struct RequestTarget<'r> {
    path: Result<Cow<'r, str>, AmbiguousRequest>,
    query: Cow<'r, str>,
}

impl<'r> RequestTarget<'r> {
    /// Parses a request target such as `/path?query` or `https://host/path?query`.
    pub(crate) fn parse(uri: Cow<'r, str>) -> Self {
        match uri {
            Cow::Borrowed(uri) => {
                let (path, query) = split(uri);
                Self {
                    path: path::normalize_path(path),
                    query: Cow::Borrowed(query),
                }
            }
            Cow::Owned(uri) => {
                let (path, query) = split(&uri);
                Self {
                    path: path::normalize_path(path).map(|path| Cow::Owned(path.into_owned())),
                    query: Cow::Owned(query.to_owned()),
                }
            }
        }
    }

    /// Returns the request target from a URI that has already been parsed.
    pub(crate) fn of(uri: &'r Uri) -> Self {
        Self {
            path: path::normalize_path(uri.path()),
            query: Cow::Borrowed(uri.query().unwrap_or_default()),
        }
    }

    /// Returns the path in normal form.
    pub(crate) fn path(&self) -> Result<Cow<'_, str>, AmbiguousRequest> {
        match &self.path {
            Ok(path) => Ok(Cow::Borrowed(path)),
            Err(ambiguous) => Err(ambiguous.clone()),
        }
    }

    /// Returns the decoded values of all query parameters with this name.
    pub(crate) fn parameters(&self, name: &str) -> impl Iterator<Item = Cow<'static, str>> {
        let pairs = self.query.split('&');
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let named = pairs.filter(move |(key, _)| decoded(key) == name);
        named.map(|(_, value)| Cow::Owned(decoded(value)))
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

/// Decodes a query component. For example, `%41` becomes `A`, and `+` becomes a space.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = if first == b'%' {
            tail.get(..2).and_then(path::hex_byte)
        } else {
            None
        };
        bytes.push(escaped.unwrap_or(if first == b'+' { b' ' } else { first }));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_with_and_without_a_host() {
        for (uri, path, q) in [
            ("/p?q=1", "/p", &["1"][..]),
            ("https://h.example/p?q=1", "/p", &["1"]),
            ("https://h.example", "/", &[]),
            ("/p#part?q=1", "/p", &["1"]),
            ("/p?a=https://h/x&q=", "/p", &[""]),
            ("/%70?%71=a%2Bb+c%2&q=2", "/p", &["a+b c%2", "2"]),
        ] {
            for uri in [Cow::Borrowed(uri), Cow::Owned(uri.to_owned())] {
                let target = RequestTarget::parse(uri);
                assert_eq!(target.path().unwrap(), path);
                let parameters: Vec<_> = target.parameters("q").collect();
                assert_eq!(parameters, q, "{target:?}");
            }
        }
    }
}
