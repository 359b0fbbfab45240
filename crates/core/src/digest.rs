//! A hash of numbers and strings. The encoding of the hashed values is explicit, so the hash is the
//! same in every process and with every compiler.

/// The version of the encoding. Increment the version when the encoding of any hashed type changes.
const VERSION: u64 = 1;

/// An FNV-1a hash over 8-byte numbers and length-prefixed strings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325).number(VERSION)
    }

    pub(crate) fn number(self, number: u64) -> Self {
        number.to_be_bytes().into_iter().fold(self, Self::byte)
    }

    pub(crate) fn numbers(self, numbers: &[u64]) -> Self {
        numbers.iter().copied().fold(self, Self::number)
    }

    pub(crate) fn text(self, text: &str) -> Self {
        text.bytes()
            .fold(self.number(text.len() as u64), Self::byte)
    }

    /// Returns the hash, folded to 28 bits.
    pub(crate) fn bits_28(self) -> u32 {
        self.folded() >> 4
    }

    /// Returns the hash, folded to 32 bits.
    pub(crate) fn folded(self) -> u32 {
        u32::try_from((self.0 ^ (self.0 << 32)) >> 32).unwrap_or(u32::MAX)
    }

    fn byte(self, byte: u8) -> Self {
        Self((self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Digests are stored in Redis. If a digest in this test changes, increment [`VERSION`].
    #[test]
    fn the_encoding_is_the_same_as_in_stored_values() {
        let digest = Digest::new()
            .numbers(&[0, 1, u64::MAX])
            .text("Europe/Berlin");
        assert_eq!(
            (digest.folded(), digest.bits_28()),
            (0x62EB_8468, 0x062E_B846)
        );
        assert_eq!(Digest::new().text("").text("a").folded(), 0x76A4_7518);
    }
}
