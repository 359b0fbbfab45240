//! Manual blocks. The store records each block in two places: in the value of the blocked key,
//! where the scripts enforce the block, and in an index of all blocks.

use std::collections::HashMap;

use tidegate_core::{Block, BlockNote, BlockedRule, Span, Timestamp, bounds};

use crate::{call::Reply, decode, error::StoreError, scripts, store::RedisStore};

/// Length in bytes of the first field of an index entry, which is the end time of the block.
const END_BYTES: usize = 7;

/// The separator between the strings in an index entry. The strings are UTF-8, so they never
/// contain the byte 255.
const SEPARATOR: u8 = 0xFF;

impl RedisStore {
    /// Blocks `key` for the duration `span`, or until the block is lifted if `span` is `None`.
    /// Replaces any earlier block on the key. The new block takes effect immediately on every
    /// instance.
    ///
    /// Returns false and changes nothing if there are [`bounds::MAX_BLOCKS`] blocks already.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the key was not blocked, or if the outcome is unknown. Retrying is safe.
    pub async fn block<'a>(
        &self,
        key: &[u8],
        span: Option<Span>,
        note: impl Into<BlockNote<'a>>,
    ) -> Result<bool, StoreError> {
        let note = encode_note(note.into());
        let micros = span.map_or(0, |span| span.as_micros().max(1));
        let put = [
            b"put".to_vec(),
            key.to_vec(),
            micros.to_string().into_bytes(),
            note,
            bounds::MAX_BLOCKS.to_string().into_bytes(),
        ];
        let mut reply = self.call_index(put.to_vec()).await?;
        if matches!(reply, Reply::Int(-1)) {
            self.remove_ended_blocks().await?;
            reply = self.call_index(put.to_vec()).await?;
        }
        match reply {
            Reply::Int(-1) => Ok(false),
            reply => {
                let until = decode::integer(&reply).ok_or_else(StoreError::unexpected_reply)?;
                let until = (until > 0).then(|| Timestamp::from_micros(until));
                self.set_block(key, Some(until)).await?;
                Ok(true)
            }
        }
    }

    /// Lifts the block on `key`, and returns true if the key was blocked.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the block was not lifted, or if the outcome is unknown. Retrying is safe.
    pub async fn unblock(&self, key: &[u8]) -> Result<bool, StoreError> {
        let was_blocked = self.set_block(key, None).await?;
        self.call_index(vec![b"drop".to_vec(), key.to_vec()])
            .await?;
        Ok(was_blocked)
    }

    /// Returns the keys in `keys` that have no active block in the index.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub(crate) async fn find_lifted(&self, keys: &[Box<[u8]>]) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut verb = vec![b"lifted".to_vec()];
        verb.extend(keys.iter().map(|key| key.to_vec()));
        let reply = self.call_index(verb).await?;
        decode::keys(reply).ok_or_else(StoreError::unexpected_reply)
    }

    /// Returns the active block on `key`, if there is one.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn block_on(&self, key: &[u8]) -> Result<Option<Block>, StoreError> {
        let (now, stored) = self.read_value(key).await?;
        let Some(until) = stored.active_block(now) else {
            return Ok(None);
        };
        let entry = self.call_index(vec![b"get".to_vec(), key.to_vec()]).await?;
        let entry = decode::bytes(entry).unwrap_or_default();
        let (reason, rule) = decode_note(entry.get(END_BYTES..).unwrap_or_default());
        Ok(Some(Block {
            key: key.into(),
            until,
            reason,
            rule,
        }))
    }

    /// Returns the remaining duration of `block`; `None` if the block has no end.
    ///
    /// The duration is measured with the clock that [`Self::block`] uses to compute the end.
    /// Therefore, immediately after a call to `block` with a span, the remaining duration is at
    /// most that span.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn time_left(&self, block: &Block) -> Result<Option<Span>, StoreError> {
        match block.until {
            Some(until) => Ok(Some(until.since(self.block_clock().await?))),
            None => Ok(None),
        }
    }

    /// Returns the current time of the clock that determines when blocks end.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn block_clock(&self) -> Result<Timestamp, StoreError> {
        let reply = self.call_index(vec![b"time".to_vec()]).await?;
        let now = decode::integer(&reply).ok_or_else(StoreError::unexpected_reply)?;
        Ok(Timestamp::from_micros(now))
    }

    /// Returns all active blocks, in no particular order.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn blocks(&self) -> Result<Vec<Block>, StoreError> {
        let (now, _) = self.read_value(b"#").await?;
        let (mut index, mut cursor) = (HashMap::new(), b"0".to_vec());
        loop {
            let reply = self.call_index(vec![b"scan".to_vec(), cursor]).await?;
            let page = decode::scan_page(reply).ok_or_else(StoreError::unexpected_reply)?;
            // A scan may return an entry twice while Redis resizes the hash.
            index.extend(page.entries);
            if page.next == b"0" {
                return Ok(parse_entries(index, now));
            }
            cursor = page.next;
        }
    }

    /// Removes expired blocks from the index. Reads the index page by page, so that no single call
    /// occupies Redis for long.
    async fn remove_ended_blocks(&self) -> Result<(), StoreError> {
        let mut cursor = b"0".to_vec();
        loop {
            let reply = self.call_index(vec![b"sweep".to_vec(), cursor]).await?;
            cursor = decode::bytes(reply).ok_or_else(StoreError::unexpected_reply)?;
            if cursor == b"0" {
                return Ok(());
            }
        }
    }

    /// Calls the script that maintains the index.
    async fn call_index(&self, verb: Vec<Vec<u8>>) -> Result<Reply, StoreError> {
        let mut args = vec![self.instant(), self.slack_ms().to_string().into_bytes()];
        args.extend(verb);
        self.call(&scripts::BLOCK_INDEX, vec![self.index_key()], args)
            .await
    }
}

