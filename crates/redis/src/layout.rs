//! Keys in Redis.
//!
//! ```text
//!   a rule's key      prefix { values } scope       {values} is the hash tag: rules that count by the same
//!                                                    values share a slot, and so one atomic call
//!   a key of its own  prefix : key
//!   the list of blocks  prefix #blocks
//!   the servers that share the store  prefix #servers
//! ```
//!
//! No two keys become one: what follows the prefix says which of the two it is, and a scope has a length.

/// The bytes with which a rule's key begins, which say whose it is.
const SCOPE_BYTES: usize = 8;

/// A rule's key begins with a byte that no UTF-8 text has.
const FIRST_OF_SCOPE: u8 = 0xF8;

/// The key under which the state of `key` is kept.
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

/// The key of the list of blocks.
pub(crate) fn index_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#blocks"].concat()
}

/// The key of the servers that share the store.
pub(crate) fn servers_key(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"#servers"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_a_rule_s_key_come_first() {
        let scope = [0xF9, 1, b'{', b'}', 0, 1, 2, 3];
        let whole = state_key(b"tg", &[scope.as_slice(), b"42"].concat());
        assert_eq!(whole, [b"tg{42}".as_slice(), &scope].concat());
        assert_eq!(
            state_key(b"tg", &scope),
            [b"tg{}".as_slice(), &scope].concat()
        );
        assert_eq!(state_key(b"tg", b"user:1"), b"tg:user:1");
    }
}
