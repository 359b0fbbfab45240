//! Paths that mean the same are written the same.

use std::borrow::Cow;

/// `path` in the normal form of RFC 3986, section 6.2.2: percent-encoded letters, digits, `-`, `.`, `_`
/// and `~` decoded, other encodings in capitals, `.` and `..` segments resolved.
///
/// A rule for `/login` would otherwise be passed by as `/%6Cogin` or `/x/../login`, which most servers
/// take for the same. What the RFC holds apart stays apart: `//login`, `/Login`, `/a%2Fb`.
#[must_use]
pub fn normal(path: &str) -> Cow<'_, str> {
    if path.starts_with('/') && !path.contains('%') && !path.contains("/.") {
        return Cow::Borrowed(path);
    }
    let decoded = decode_unreserved(path);
    if decoded.starts_with('/') && !decoded.contains("/.") {
        return Cow::Owned(decoded);
    }
    Cow::Owned(without_dots(&decoded))
}

fn decode_unreserved(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        match rest.as_bytes().get(at + 1..at + 3).and_then(octet) {
            Some(octet) if octet.is_ascii_alphanumeric() || b"-._~".contains(&octet) => {
                out.push(char::from(octet));
            }
            // Two hexadecimal digits, so the slice ends between characters.
            Some(_) => out.extend(rest[at..at + 3].chars().map(|c| c.to_ascii_uppercase())),
            None => {
                out.push('%');
                rest = &rest[at + 1..];
                continue;
            }
        }
        rest = &rest[at + 3..];
    }
    out.push_str(rest);
    out
}

/// The octet that two hexadecimal digits stand for.
pub(crate) fn octet(digits: &[u8]) -> Option<u8> {
    let value = |digit: u8| char::from(digit).to_digit(16);
    let [high, low] = digits else { return None };
    u8::try_from(value(*high)? * 16 + value(*low)?).ok()
}

fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.strip_prefix('/').unwrap_or(path).split('/').peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                // `/a/.` and `/a/b/..` are the directory `/a/`, whose last segment is empty.
                if is_last {
                    kept.push("");
                }
            }
            _ => kept.push(segment),
        }
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equivalent_paths_are_written_alike() {
        for (given, expected) in [
            ("/login", "/login"),
            ("/%6Cogin", "/login"),
            ("/%6cogin%2", "/login%2"),
            ("/a%2fb%20c", "/a%2Fb%20c"),
            ("/x/../login", "/login"),
            ("/x/%2e%2E/login", "/login"),
            ("/./login/.", "/login/"),
            ("/a/b/..", "/a/"),
            ("/../../etc", "/etc"),
            ("", "/"),
            ("login", "/login"),
            ("//login", "//login"),
            ("/caf\u{e9}/%", "/caf\u{e9}/%"),
            ("/%\u{e9}x", "/%\u{e9}x"),
            ("/.well-known/x", "/.well-known/x"),
        ] {
            assert_eq!(normal(given), expected, "{given}");
        }
    }

    proptest::proptest! {
        #[test]
        fn normal_form_is_stable(path in "(/|\\.|%|2|e|E|F|a|\u{e9}){0,24}") {
            let once = normal(&path).into_owned();
            // Decoding can lay bare a new escape (`%%32e`), so only a form without one must stay.
            if !once.contains('%') {
                proptest::prop_assert_eq!(normal(&once), once.as_str());
            }
            proptest::prop_assert!(once.starts_with('/'));
        }
    }
}
