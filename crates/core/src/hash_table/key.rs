//! Keys of hash table entries. Short keys are stored inline.

/// A key; up to 22 bytes are stored inline.
#[derive(Debug)]
pub(crate) struct TableKey(Repr);

#[derive(Debug)]
enum Repr {
    Inline {
        len: u8,
        bytes: [u8; TableKey::INLINE],
    },
    Heap(Box<[u8]>),
}

impl TableKey {
    const INLINE: usize = 22;

    pub(crate) fn new(key: &[u8]) -> Self {
        match u8::try_from(key.len()) {
            Ok(len) if key.len() <= Self::INLINE => {
                let mut bytes = [0; Self::INLINE];
                bytes[..key.len()].copy_from_slice(key);
                Self(Repr::Inline { len, bytes })
            }
            _ => Self(Repr::Heap(key.into())),
        }
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// Returns whether this is `key`.
    #[inline]
    pub(crate) fn is(&self, key: &[u8]) -> bool {
        match &self.0 {
            Repr::Inline { len, bytes } => {
                usize::from(*len) == key.len() && begins_with(bytes, key)
            }
            Repr::Heap(bytes) => is_equal(bytes, key),
        }
    }

    /// Returns the heap size in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        if let Repr::Heap(bytes) = &self.0 {
            bytes.len()
        } else {
            0
        }
    }

    /// Returns the heap size of `key` as a [`TableKey`], in bytes.
    pub(crate) fn heap_bytes_of(key: &[u8]) -> usize {
        if key.len() <= Self::INLINE {
            0
        } else {
            key.len()
        }
    }
}

/// Returns whether the bytes of an inline key start with `key`, which must not be longer than an
/// inline key.
#[inline]
fn begins_with(bytes: &[u8; TableKey::INLINE], key: &[u8]) -> bool {
    // Comparing two overlapping 8-byte words is faster than a call to `memcmp`.
    match (key.first_chunk::<8>(), key.last_chunk::<8>()) {
        (Some(first), Some(last)) if key.len() <= 16 => {
            let at = key.len() - last.len();
            bytes[..8] == *first && bytes[at..at + 8] == *last
        }
        _ => is_equal(&bytes[..key.len()], key),
    }
}

// This function is not inlined, so that the code that compares short keys stays small.
#[inline(never)]
fn is_equal(own: &[u8], key: &[u8]) -> bool {
    own == key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_equals_only_itself() {
        for length in 0..=24 {
            let bytes: Vec<u8> = (1..=length).collect();
            let key = TableKey::new(&bytes);
            assert_eq!(key.bytes(), bytes);
            assert_eq!(key.heap_bytes(), TableKey::heap_bytes_of(&bytes));
            assert!(key.is(&bytes), "{length} bytes");
            assert!(!key.is(&[&bytes[..], &[0]].concat()));
            if let [shorter @ .., _] = &bytes[..] {
                assert!(!key.is(shorter) && !key.is(&bytes[1..]));
            }
            for at in 0..bytes.len() {
                let mut other = bytes.clone();
                other[at] ^= 0x80;
                assert!(!key.is(&other), "byte {at} of {length}");
            }
        }
    }
}
