//! Manual blocks: keys that are denied before any limit is evaluated, until the block expires or an
//! operator removes it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::Shard;
use crate::{
    limit::bounds,
    memory::{Block, BlockNote},
    rules::BlockedRule,
    time::{Span, Timestamp},
};

/// The number of blocks in all shards of a store, including expired blocks that are still stored.
/// No other data is synchronised through this number, so relaxed ordering is enough.
#[derive(Clone, Debug, Default)]
pub(in crate::memory) struct BlockCount(Arc<AtomicUsize>);

impl BlockCount {
    /// Counts one more block, unless there are already [`bounds::MAX_BLOCKS`] blocks. Returns
    /// whether the block was counted.
    fn try_add(&self) -> bool {
        let added = |count| (count < bounds::MAX_BLOCKS).then_some(count + 1);
        let result = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
        result.is_ok()
    }

    fn subtract(&self, dropped: usize) {
        self.0.fetch_sub(dropped, Ordering::Relaxed);
    }
}

/// The blocks of one shard. A shard without blocks holds `None` instead of an empty `Blocks`.
#[derive(Debug, Default)]
pub(in crate::memory) struct Blocks {
    by_key: HashMap<Box<[u8]>, BlockRecord>,
    /// The total size, in bytes, of all keys, reasons, rule names and key entry names.
    text_bytes: usize,
}

#[derive(Clone, Debug)]
struct BlockRecord {
    until: Option<Timestamp>,
    /// The duration of the block when it was created. After a clock jump, the block is shortened to
    /// its original duration.
    span: Option<Span>,
    reason: Box<str>,
    rule: Option<BlockedRule>,
}

impl Blocks {
    pub(in crate::memory) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Returns the approximate heap size in bytes. The size of the map's table is estimated from
    /// its capacity, because `HashMap` does not report it.
    pub(in crate::memory) fn heap_bytes(&self) -> usize {
        let slot = size_of::<(Box<[u8]>, BlockRecord)>() + 1;
        self.by_key.capacity() * 8 / 7 * slot + self.text_bytes
    }

    /// Inserts a block, or replaces the block on the same key. Returns the number of expired blocks
    /// that were dropped.
    fn insert(&mut self, key: &[u8], record: BlockRecord, now: Timestamp) -> usize {
        self.remove(key);
        let mut dropped = 0;
        if self.by_key.len() == self.by_key.capacity() {
            // Drop expired blocks before the map grows, so that they do not accumulate. Dropping
            // expired blocks costs little compared with growing the map.
            dropped = self.drop_ended(now);
        }
        self.text_bytes += key.len() + record.text_bytes();
        self.by_key.insert(key.into(), record);
        dropped
    }

    /// Removes the block on `key`. Returns true if `key` had a block.
    fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.by_key.remove(key);
        if let Some(record) = &removed {
            self.text_bytes -= key.len() + record.text_bytes();
        }
        removed.is_some()
    }

    /// Shortens each block to at most its original duration, counted from `now`.
    pub(in crate::memory) fn clamp(&mut self, now: Timestamp) {
        for record in self.by_key.values_mut() {
            if let (Some(until), Some(span)) = (&mut record.until, record.span) {
                *until = now.after(span).min(*until);
            }
        }
    }

    /// Drops expired blocks, and returns their number.
    fn drop_ended(&mut self, now: Timestamp) -> usize {
        let before = self.by_key.len();
        let text_bytes = &mut self.text_bytes;
        self.by_key.retain(|key, record| {
            let is_active = !record.is_over(now);
            if !is_active {
                *text_bytes -= key.len() + record.text_bytes();
            }
            is_active
        });
        before - self.by_key.len()
    }
}

impl BlockRecord {
    fn is_over(&self, now: Timestamp) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    fn text_bytes(&self) -> usize {
        let rule = self.rule.as_ref().map_or(0, BlockedRule::heap_bytes);
        self.reason.len() + rule
    }

    fn as_block(&self, key: &[u8]) -> Block {
        Block {
            key: key.into(),
            until: self.until,
            reason: self.reason.to_string(),
            rule: self.rule.clone(),
        }
    }
}

impl Shard {
    /// Returns the end of the active block on `key`: `Some(None)` if the block has no end, `None`
    /// if there is no active block.
    #[inline]
    pub(in crate::memory) fn blocked(
        &mut self,
        key: &[u8],
        now: Timestamp,
    ) -> Option<Option<Timestamp>> {
        self.blocks.as_ref()?;
        self.active_block(key, now).map(|record| record.until)
    }