/// Parses `entries`, a map from keys to index entries, and omits expired blocks.
fn parse_entries(entries: HashMap<Vec<u8>, Vec<u8>>, now: Timestamp) -> Vec<Block> {
    entries
        .into_iter()
        .filter_map(|(key, entry)| parse_entry(key, &entry, now))
        .collect()
}

/// Parses an index entry; returns `None` if the block has expired.
fn parse_entry(key: Vec<u8>, entry: &[u8], now: Timestamp) -> Option<Block> {
    let (end, note) = entry.split_at_checked(END_BYTES)?;
    let end = end.iter().fold(0, |end, byte| end << 8 | u64::from(*byte));
    (end == 0 || end > now.as_micros()).then(|| {
        let (reason, rule) = decode_note(note);
        Block {
            key: key.into(),
            until: (end > 0).then(|| Timestamp::from_micros(end)),
            reason,
            rule,
        }
    })
}

/// Encodes the note of an index entry. The note contains the reason for the block. If the block
/// belongs to a rule, the note also contains the rule's name and the names of its key entries. A
/// [`SEPARATOR`] precedes each name. Earlier versions store only the reason.
fn encode_note(note: BlockNote<'_>) -> Vec<u8> {
    let mut bytes = note.reason.as_bytes().to_vec();
    if let Some(rule) = note.rule {
        for text in std::iter::once(&rule.name).chain(&rule.key) {
            bytes.push(SEPARATOR);
            bytes.extend(text.as_bytes());
        }
    }
    bytes
}

fn decode_note(note: &[u8]) -> (String, Option<BlockedRule>) {
    let mut texts = note
        .split(|byte| *byte == SEPARATOR)
        .map(|text| String::from_utf8_lossy(text).into_owned());
    let reason = texts.next().unwrap_or_default();
    let rule = texts.next().map(|name| BlockedRule {
        name: name.into(),
        key: texts.map(Box::from).collect(),
    });
    (reason, rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a scan returns an entry twice, the list contains the block only once, with the fields
    /// from the last copy.
    #[test]
    fn an_entry_that_is_scanned_twice_is_one_block() {
        let entry = |end: u8, reason: &[u8]| [&[0, 0, 0, 0, 0, 0, end], reason].concat();
        let pages = [
            vec![
                (b"a".to_vec(), entry(0, b"old")),
                (b"b".to_vec(), entry(9, b"")),
            ],
            vec![
                (b"a".to_vec(), entry(0, b"new")),
                (b"c".to_vec(), entry(5, b"")),
            ],
            vec![(b"b".to_vec(), entry(9, b""))],
        ];
        let mut index = HashMap::new();
        pages.into_iter().for_each(|entries| index.extend(entries));
        let mut blocks = parse_entries(index, Timestamp::from_micros(5));
        blocks.sort_by(|one, other| one.key.cmp(&other.key));
        let shown: Vec<_> = blocks
            .iter()
            .map(|block| (&*block.key, block.until, block.reason.as_str()))
            .collect();
        let until = Some(Timestamp::from_micros(9));
        assert_eq!(shown, [(&b"a"[..], None, "new"), (b"b", until, "")]);
    }
}
