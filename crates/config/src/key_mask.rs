//! Controls how key values appear outside of the process: unchanged, or hashed (`privacy.keys`).

use std::{borrow::Cow, fmt};

use ring::{
    hmac::{self, HMAC_SHA256},
    rand::SystemRandom,
};

/// The number of hash bytes that are shown. With 64 bits, the probability that any two of a million
/// values have the same hash is about 3 in 100,000,000.
const SHOWN_BYTES: usize = 8;

/// The prefix of every displayed hash.
const PREFIX: &str = "hash:";

/// A mask that returns key values either unchanged or hashed.
#[derive(Clone, Default)]
pub struct KeyMask(Option<hmac::Key>);

/// The error if the operating system provides no random bytes for the hash secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot create a secret for hashing keys, because the operating system provides no random bytes; set \
     `privacy.secret_env`"
)]
pub struct NoRandomBytes;

impl KeyMask {
    /// Creates a mask that returns values unchanged.
    #[must_use]
    pub fn plain() -> Self {
        Self(None)
    }

    /// Creates a mask that replaces values with their HMAC-SHA256 under `secret`. With the same
    /// secret, every process computes the same hashes.
    #[must_use]
    pub fn hashed(secret: &[u8]) -> Self {
        Self(Some(hmac::Key::new(HMAC_SHA256, secret)))
    }

    /// Creates a mask that hashes values under a random secret, so that the hashes are different in
    /// each process.
    ///
    /// # Errors
    ///
    /// Fails if the operating system provides no random bytes.
    pub fn random() -> Result<Self, NoRandomBytes> {
        let key = hmac::Key::generate(HMAC_SHA256, &SystemRandom::new());
        key.map(|key| Self(Some(key))).map_err(|_| NoRandomBytes)
    }

    /// Returns whether values are hashed.
    #[must_use]
    pub fn is_hashed(&self) -> bool {
        self.0.is_some()
    }

    /// Returns whether `text` has the form of the hashes that [`Self::value`] returns.
    #[must_use]
    pub fn is_hash(text: &str) -> bool {
        let digits = text.strip_prefix(PREFIX);
        digits.is_some_and(|digits| {
            digits.len() == 2 * SHOWN_BYTES && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        })
    }

    /// Returns `value` in the form in which it may be shown: unchanged, or as `hash:` followed by
    /// 16 hexadecimal digits. A value has the same hash in every rule, and at every position in a
    /// key.
    #[must_use]
    pub fn value<'v>(&self, value: &'v str) -> Cow<'v, str> {
        match &self.0 {
            Some(key) => Cow::Owned(hash(key, value.as_bytes())),
            None => Cow::Borrowed(value),
        }
    }

    /// Works like [`Self::value`], but for a value that may not be UTF-8. The bytes are hashed
    /// without a lossy conversion to a string, which could make different values equal.
    #[must_use]
    pub fn bytes<'v>(&self, value: &'v [u8]) -> Cow<'v, [u8]> {
        match &self.0 {
            Some(key) => Cow::Owned(hash(key, value).into_bytes()),
            None => Cow::Borrowed(value),
        }
    }
}

fn hash(key: &hmac::Key, value: &[u8]) -> String {
    let tag = hmac::sign(key, value);
    let mut shown = String::from(PREFIX);
    for byte in tag.as_ref().iter().take(SHOWN_BYTES) {
        shown.push_str(&format!("{byte:02x}"));
    }
    shown
}

/// Omits the secret, so that no log contains the secret.
impl fmt::Debug for KeyMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_hashed() { "Hashed" } else { "Plain" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_values_stay_as_they_are() {
        assert_eq!(KeyMask::plain().value("acme"), "acme");
        assert!(!KeyMask::default().is_hashed());
    }

    #[test]
    fn a_hash_is_the_beginning_of_an_hmac_sha256() {
        // The expected hash is the output of this command (RFC 4231, test case 2):
        // printf what\ do\ ya\ want\ for\ nothing\? | openssl dgst -sha256 -hmac Jefe
        let mask = KeyMask::hashed(b"Jefe");
        assert_eq!(
            mask.value("what do ya want for nothing?"),
            "hash:5bdcc146bf60754e"
        );
    }

    #[test]
    fn bytes_are_hashed_without_a_conversion() {
        let mask = KeyMask::hashed(b"secret");
        assert_eq!(&*mask.bytes(b"acme"), mask.value("acme").as_bytes());
        assert_ne!(mask.bytes(b"\xFE1"), mask.bytes(b"\xFF1"));
        assert_eq!(&*KeyMask::plain().bytes(b"\xFE1"), b"\xFE1");
    }

    #[test]
    fn random_secrets_differ_and_stay() {
        let (one, other) = (KeyMask::random().unwrap(), KeyMask::random().unwrap());
        assert_eq!(one.value("acme"), one.clone().value("acme"));
        assert_ne!(one.value("acme"), other.value("acme"));
        assert_ne!(one.value("acme"), one.value("acme2"));
        assert_eq!(format!("{one:?}"), "Hashed");
    }
}