    /// Blocks `key`, or replaces its block. Returns false, and changes nothing, if the maximum
    /// number of blocks is reached.
    pub(in crate::memory) fn block(
        &mut self,
        key: &[u8],
        span: Option<Span>,
        note: BlockNote<'_>,
        now: Timestamp,
    ) -> bool {
        if self.active_block(key, now).is_none() && !self.cold.block_count.try_add() {
            return false;
        }
        let record = BlockRecord {
            until: span.map(|span| now.after(span)),
            span,
            reason: note.reason.into(),
            rule: note.rule.cloned(),
        };
        let blocks = self.blocks.get_or_insert_default();
        let dropped = blocks.insert(key, record, now);
        self.cold.block_count.subtract(dropped);
        true
    }

    /// Removes the block on `key`. Returns true if `key` had an unexpired block.
    pub(in crate::memory) fn unblock(&mut self, key: &[u8], now: Timestamp) -> bool {
        let was_active = self.active_block(key, now).is_some();
        self.drop_block(key);
        was_active
    }

    pub(in crate::memory) fn block_on(&mut self, key: &[u8], now: Timestamp) -> Option<Block> {
        self.active_block(key, now)
            .map(|record| record.as_block(key))
    }

    /// Returns the blocks that are active at `now`, and drops expired blocks.
    pub(in crate::memory) fn blocks(&mut self, now: Timestamp) -> Vec<Block> {
        self.drop_ended_blocks(now);
        let blocks = self.blocks.iter().flat_map(|blocks| &blocks.by_key);
        blocks.map(|(key, record)| record.as_block(key)).collect()
    }

    /// Returns the keys of all blocks, including expired blocks.
    pub(in crate::memory) fn blocked_keys(&self) -> Vec<Box<[u8]>> {
        let blocks = self.blocks.iter();
        blocks
            .flat_map(|blocks| blocks.by_key.keys().cloned())
            .collect()
    }

    /// Returns the number of blocks, including expired blocks that have not been removed yet.
    pub(in crate::memory) fn block_count(&self) -> usize {
        self.blocks.as_ref().map_or(0, |blocks| blocks.len())
    }

    pub(in crate::memory) fn block_bytes(&self) -> usize {
        self.blocks.as_ref().map_or(0, |blocks| blocks.heap_bytes())
    }

    pub(in crate::memory) fn drop_ended_blocks(&mut self, now: Timestamp) {
        if let Some(blocks) = &mut self.blocks {
            self.cold.block_count.subtract(blocks.drop_ended(now));
        }
        self.blocks.take_if(|blocks| blocks.len() == 0);
    }

    /// Returns the active block on `key`. If the block has expired, drops it and returns `None`.
    fn active_block(&mut self, key: &[u8], now: Timestamp) -> Option<&BlockRecord> {
        let ended = self.blocks.as_ref()?.by_key.get(key)?.is_over(now);
        if ended {
            self.drop_block(key);
        }
        self.blocks.as_ref()?.by_key.get(key)
    }

    /// Removes the block on `key`, expired or not.
    pub(in crate::memory) fn drop_block(&mut self, key: &[u8]) {
        if let Some(blocks) = &mut self.blocks {
            self.cold
                .block_count
                .subtract(usize::from(blocks.remove(key)));
        }
        self.blocks.take_if(|blocks| blocks.len() == 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_ended_blocks_releases_their_bytes() {
        let mut blocks = Blocks::default();
        let at = Timestamp::from_micros;
        for (key, until) in [(b"ends", Some(at(2))), (b"last", None)] {
            let record = BlockRecord {
                until,
                span: None,
                reason: "abuse".into(),
                rule: None,
            };
            blocks.insert(key, record, at(1));
        }
        assert_eq!(blocks.drop_ended(at(3)), 1);
        assert_eq!(blocks.text_bytes, "last".len() + "abuse".len());
    }

    /// The store reports this byte count, so it must be close to the number of allocated bytes.
    #[test]
    fn heap_bytes_covers_the_table_and_the_texts() {
        let mut blocks = Blocks::default();
        for number in 0..1_000_u64 {
            let record = BlockRecord {
                until: None,
                span: None,
                reason: "abuse".into(),
                rule: None,
            };
            blocks.insert(&number.to_be_bytes(), record, Timestamp::from_micros(1));
        }
        let slots = 1_000 * size_of::<(Box<[u8]>, BlockRecord)>();
        let texts = 1_000 * (size_of::<u64>() + "abuse".len());
        let least = slots + texts;
        assert!((least..3 * least).contains(&blocks.heap_bytes()));
    }
}
