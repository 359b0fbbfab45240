//! Keys: a limiter has a separate count for each key.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// The store's key for an empty key, because a store needs at least one byte. These bytes are not
/// valid UTF-8, so no string equals them.
pub(crate) const EMPTY: &[u8] = b"\x80tidegate:empty";

/// A key: each key has its own count.
///
/// Keys with equal bytes are equal, so use only one type of key with a limiter. For example, the
/// number 65 as a `u8` and the string `"A"` share a count. For a limiter with a single count, use
/// the key `()`. A key has at most [`MAX_KEY_BYTES`](crate::bounds::MAX_KEY_BYTES) bytes; hash
/// longer keys first. The empty key is valid, and is equal to `()`.
///
/// # Examples
///
/// ```
/// use tidegate::{Key, Limit, Limiter};
///
/// let limiter = Limiter::in_memory("10/s burst 9".parse::<Limit>()?);
/// assert!(limiter.check("alice").allowed);
/// assert!(limiter.check(&String::from("bob")).allowed);
/// assert!(limiter.check([203, 0, 113, 9]).allowed);
///
/// // A key can carry a cost, which is otherwise 1.
/// assert_eq!(limiter.check("alice".costing(5)).remaining(), Some(4));
/// assert!(!limiter.check("alice".costing(5)).allowed);
/// # Ok::<(), tidegate::LimitError>(())
/// ```
pub trait Key {
    /// Calls `read` with the bytes of the key.
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R;

    /// Returns the cost of a request on this key, in units of the limit.
    fn cost(&self) -> u64 {
        1
    }

    /// Returns the same key with a cost of `units`. A request of 0 units is always allowed, changes
    /// nothing, and reports the current state.
    fn costing(self, units: u64) -> KeyWithCost<Self>
    where
        Self: Sized,
    {
        KeyWithCost { key: self, units }
    }
}

/// A key with a cost. See [`Key::costing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyWithCost<K> {
    key: K,
    units: u64,
}

impl<K: Key> Key for KeyWithCost<K> {
    #[inline]
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        self.key.with_bytes(read)
    }

    #[inline]
    fn cost(&self) -> u64 {
        self.units
    }
}

impl<K: Key + ?Sized> Key for &K {
    #[inline]
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        (**self).with_bytes(read)
    }

    #[inline]
    fn cost(&self) -> u64 {
        (**self).cost()
    }
}

impl Key for () {
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        read(EMPTY)
    }
}

impl Key for [u8] {
    #[inline]
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        read(if self.is_empty() { EMPTY } else { self })
    }
}

impl Key for str {
    #[inline]
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        self.as_bytes().with_bytes(read)
    }
}

impl<const N: usize> Key for [u8; N] {
    #[inline]
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        self.as_slice().with_bytes(read)
    }
}

impl<K: Key + ToOwned + ?Sized> Key for Cow<'_, K> {
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        (**self).with_bytes(read)
    }

    fn cost(&self) -> u64 {
        (**self).cost()
    }
}

impl Key for IpAddr {
    fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::V4(address) => address.with_bytes(read),
            Self::V6(address) => address.with_bytes(read),
        }
    }
}

macro_rules! keys {
    ($($bytes:ident: $($key:ty),+;)+) => {$($(
        impl Key for $key {
            #[inline]
            fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
                self.$bytes().with_bytes(read)
            }
        }
    )+)+};
}

keys! {
    as_bytes: String, Box<str>, std::sync::Arc<str>;
    as_slice: Vec<u8>;
    octets: Ipv4Addr, Ipv6Addr;
    to_be_bytes: u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(key: impl Key) -> Vec<u8> {
        key.with_bytes(<[u8]>::to_vec)
    }

    #[test]
    fn keys_of_one_type_with_different_values_have_different_bytes() {
        assert_eq!(bytes("a"), b"a");
        assert_eq!(bytes(String::from("a")), b"a");
        let reference: &&str = &"a";
        assert_eq!(bytes(reference), b"a");
        assert_eq!(bytes(Cow::from("a")), b"a");
        assert_eq!(bytes(vec![1, 2]), [1, 2]);
        assert_eq!(bytes(258_u16), [1, 2]);
        assert_eq!(bytes(IpAddr::from([203, 0, 113, 9])), [203, 0, 113, 9]);
        assert_eq!(bytes("a".costing(3)), b"a");
        for empty in [bytes(""), bytes(Vec::new()), bytes([]), bytes(())] {
            assert_eq!(empty, EMPTY);
        }
    }

    #[test]
    fn only_a_key_with_a_cost_costs_other_than_one_unit() {
        assert_eq!(
            (
                "a".cost(),
                "a".costing(3).cost(),
                Key::cost(&"a".costing(0))
            ),
            (1, 3, 0)
        );
    }
}
