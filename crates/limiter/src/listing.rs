//! Lists the keys of a rule page by page.

use tidegate_core::{KeyCursor, Rule};
use tidegate_redis::{ScanPosition, StoreError};

use crate::ServerLimiter;

/// A page of the keys of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyListing {
    /// The keys, in the form in which they were charged. With Redis, a key may occur on two pages.
    pub keys: Vec<Vec<u8>>,
    /// The position of the next page; `None` after the last page. Any page, not only the last one,
    /// can have few keys or none.
    pub next: Option<String>,
}

/// The reason why keys cannot be listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListError {
    /// The given position was not returned by this process.
    Position,
    /// Redis cannot be queried.
    Store(StoreError),
}

impl From<StoreError> for ListError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl ServerLimiter {
    /// Returns about `most` of the keys that the store holds for `rule`. The listing continues at
    /// the position `after`, or starts at the beginning. The work of one call is bounded: 16,384
    /// slots of the memory store, or 100 `SCAN` commands to Redis.
    ///
    /// # Errors
    ///
    /// [`ListError::Position`] if `after` is not a position that this process has returned.
    pub async fn list_keys(
        &self,
        rule: &Rule,
        after: Option<&str>,
        most: usize,
    ) -> Result<KeyListing, ListError> {
        let scope = rule.key_prefix();
        let Some(redis_store) = self.redis_store() else {
            // Each process hashes keys differently, so a position contains the ID of its process.
            let process = self.observers.metrics.started().as_micros();
            let from = after.map(|after| parse_cursor(after, process));
            let from = from.transpose()?.unwrap_or_default();
            let store = self.local_store();
            let page = store.keys(&scope, from, most, self.now());
            return Ok(KeyListing {
                keys: page.keys.into_iter().map(Vec::from).collect(),
                next: page.next.map(|next| write_cursor(next, process)),
            });
        };
        let from = after.map(parse_position).transpose()?.unwrap_or_default();
        let store = redis_store.store();
        let page = store.scan_keys(scope, &from, most).await?;
        Ok(KeyListing {
            keys: page.keys,
            next: page.next.map(|next| write_position(&next)),
        })
    }
}

/// Formats a position in the memory store as `PROCESS.SHARD.HASH`, in hexadecimal digits.
fn write_cursor(KeyCursor { shard, hash }: KeyCursor, process: u64) -> String {
    format!("{process:x}.{shard:x}.{hash:x}")
}

fn parse_cursor(text: &str, process: u64) -> Result<KeyCursor, ListError> {
    let mut parts = text.split('.');
    let mut part = || u64::from_str_radix(parts.next()?, 16).ok();
    let (of, shard, hash) = (part(), part(), part());
    let cursor = || {
        let shard = u16::try_from(shard?).ok()?;
        let hash = u32::try_from(hash?).ok()?;
        (of == Some(process)).then_some(KeyCursor { shard, hash })
    };
    cursor()
        .filter(|_| parts.next().is_none())
        .ok_or(ListError::Position)
}

/// Formats a position in Redis as `CURSOR`, or as `CURSOR@SERVER` in a cluster.
fn write_position(ScanPosition { server, cursor }: &ScanPosition) -> String {
    match server.as_str() {
        "" => cursor.to_string(),
        server => format!("{cursor}@{server}"),
    }
}

fn parse_position(text: &str) -> Result<ScanPosition, ListError> {
    let (cursor, server) = text.split_once('@').unwrap_or((text, ""));
    let cursor = cursor.parse().map_err(|_| ListError::Position)?;
    let server = server.to_owned();
    Ok(ScanPosition { server, cursor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_survive_a_round_trip() {
        let cursor = KeyCursor {
            shard: 255,
            hash: u32::MAX,
        };
        let text = write_cursor(cursor, 1_700_000_000_000_000);
        assert_eq!(parse_cursor(&text, 1_700_000_000_000_000), Ok(cursor));
        for wrong in ["", "1", "1.2", "6.0.0.0", "6.0.x", "6.10000.0", &text] {
            assert_eq!(parse_cursor(wrong, 6), Err(ListError::Position), "{wrong}");
        }
        for (server, text) in [("", "7"), ("[::1]:7000", "7@[::1]:7000")] {
            let position = ScanPosition {
                server: server.to_owned(),
                cursor: 7,
            };
            assert_eq!(write_position(&position), text);
            assert_eq!(parse_position(text), Ok(position));
        }
        assert_eq!(parse_position("x@y"), Err(ListError::Position));
    }
}
