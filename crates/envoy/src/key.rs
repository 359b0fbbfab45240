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

/// The prefix of a key that contains a longer key's digest. A window length is a minimal
/// varint and these bytes are not, so the two cannot be confused.
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

fn text(key: &mut Vec<u8>, text: &str) {
    // A `usize` fits in 64 bits on every supported platform.
    number(key, u64::try_from(text.len()).unwrap_or(u64::MAX));
    key.extend_from_slice(text.as_bytes());
}

/// Appends a number as LEB128 varint: 7 bits per byte, the lowest bits first. The high bit of a
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
