//! Builds the counter key of a descriptor.
//!
//! ```text
//! | begin, 2 bytes | window in seconds | length | domain | length | key | length | value | … |
//! ```
//!
//! Every part has a length prefix, so that `a` = `b_c` and `a_b` = `c` have different counters. The
//! key contains the window length, so that a per-minute limit and a per-hour limit on the same
//! entries have different counters. The key does not contain the number of requests per unit, so
//! that the counter keeps its value if the limit changes.

use sha2::{Digest, Sha256};
use tidegate_core::{DESCRIPTOR_KEY, bounds::MAX_KEY_BYTES};

/// The prefix of a key that contains a longer key's digest. No window length begins with this
/// prefix: a window length is a minimal varint, and the prefix is not.
const DIGESTED: [u8; 2] = [0x80, 0];

/// Writes the key of `domain` and `entries` into `key`. If the key is longer than
/// [`MAX_KEY_BYTES`], it is replaced by its SHA-256 digest.
pub(super) fn write<'e>(
    key: &mut Vec<u8>,
    domain: &str,
    window_seconds: u64,
    entries: impl Iterator<Item = (&'e str, &'e str)>,
) {
    key.clear();
    key.extend_from_slice(&DESCRIPTOR_KEY);
    number(key, window_seconds);
    text(key, domain);
    for (name, value) in entries {
        text(key, name);
        text(key, value);
    }
    if key.len() > MAX_KEY_BYTES {
        let digest = Sha256::digest(&key);
        key.clear();
        key.extend_from_slice(&DESCRIPTOR_KEY);
        key.extend_from_slice(&DIGESTED);
        key.extend_from_slice(&digest);
    }
}

/// Returns the common prefix of all keys of `domain` whose first entries are `entries`. A key that
/// was replaced by its digest does not have this prefix.
pub(super) fn prefix<'e>(
    domain: &str,
    window_seconds: u64,
    entries: impl Iterator<Item = (&'e str, &'e str)>,
) -> Vec<u8> {
    let mut key = DESCRIPTOR_KEY.to_vec();
    number(&mut key, window_seconds);
    text(&mut key, domain);
    for (name, value) in entries {
        text(&mut key, name);
        text(&mut key, value);
    }
    key
}

/// Returns the entries that follow `prefix` in a key. Returns `None` if the key does not begin with
/// `prefix`, or if the rest is not a list of entries.
pub(super) fn parts_after<'k>(key: &'k [u8], prefix: &[u8]) -> Option<Vec<(&'k str, &'k str)>> {
    let mut rest = key.strip_prefix(prefix)?;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        parts.push((take_text(&mut rest)?, take_text(&mut rest)?));
    }
    Some(parts)
}

fn take_text<'k>(rest: &mut &'k [u8]) -> Option<&'k str> {
    let (mut length, mut shift) = (0_usize, 0_u32);
    loop {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        length |= usize::from(byte & 0x7F).checked_shl(shift)?;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
        if shift > 28 {
            return None;
        }
    }
    let (text, after) = rest.split_at_checked(length)?;
    *rest = after;
    std::str::from_utf8(text).ok()
}

fn text(key: &mut Vec<u8>, text: &str) {
    // A `usize` fits in 64 bits on every supported platform.
    number(key, u64::try_from(text.len()).unwrap_or(u64::MAX));
    key.extend_from_slice(text.as_bytes());
}

/// Appends a number as an LEB128 varint: 7 bits per byte, the lowest bits first. The high bit of a
/// byte is set if more bytes follow.
fn number(key: &mut Vec<u8>, mut number: u64) {
    loop {
        let low = u8::try_from(number & 0x7F).unwrap_or(0);
        number >>= 7;
        if number == 0 {
            key.push(low);
            return;
        }
        key.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(domain: &str, window: u64, entries: &[(&str, &str)]) -> Vec<u8> {
        let mut key = Vec::new();
        write(&mut key, domain, window, entries.iter().copied());
        key
    }

    #[test]
    fn entries_are_read_back_from_a_key() {
        let long = "x".repeat(300);
        let entries = [("?", "a == 'b'"), ("user", "é"), ("path", &long), ("", "")];
        let key = key("d", 86_400, &entries);
        let prefix = prefix("d", 86_400, entries[..1].iter().copied());
        assert_eq!(parts_after(&key, &prefix).unwrap(), entries[1..]);
        assert_eq!(parts_after(&prefix, &prefix).unwrap(), []);
        for end in prefix.len() + 1..key.len() {
            let parts = parts_after(&key[..end], &prefix);
            assert!(parts.is_none_or(|parts| parts.len() < 3), "{end}");
        }
        assert_eq!(parts_after(b"other", &prefix), None);
    }

    #[test]
    fn no_two_descriptors_share_a_key() {
        let long = "x".repeat(MAX_KEY_BYTES);
        let longer = "x".repeat(MAX_KEY_BYTES + 1);
        let keys = [
            key("d", 60, &[]),
            key("d", 60, &[("a", "b_c")]),
            key("d", 60, &[("a_b", "c")]),
            key("d", 60, &[("a", "b"), ("c", "")]),
            key("d", 60, &[("a", "b")]),
            key("d", 3_600, &[("a", "b")]),
            key("da", 60, &[("b", "")]),
            key("d", 60, &[("a", &long)]),
            key("d", 60, &[("a", &longer)]),
            key("d", 1, &[("a", &longer)]),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(key.len() <= MAX_KEY_BYTES);
            assert!(!keys[..at].contains(key), "{at}");
        }
    }
}
