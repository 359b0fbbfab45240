//! The encoding of keys: a rule's scope (8 bytes that identify the rule) and the values of its key
//! entries.
//!
//! ```text
//! | scope: 8 bytes, from the rule's name | length, 2 bytes | value | … | last value |
//! ```
//!
//! Every value except the last has a length prefix, so that (`a:b`, `c`) and (`a`, `b:c`) have
//! different keys. A rule's scope must be the same in every process and version, because keys are
//! stored in snapshots and shared with other nodes.

/// The prefix of all keys of a rule, derived from the rule's name.
pub(super) type Scope = [u8; 8];

/// The lowest byte that a scope can begin with. No UTF-8 string begins with this byte or a higher
/// byte.
const FIRST: u8 = 0xF8;

/// The prefix that [`free_key`] adds to keys that could be mistaken for a rule's key.
const ESCAPE: u8 = 0xF7;

/// The prefix of keys for Envoy descriptors. No rule's key and no [free key](free_key) begins with
/// this prefix: an escape byte at the start of a free key is never followed by the byte `d`.
pub const DESCRIPTOR_KEY: [u8; 2] = [ESCAPE, b'd'];

/// The key of the charge of a request that a [block by entries](super::EntryBlocks) denies and to
/// which no rule applies. No rule's key and no [free key](free_key) begins with this prefix, for
/// the reason given at [`DESCRIPTOR_KEY`].
pub const BLOCK_KEY: [u8; 2] = [ESCAPE, b'b'];

/// The largest key space number for [`free_key_in`].
pub const MAX_KEY_SPACE: u8 = 15;

const _: () = assert!(MAX_KEY_SPACE < BLOCK_KEY[1] && MAX_KEY_SPACE < DESCRIPTOR_KEY[1]);
const _: () = assert!(BLOCK_KEY[1] < ESCAPE && DESCRIPTOR_KEY[1] < ESCAPE);

/// Returns the encoded key for limits that are sent with a request and belong to no rule. The
/// result is `key` itself or, if it could be mistaken for a rule's key, an escaped copy in
/// `buffer`. The result is never a rule's key, and different keys have different results.
#[must_use]
pub fn free_key<'a>(key: &'a [u8], buffer: &'a mut Vec<u8>) -> &'a [u8] {
    if key.first().is_none_or(|first| *first < ESCAPE) {
        return key;
    }
    buffer.clear();
    buffer.push(ESCAPE);
    buffer.extend_from_slice(key);
    buffer
}

/// Encodes a key like [`free_key`], but in the key space `space`, so that `key` has a separate
/// count in each space. [`free_key`] uses space 0. In any other space, the result is two bytes
/// longer. `space` must be at most [`MAX_KEY_SPACE`].
#[must_use]
pub fn free_key_in<'a>(space: u8, key: &'a [u8], buffer: &'a mut Vec<u8>) -> &'a [u8] {
    debug_assert!(space <= MAX_KEY_SPACE, "key space {space} is out of range");
    if space == 0 {
        return free_key(key, buffer);
    }
    // The prefix is unambiguous, because the second byte of an escaped free key or of a
    // descriptor's key is never a key space number.
    buffer.clear();
    buffer.extend_from_slice(&[ESCAPE, space]);
    buffer.extend_from_slice(key);
    buffer
}

/// Decodes a result of [`free_key_in`]. Returns the key space and the original key.
#[must_use]
pub fn free_key_parts(encoded: &[u8]) -> (u8, &[u8]) {
    match encoded {
        [ESCAPE, space, key @ ..] if *space <= MAX_KEY_SPACE => (*space, key),
        [ESCAPE, key @ ..] => (0, key),
        key => (0, key),
    }
}

