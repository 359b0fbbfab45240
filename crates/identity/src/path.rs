//! Normalisation of paths.

use std::borrow::Cow;

use crate::AmbiguousRequest;

/// Returns `path` in the normal form of RFC 3986, section 6.2.2, with repeated slashes merged.
/// Decodes percent-encoded letters, digits, `-`, `.`, `_` and `~`. Writes all other escapes with
/// upper-case digits.
///
/// Without normalisation, `/%6Cogin` and `//login` would bypass a rule for `/login`, because many
/// servers treat these paths as the same path. For example, nginx merges slashes by default. Paths
/// that servers distinguish stay different, such as `/Login`, `/login;x` and `/a%2Fb`.
///
/// # Errors
///
/// Returns [`AmbiguousRequest::DotSegments`] if a segment is `.` or `..`. A segment also counts as
/// `.` or `..` if it is encoded, has parameters (`..;x`), or follows `%2F`, `\` or `%5C`, which
/// some servers treat as a slash. Ordinary clients resolve the segments `.` and `..` before they
/// send a request. Some servers also resolve these segments, and others look for a file with that
/// name.
pub fn normalize_path(path: &str) -> Result<Cow<'_, str>, AmbiguousRequest> {
    let is_plain = !path.contains(['%', '\\']) && !path.contains("/.") && !path.contains("//");
    if path.starts_with('/') && is_plain {
        return Ok(Cow::Borrowed(path));
    }
    let decoded = decode_unreserved(path);
    if has_dot_segments(&decoded) {
        return Err(AmbiguousRequest::DotSegments);
    }
    Ok(Cow::Owned(with_single_slashes(&decoded)))
}

/// Returns `path` with a leading slash and with repeated slashes merged.
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
        match rest.as_bytes().get(at + 1..at + 3).and_then(hex_byte) {
            Some(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
                out.push(char::from(byte));
            }
            // The slice ends at a character boundary, because an escape consists of ASCII
            // characters.
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

/// Returns the byte that two hexadecimal digits encode.
pub(crate) fn hex_byte(digits: &[u8]) -> Option<u8> {
    let value = |digit: u8| char::from(digit).to_digit(16);
    let [high, low] = digits else { return None };
    u8::try_from(value(*high)? * 16 + value(*low)?).ok()
}

/// Returns true if some server might find a `.` or `..` segment in `path`. The caller must have
/// decoded the unreserved characters of `path`.
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
            assert_eq!(normalize_path(given).unwrap(), expected, "{given}");
        }
    }

    #[test]
    fn ambiguous_dot_segments_are_refused() {
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
            assert_eq!(
                normalize_path(path),
                Err(AmbiguousRequest::DotSegments),
                "{path}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn normal_form_is_stable(path in "(/|\\.|%|2|e|E|F|a|\u{e9}){0,24}") {
            let Ok(once) = normalize_path(&path) else { return Ok(()) };
            // Decoding can produce a new escape (`%%32e`), so only a path without escapes must stay
            // unchanged when it is normalised again.
            if !once.contains('%') {
                proptest::prop_assert_eq!(&normalize_path(&once).unwrap(), &once);
            }
            proptest::prop_assert!(once.starts_with('/') && !once.contains("//"));
        }
    }
}
