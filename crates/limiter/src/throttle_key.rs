//! Keys of limits that are sent with the request. The key of such a limit never equals the key of a
//! rule.

use tidegate_core::{MAX_KEY_SPACE, RequestError, bounds, free_key_in};

/// A database number in the Redis protocol. Each database has its own keys for limits that are sent
/// with the request. The rules are the same for all databases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Database(u8);

impl Database {
    /// Returns the database with this number. Returns `None` if the number is not from 0 to 15, as
    /// in Redis.
    #[must_use]
    pub fn new(number: i64) -> Option<Self> {
        let number = u8::try_from(number).ok()?;
        (number <= MAX_KEY_SPACE).then_some(Self(number))
    }

    /// Returns the number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

/// The maximum length in bytes of a key for a limit sent with the request. The encoding may add one
/// byte, or two bytes in databases other than 0.
pub const MAX_THROTTLE_KEY_BYTES: usize = bounds::MAX_KEY_BYTES - 1;

/// Works like [`throttle_key_in`] for database 0, which `/v1/throttle` uses, too.
///
/// # Errors
///
/// Rejects an empty key and a key longer than [`MAX_THROTTLE_KEY_BYTES`].
pub fn throttle_key<'b>(key: &'b [u8], buffer: &'b mut Vec<u8>) -> Result<&'b [u8], RequestError> {
    throttle_key_in(Database::default(), key, buffer)
}

/// Encodes `key` as the store key of a limit sent with the request, in the given Redis protocol
/// database. The result never equals the key of a rule. `buffer` can be reused between calls.
///
/// # Errors
///
/// Rejects an empty key and a key longer than [`MAX_THROTTLE_KEY_BYTES`]. In databases other
/// than 0, the maximum is one byte less.
pub fn throttle_key_in<'b>(
    database: Database,
    key: &'b [u8],
    buffer: &'b mut Vec<u8>,
) -> Result<&'b [u8], RequestError> {
    if key.is_empty() {
        return Err(RequestError::new("key", "must not be empty"));
    }
    let most = MAX_THROTTLE_KEY_BYTES - usize::from(database.0 > 0);
    if key.len() > most {
        let problem = format!("{} bytes exceeds the maximum of {most}", key.len());
        return Err(RequestError::new("key", problem));
    }
    Ok(free_key_in(database.0, key, buffer))
}
