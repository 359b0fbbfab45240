//! Writes the parts of RFC 9651 (structured fields) that the `RateLimit` headers need.

/// The largest integer that a structured field may contain.
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// Appends `number` in decimal. A number above the maximum of a structured field is replaced with
/// the maximum.
pub(crate) fn integer(out: &mut Vec<u8>, number: u64) {
    let mut digits = itoa::Buffer::new();
    out.extend_from_slice(digits.format(number.min(MAX_INTEGER)).as_bytes());
}

/// Appends the parameter `;name=number`.
pub(crate) fn parameter(out: &mut Vec<u8>, name: u8, number: u64) {
    out.extend_from_slice(&[b';', name, b'=']);
    integer(out, number);
}

/// Appends `text` as the content of a structured field string. Quotes and backslashes are escaped,
/// and characters other than printable ASCII are replaced with `?`.
pub(crate) fn string_content(out: &mut Vec<u8>, text: &str) {
    if text.bytes().all(is_plain) {
        return out.extend_from_slice(text.as_bytes());
    }
    for c in text.chars() {
        match u8::try_from(c) {
            Ok(escaped @ (b'"' | b'\\')) => out.extend_from_slice(&[b'\\', escaped]),
            Ok(plain @ b' '..=b'~') => out.push(plain),
            _ => out.push(b'?'),
        }
    }
}

/// Appends `text` as the content of a structured field string. `text` must consist of printable
/// ASCII without quotes and backslashes, as the text of a limit does.
pub(crate) fn plain_content(out: &mut Vec<u8>, text: &str) {
    debug_assert!(text.bytes().all(is_plain), "{text:?}");
    out.extend_from_slice(text.as_bytes());
}

/// Returns whether a structured field string contains this byte without escaping.
fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl Fn(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn integers_stay_in_range() {
        assert_eq!(written(|out| integer(out, 0)), "0");
        assert_eq!(written(|out| integer(out, 1_002_030)), "1002030");
        assert_eq!(written(|out| integer(out, MAX_INTEGER)), "999999999999999");
        assert_eq!(written(|out| integer(out, u64::MAX)), "999999999999999");
        assert_eq!(written(|out| parameter(out, b'q', 20)), ";q=20");
    }

    #[test]
    fn strings_hold_printable_ascii() {
        assert_eq!(written(|out| string_content(out, "api:1/s ~")), "api:1/s ~");
        assert_eq!(
            written(|out| string_content(out, "a \"b\\\" \u{e9}\n\u{7f}")),
            "a \\\"b\\\\\\\" ???"
        );
    }
}
