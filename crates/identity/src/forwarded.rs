//! The `Forwarded` header of RFC 7239. Each proxy on the path adds an element with the address of
//! its peer.
//!
//! ```text
//! Forwarded: for=192.0.2.43, for="[2001:db8:cafe::17]:4711";proto=https;by=203.0.113.43
//! ```
//!
//! The header is parsed from the right, because the nearest proxy appends its element there.
//! Therefore, an unclosed quotation mark in the client's part of the header cannot hide the
//! elements appended by proxies.

/// Returns the `for` parameters of the elements in one header line, starting with the last element.
/// An item is `None` if the element has no valid `for` parameter.
pub(crate) fn for_from_the_right(line: &[u8]) -> impl Iterator<Item = Option<String>> {
    FromTheRight(Some(line), b',').map(for_of)
}

fn for_of(element: &[u8]) -> Option<String> {
    let pairs = FromTheRight(Some(element), b';').filter_map(|pair| {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        Some((&pair[..equals], &pair[equals + 1..]))
    });
    let mut values = pairs.filter(|(name, _)| name.trim_ascii().eq_ignore_ascii_case(b"for"));
    match (values.next(), values.next()) {
        (Some((_, value)), None) => unquoted(std::str::from_utf8(value).ok()?.trim()),
        // A second `for` is invalid, because either of the two may come from the client.
        _ => None,
    }
}

/// Returns a token unchanged, and a quoted string without its quotation marks and escapes.
fn unquoted(value: &str) -> Option<String> {
    let Some(rest) = value.strip_prefix('"') else {
        return (!value.is_empty() && !value.contains('"')).then(|| value.to_owned());
    };
    let mut text = String::new();
    let mut rest = rest.strip_suffix('"')?.chars();
    while let Some(next) = rest.next() {
        match next {
            '\\' => text.push(rest.next()?),
            '"' => return None,
            other => text.push(other),
        }
    }
    Some(text)
}

/// An iterator over the parts of a string, starting with the last part. The string is split at
/// separators outside quoted strings.
struct FromTheRight<'t>(Option<&'t [u8]>, u8);

impl<'t> Iterator for FromTheRight<'t> {
    type Item = &'t [u8];

    fn next(&mut self) -> Option<&'t [u8]> {
        let rest = self.0?;
        let mut quoted = false;
        for at in (0..rest.len()).rev() {
            match rest[at] {
                b'"' if !(quoted && is_escaped(rest, at)) => quoted = !quoted,
                byte if byte == self.1 && !quoted => {
                    self.0 = Some(&rest[..at]);
                    return Some(&rest[at + 1..]);
                }
                _ => {}
            }
        }
        self.0 = None;
        Some(rest)
    }
}

/// Returns true if the number of backslashes directly before `at` is odd.
fn is_escaped(bytes: &[u8], at: usize) -> bool {
    let backslashes = bytes[..at].iter().rev().take_while(|byte| **byte == b'\\');
    backslashes.count() % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(line: &str) -> Vec<Option<String>> {
        for_from_the_right(line.as_bytes()).collect()
    }

    #[test]
    fn elements_are_read_from_the_right() {
        for (line, expected) in [
            ("for=192.0.2.1", &[Some("192.0.2.1")][..]),
            (
                r#"for=192.0.2.43, For="[2001:db8:cafe::17]:4711";proto=https"#,
                &[Some("[2001:db8:cafe::17]:4711"), Some("192.0.2.43")],
            ),
            ("proto=http;by=10.0.0.1; FOR = unknown", &[Some("unknown")]),
            (r#"for="a\"b\\",for=_x"#, &[Some("_x"), Some(r#"a"b\"#)]),
            (r#"for="a,b;c", for=d"#, &[Some("d"), Some("a,b;c")]),
        ] {
            let expected: Vec<_> = expected
                .iter()
                .map(|value| value.map(str::to_owned))
                .collect();
            assert_eq!(all(line), expected, "{line}");
        }
    }

    #[test]
    fn an_invalid_element_is_none_and_affects_no_other() {
        for line in [
            "",
            "for=",
            "for",
            "proto=https",
            "for=a;for=b",
            r#"for="a"#,
            r#"for=a""#,
        ] {
            assert_eq!(all(line), [None], "{line}");
        }
        assert_eq!(all("for=a,,"), [None, None, Some("a".to_owned())]);
        assert_eq!(
            all(r#"for="6.6.6.6, for=b"#)[0].as_deref(),
            Some("b"),
            "an open quote"
        );
        assert_eq!(all(r#"for="x\", for="b""#)[0].as_deref(), Some("b"));
    }

    proptest::proptest! {
        #[test]
        fn nothing_on_the_left_hides_appended_elements(left in "[\"\\\\,;=for a1]{0,30}") {
            for (appended, expected) in [
                ("for=\"[2001:db8::1]:80\"", "[2001:db8::1]:80"),
                ("for=192.0.2.1;proto=http", "192.0.2.1"),
            ] {
                let last = all(&format!("{left}, {appended}")).swap_remove(0);
                proptest::prop_assert_eq!(last.as_deref(), Some(expected));
            }
        }
    }
}
