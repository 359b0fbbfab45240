//! Layout of the keys in Redis.
//!
//! ```text
//!   key of a rule     prefix { values } scope    {values} is the hash tag: rules keyed by
//!                                                the same values share a hash slot, and so
//!                                                one atomic call
//!   any other key     prefix : key
//!   index of blocks   prefix #blocks
//!   live servers      prefix #servers
//!   top talkers       prefix #top        the servers that publish slices
//!                     prefix #top: id    the slices of one server
//!   recent denials    prefix #denials
//!   overrides         prefix #{overrides}           the documents by id
//!                     prefix #{overrides}:changed   the ids by their last change
//!                     prefix #{overrides}:removed   the ids that were removed
//!                     prefix #{overrides}:ends      the ids by the end of their override
//!                     prefix #{overrides}:versions  the versions of the latest changes
//!   guard             prefix #ends { tag of the slot } : id    a reservation has ended
//!   reservations      prefix #{reservations}        the outstanding reservations by id
//!                     prefix #{reservations}:due    the ids by the time when any server ends them
//! ```
//!
//! Two keys never collide: the byte after the prefix distinguishes rule keys from other keys, and a
//! scope has a fixed length.

use std::sync::LazyLock;

use crate::client::{HASH_SLOTS, hash_slot};

/// Length in bytes of the scope at the start of a rule's key. The scope identifies the rule.
const SCOPE_BYTES: usize = 8;

/// The lowest value of a scope's first byte. UTF-8 text contains neither this byte nor a higher
/// byte, so no other key begins like a scope.
const FIRST_OF_SCOPE: u8 = 0xF8;

/// Returns the Redis key that stores the state of `key`.
pub(crate) fn state_key(prefix: &[u8], key: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(prefix.len() + key.len() + 2);
    whole.extend_from_slice(prefix);
    match key.split_at_checked(SCOPE_BYTES) {
        Some((scope, values)) if scope[0] >= FIRST_OF_SCOPE => {
            whole.push(b'{');
            whole.extend_from_slice(values);
            whole.push(b'}');
            whole.extend_from_slice(scope);
        }
        _ => {
            whole.push(b':');
            whole.extend_from_slice(key);
        }
    }
    whole
}

/// Returns the Redis key of the guard for the reservation `id` in this hash slot; `slot` is
/// `None` if Redis is not a cluster.
pub(crate) fn guard_key(prefix: &[u8], slot: Option<u16>, id: &[u8; 16]) -> Vec<u8> {
    let mut key = Vec::with_capacity(prefix.len() + GUARD_BYTES);
    key.extend_from_slice(prefix);
    key.extend_from_slice(b"#ends{");
    if let Some(slot) = slot {
        key.extend_from_slice(SLOT_TAGS[usize::from(slot)].to_string().as_bytes());
    }
    key.extend_from_slice(b"}:");
    // Formatting each byte with `{:02x}` would take a sixth of the time of a settlement.
    let digits = id.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    key.extend(digits.map(|digit| b"0123456789abcdef"[usize::from(digit)]));
    key
}

/// The length of the Redis key of a guard without its prefix, in bytes, with a tag of six digits.
const GUARD_BYTES: usize = 46;

