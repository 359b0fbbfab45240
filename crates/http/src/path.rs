//! Paths that mean the same are written the same.

use std::borrow::Cow;

use crate::Unclear;

/// `path` in the normal form of RFC 3986, section 6.2.2: percent-encoded letters, digits, `-`, `.`, `_`
/// and `~` decoded, other encodings in capitals; and with one slash where several follow each other.
///
/// A rule for `/login` would otherwise be passed by as `/%6Cogin` or `//login`, which many servers take for the same: nginx merges
/// slashes unless told otherwise. What they hold apart stays apart: `/Login`, `/login;x`, `/a%2Fb`.
///
/// # Errors
///
/// [`Unclear::DotSegments`] where a segment is `.` or `..`, encoded or with parameters (`..;x`), also behind what some
/// take for a slash: `%2F`, `\` and `%5C`. Clients resolve such segments before they send them; of servers some do, and
/// some look for what is called so.
pub fn normal(path: &str) -> Result<Cow<'_, str>, Unclear> {
    let is_plain = !path.contains(['%', '\\']) && !path.contains("/.") && !path.contains("//");
    if path.starts_with('/') && is_plain {
        return Ok(Cow::Borrowed(path));
    }
    let decoded = decode_unreserved(path);
    if has_dot_segments(&decoded) {
        return Err(Unclear::DotSegments);
    }
    Ok(Cow::Owned(with_single_slashes(&decoded)))
}

/// `path` from a slash on, without those that follow another.
fn with_single_slashes(path: &str) -> String {
    let mut out = String::with_capacity(path.len() + 1);
    out.push('/');
    for letter in path.chars() {
        if letter != '/' || !out.ends_with('/') {
            out.push(letter);
        }
    }
    out
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

/// Whether anybody might find `.` or `..` among the segments of a path whose unreserved characters are decoded.
fn has_dot_segments(path: &str) -> bool {
    let segments = path.split(['/', '\\']);
    let segments = segments.flat_map(|segment| segment.split("%2F"));
    let mut segments = segments.flat_map(|segment| segment.split("%5C"));
    segments.any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
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
            ("", "/"),
            ("login", "/login"),
            ("//login", "/login"),
            ("///%2f//a//", "/%2F/a/"),
            ("/a//b", "/a/b"),
            ("/login;x", "/login;x"),
            ("/caf\u{e9}/%", "/caf\u{e9}/%"),
            ("/%\u{e9}x", "/%\u{e9}x"),
            ("/.well-known/x", "/.well-known/x"),
            ("/a/.../..b/c..", "/a/.../..b/c.."),
            ("/a%2F..b", "/a%2F..b"),
        ] {
            assert_eq!(normal(given).unwrap(), expected, "{given}");
        }
    }

    #[test]
    fn what_some_resolve_and_some_do_not_is_refused() {
        for path in [
            "/x/../login",
            "/x/..",
            "/.",
            "/./login",
            "..",
            "/x/%2e%2E/login",
            "/x/.%2e",
            "/x/..;/login",
            "/x/..;a=1/login",
            "/x%2F..%2flogin",
            "/x/..%2Flogin",
            "/x/..\\login",
            "/x%5c..%5Clogin",
        ] {
            assert_eq!(normal(path), Err(Unclear::DotSegments), "{path}");
        }
    }

    proptest::proptest! {
        #[test]
        fn normal_form_is_stable(path in "(/|\\.|%|2|e|E|F|a|\u{e9}){0,24}") {
            let Ok(once) = normal(&path) else { return Ok(()) };
            // Decoding can lay bare a new escape (`%%32e`), so only a form without one must stay.
            if !once.contains('%') {
                proptest::prop_assert_eq!(&normal(&once).unwrap(), &once);
            }
            proptest::prop_assert!(once.starts_with('/') && !once.contains("//"));
        }
    }
}