/// Returns the scope of the rule `name`: the 64-bit FNV-1a hash of the name, with additional
/// mixing. The first byte of a scope is in a range that [free keys](free_key) never use.
pub(super) fn scope(name: &str) -> Scope {
    let fnv = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mixed = (fnv ^ (fnv >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut scope = (mixed ^ (mixed >> 29)).to_be_bytes();
    scope[0] |= FIRST;
    scope
}

/// Starts a key: appends its scope to `buffer`.
pub(super) fn begin(buffer: &mut Vec<u8>, scope: Scope) {
    buffer.extend_from_slice(&scope);
}

/// Appends a value to the key at the end of `buffer`. The value must have at most
/// [`crate::bounds::MAX_ENTRY_VALUE_BYTES`] bytes.
pub(super) fn push(buffer: &mut Vec<u8>, value: &str, is_last: bool) {
    if !is_last {
        let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
        buffer.extend_from_slice(&length.to_be_bytes());
    }
    buffer.extend_from_slice(value.as_bytes());
}

/// Splits a rule's key into its scope and the rest. Returns the scope as a number, which is never
/// 0.
#[inline]
pub(crate) fn scope_of_key(key: &[u8]) -> Option<(u64, &[u8])> {
    let (scope, rest) = split(key)?;
    Some((u64::from_be_bytes(scope), rest))
}

/// Splits a rule's key into its scope and the rest.
pub(super) fn split(key: &[u8]) -> Option<(Scope, &[u8])> {
    let (scope, values) = key.split_first_chunk::<8>()?;
    (scope[0] >= FIRST).then_some((*scope, values))
}

/// Returns the key for `values` under the rule `name`, even if the rule does not exist. An operator
/// can therefore remove a block on a key after its rule was renamed. Unlike
/// [`super::Rule::encode_key`], this function does not check the number or the lengths of the
/// values.
#[must_use]
pub fn former_key(name: &str, values: &[&str]) -> Vec<u8> {
    let mut key = Vec::new();
    begin(&mut key, scope(name));
    for (at, value) in values.iter().enumerate() {
        push(&mut key, value, at + 1 == values.len());
    }
    key
}

/// Returns true if `key` belongs to a rule, even if the rule no longer exists.
pub(crate) fn is_of_rule(key: &[u8]) -> bool {
    split(key).is_some()
}

/// Decodes the values of a rule's key that has `count` values. Returns `None` if the bytes do not
/// encode `count` values, or are not a rule's key.
pub(crate) fn former_values(key: &[u8], count: usize) -> Option<Vec<&str>> {
    let (_, rest) = split(key)?;
    values(rest, count)
}

/// Decodes `count` values from `rest`, the bytes after the scope. Returns `None` if the bytes do
/// not encode `count` values.
pub(super) fn values(mut rest: &[u8], count: usize) -> Option<Vec<&str>> {
    let mut values = Vec::with_capacity(count);
    for remaining in (0..count).rev() {
        let (value, after) = match remaining {
            0 => (rest, &rest[rest.len()..]),
            _ => {
                let (length, after) = rest.split_first_chunk::<2>()?;
                after.split_at_checked(usize::from(u16::from_be_bytes(*length)))?
            }
        };
        values.push(std::str::from_utf8(value).ok()?);
        rest = after;
    }
    rest.is_empty().then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_scope_of_a_rule_name_is_stable() {
        // If the scope changed, all keys in existing snapshots would become invalid.
        assert_eq!(
            u64::from_be_bytes(scope("api-per-customer")),
            0xFE65_5710_0381_B7CC
        );
    }

    #[test]
    fn a_free_key_never_equals_a_rule_key() {
        let mut buffer = Vec::new();
        assert_eq!(free_key(b"user:1", &mut buffer), b"user:1");
        assert_eq!(free_key(b"", &mut buffer), b"");
        let forged = scope("login");
        assert!(split(free_key(&forged, &mut buffer)).is_none());
        assert_eq!(free_key(&[ESCAPE, 1], &mut buffer), [ESCAPE, ESCAPE, 1]);
        for reserved in [DESCRIPTOR_KEY, BLOCK_KEY] {
            assert!(split(&reserved).is_none());
            assert!(!free_key(&reserved, &mut buffer).starts_with(&reserved));
        }
    }

    proptest! {
        #[test]
        fn free_keys_survive_a_round_trip(space in 0..=MAX_KEY_SPACE, first: u8, key: Vec<u8>) {
            let key = [vec![first], key].concat();
            let mut buffer = Vec::new();
            let encoded = free_key_in(space, &key, &mut buffer);
            prop_assert_eq!(free_key_parts(encoded), (space, key.as_slice()));
        }

        #[test]
        fn values_survive_a_round_trip(written in prop::collection::vec(".{0,12}", 0..5)) {
            let mut bytes = Vec::new();
            for (at, value) in written.iter().enumerate() {
                push(&mut bytes, value, at + 1 == written.len());
            }
            prop_assert_eq!(values(&bytes, written.len()).unwrap(), written);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, count in 0_usize..5) {
            let _ = values(&bytes, count);
            let mut buffer = Vec::new();
            prop_assert!(split(free_key(&bytes, &mut buffer)).is_none());
        }
    }
}