/// For each hash slot, a number that, as a hash tag, hashes to the slot.
static SLOT_TAGS: LazyLock<Box<[u32]>> = LazyLock::new(|| {
    let mut tags = vec![None; usize::from(HASH_SLOTS)];
    let mut missing = tags.len();
    for number in 0.. {
        let slot = usize::from(hash_slot(number.to_string().as_bytes()));
        if tags[slot].is_none() {
            tags[slot] = Some(number);
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    tags.into_iter().flatten().collect()
});

/// Returns the `SCAN` pattern for the Redis keys of the rule with this scope.
pub(crate) fn rule_pattern(prefix: &[u8], scope: [u8; SCOPE_BYTES]) -> Vec<u8> {
    let mut pattern = Vec::new();
    let literal = |text: &[u8], pattern: &mut Vec<u8>| {
        for byte in text {
            if b"*?[]\\^-".contains(byte) {
                pattern.push(b'\\');
            }
            pattern.push(*byte);
        }
    };
    literal(prefix, &mut pattern);
    pattern.extend_from_slice(b"{*}");
    literal(&scope, &mut pattern);
    pattern
}

/// Returns the rule's key that is stored under the Redis key `whole`; `None` if `whole` does not
/// belong to the rule with this scope.
pub(crate) fn rule_key(prefix: &[u8], scope: [u8; SCOPE_BYTES], whole: &[u8]) -> Option<Vec<u8>> {
    let values = whole.strip_prefix(prefix)?.strip_prefix(b"{")?;
    let values = values.strip_suffix(&scope)?.strip_suffix(b"}")?;
    Some([&scope, values].concat())
}

/// Returns the Redis key of the block index.
pub(crate) fn index_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#blocks"].concat()
}

/// Returns the Redis key of the set that contains the servers sharing the store.
pub(crate) fn servers_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#servers"].concat()
}

/// Returns the Redis key of the set of the servers that have published time slices of their
/// top-talker lists.
pub(crate) fn publishers_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#top"].concat()
}

/// Returns the Redis key of the time slices of one server's top-talker lists.
pub(crate) fn slices_key(prefix: &[u8], server: &str) -> Vec<u8> {
    [prefix, b"#top:", server.as_bytes()].concat()
}

/// Returns the Redis keys of the overrides, which share a hash slot: the documents, the order of
/// changes, the order of removals, the end times, and the latest versions.
pub(crate) fn overrides_keys(prefix: &[u8]) -> [Vec<u8>; 5] {
    ["", ":changed", ":removed", ":ends", ":versions"]
        .map(|part| [prefix, b"#{overrides}", part.as_bytes()].concat())
}

/// Returns the Redis keys of the expiry queue of reservations, which share a hash slot: the
/// reservations, and their order.
pub(crate) fn expiry_queue_keys(prefix: &[u8]) -> [Vec<u8>; 2] {
    ["", ":due"].map(|part| [prefix, b"#{reservations}", part.as_bytes()].concat())
}

/// Returns the Redis key under which all servers publish their recent denials.
pub(crate) fn denials_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#denials"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_a_rule_key_come_first() {
        let scope = [0xF9, 1, b'{', b'}', 0, 1, 2, 3];
        let whole = state_key(b"tg", &[scope.as_slice(), b"42"].concat());
        assert_eq!(whole, [b"tg{42}".as_slice(), &scope].concat());
        assert_eq!(
            state_key(b"tg", &scope),
            [b"tg{}".as_slice(), &scope].concat()
        );
        assert_eq!(state_key(b"tg", b"user:1"), b"tg:user:1");
    }

    #[test]
    fn the_key_of_a_guard_ends_with_the_hexadecimal_id() {
        let id = std::array::from_fn(|at| u8::try_from(at).unwrap().wrapping_mul(0x1F));
        let key = guard_key(b"tg", None, &id);
        assert_eq!(key, b"tg#ends{}:001f3e5d7c9bbad9f81736557493b2d1");
    }

    #[test]
    fn a_guard_is_in_its_slot() {
        for slot in [0, 1, 8_191, 16_383] {
            assert_eq!(hash_slot(&guard_key(b"tg", Some(slot), &[7; 16])), slot);
        }
    }

    #[test]
    fn the_key_of_a_rule_survives_a_round_trip() {
        let scope = [0xF9, 1, b'{', b'}', 0, b'*', b'\\', b'['];
        for values in [b"".as_slice(), b"42", b"}", b"a}b{c", &scope] {
            let key = [scope.as_slice(), values].concat();
            let whole = state_key(b"tg", &key);
            assert_eq!(rule_key(b"tg", scope, &whole), Some(key));
            assert_eq!(rule_key(b"t", scope, &whole), None);
        }
        assert_eq!(rule_key(b"tg", scope, b"tg#blocks"), None);
        assert_eq!(
            rule_pattern(b"t*", scope),
            [b"t\\*{*}".as_slice(), &[0xF9, 1], b"{}\0\\*\\\\\\["].concat()
        );
    }
}
