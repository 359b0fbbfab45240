//! Maps keys to the 16,384 slots of a cluster.

/// Number of slots in a cluster.
pub(crate) const HASH_SLOTS: u16 = 16_384;

/// Returns the slot of `key`. Hashes only the part between the first `{` and the next `}`, unless
/// that part is empty.
pub(crate) fn hash_slot(key: &[u8]) -> u16 {
    let tagged = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    crc16(tagged.unwrap_or(key)) % HASH_SLOTS
}

/// CRC-16/XMODEM: polynomial 0x1021, initial value zero, not reflected.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let at = (crc >> 8) ^ u16::from(*byte);
        (crc << 8) ^ TABLE[usize::from(at)]
    })
}

static TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let (mut byte, mut number) = (0, 0_u16);
    while byte < 256 {
        let mut crc = number << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 {
                (crc << 1) ^ 0x1021
            } else {
                crc << 1
            };
            bit += 1;
        }
        table[byte] = crc;
        (byte, number) = (byte + 1, number.wrapping_add(1));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // The standard test vector of CRC-16/XMODEM, and some slots that `CLUSTER KEYSLOT`
        // returned.
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(hash_slot(b"foo"), 12_182);
        assert_eq!(hash_slot(b"{user1000}.following"), hash_slot(b"user1000"));
        assert_eq!(hash_slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % HASH_SLOTS);
        assert_eq!(hash_slot(b"foo{{bar}}zap"), hash_slot(b"{bar"));
        assert_eq!(hash_slot(b"foo{bar}{zap}"), hash_slot(b"bar"));
        assert_eq!(hash_slot(b"{open"), crc16(b"{open") % HASH_SLOTS);
        assert_eq!(hash_slot(b""), 0);
    }
}
