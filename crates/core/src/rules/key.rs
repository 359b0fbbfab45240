//! Keys as bytes: whose count a charge goes to.
//!
//! ```text
//! | scope: 8 bytes, from the rule's name | length, 2 bytes | value | … | last value |
//! ```
//!
//! Every value but the last carries its length, so that `a:b` and `c` are not `a` and `b:c`. The scope is
//! the same in every process and version, because snapshots and other nodes hold keys too.

/// The bytes by which a rule's keys differ from another's.
pub(super) type Scope = [u8; 8];

/// The first byte of every scope is at least this. No UTF-8 text begins with such a byte.
const FIRST: u8 = 0xF8;

/// What [`free_key`] puts before a key that could be taken for a rule's.
const ESCAPE: u8 = 0xF7;

/// What the keys of a proxy's descriptors begin with: no rule's key does, and no free key, whose escape is never followed
/// by such a byte.
pub const DESCRIPTOR_KEY: [u8; 2] = [ESCAPE, b'd'];

/// The last key space of [`free_key_in`].
pub const MAX_KEY_SPACE: u8 = 15;

const _: () = assert!(MAX_KEY_SPACE < DESCRIPTOR_KEY[1] && MAX_KEY_SPACE < ESCAPE);

/// The key of a count that belongs to no rule, for limits that come with the request: `key` itself, or,
/// where that could be taken for a rule's key, a copy in `room` that cannot. Never is a caller's key
/// that of a rule, and no two keys become one.
#[must_use]
pub fn free_key<'a>(key: &'a [u8], room: &'a mut Vec<u8>) -> &'a [u8] {
    if key.first().is_none_or(|first| *first < ESCAPE) {
        return key;
    }
    room.clear();
    room.push(ESCAPE);
    room.extend_from_slice(key);
    room
}

/// [`free_key`] in a key space of its own, so that `key` has a count in each: space 0 is that of [`free_key`]. A key of another space
/// is two bytes longer. `space` is at most [`MAX_KEY_SPACE`].
#[must_use]
pub fn free_key_in<'a>(space: u8, key: &'a [u8], room: &'a mut Vec<u8>) -> &'a [u8] {
    debug_assert!(space <= MAX_KEY_SPACE, "no key space {space}");
    if space == 0 {
        return free_key(key, room);
    }
    // A free key that is escaped goes on with a byte that is no space, and so does a descriptor's.
    room.clear();
    room.extend_from_slice(&[ESCAPE, space]);
    room.extend_from_slice(key);
    room
}

/// The scope of the rule `name`: FNV-1a of 64 bits, well mixed, its first byte out of reach of free keys.
pub(super) fn scope(name: &str) -> Scope {
    let fnv = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mixed = (fnv ^ (fnv >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut scope = (mixed ^ (mixed >> 29)).to_be_bytes();
    scope[0] |= FIRST;
    scope
}

/// Begins a key at the end of `buffer`.
pub(super) fn begin(buffer: &mut Vec<u8>, scope: Scope) {
    buffer.extend_from_slice(&scope);
}

/// Adds a value, at most [`crate::bounds::MAX_ENTRY_VALUE_BYTES`] long, to the key at the end of `buffer`.
pub(super) fn push(buffer: &mut Vec<u8>, value: &str, is_last: bool) {
    if !is_last {
        let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
        buffer.extend_from_slice(&length.to_be_bytes());
    }
    buffer.extend_from_slice(value.as_bytes());
}

/// The scope of a rule's key, and what follows it.
pub(super) fn split(key: &[u8]) -> Option<(Scope, &[u8])> {
    let (scope, values) = key.split_first_chunk::<8>()?;
    (scope[0] >= FIRST).then_some((*scope, values))
}

/// The `count` values after the scope; `None` if these are not the values of so many entries.
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
    fn the_scope_of_a_name_never_changes() {
        // Written down once: a change here loses every count of every snapshot.
        assert_eq!(
            u64::from_be_bytes(scope("api-per-customer")),
            0xFE65_5710_0381_B7CC
        );
    }

    #[test]
    fn a_free_key_is_never_the_key_of_a_rule() {
        let mut room = Vec::new();
        assert_eq!(free_key(b"user:1", &mut room), b"user:1");
        assert_eq!(free_key(b"", &mut room), b"");
        let forged = scope("login");
        assert!(split(free_key(&forged, &mut room)).is_none());
        assert_eq!(free_key(&[ESCAPE, 1], &mut room), [ESCAPE, ESCAPE, 1]);
        assert!(split(&DESCRIPTOR_KEY).is_none());
        assert!(!free_key(&DESCRIPTOR_KEY, &mut room).starts_with(&DESCRIPTOR_KEY));
    }

    proptest! {
        #[test]
        fn values_survive_a_round_trip(written in prop::collection::vec(".{0,12}", 0..5)) {
            let mut bytes = Vec::new();
            for (at, value) in written.iter().enumerate() {
                push(&mut bytes, value, at + 1 == written.len());
            }
            prop_assert_eq!(values(&bytes, written.len()).unwrap(), written);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>, count in 0_usize..5) {
            let _ = values(&bytes, count);
            let mut room = Vec::new();
            prop_assert!(split(free_key(&bytes, &mut room)).is_none());
        }
    }
}
