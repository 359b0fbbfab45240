//! Blocks by hand: keys that are denied before any limit is asked, until an instant or until somebody lifts it.

use std::collections::HashMap;

use super::{Block, shard::Shard};
use crate::time::{Span, Timestamp};

/// The blocks of one shard: at least one, for a shard without any has none of this.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    by_key: HashMap<Box<[u8]>, Standing>,
    /// Bytes of keys and reasons.
    text_bytes: usize,
}

#[derive(Clone, Debug)]
struct Standing {
    until: Option<Timestamp>,
    /// How long it was to stand when it was set.
    span: Option<Span>,
    reason: Box<str>,
}

impl Blocks {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Bytes on the heap, about: of its own table a map tells only how much it can hold.
    pub(super) fn heap_bytes(&self) -> usize {
        let slot = size_of::<(Box<[u8]>, Standing)>() + 1;
        self.by_key.capacity() * 8 / 7 * slot + self.text_bytes
    }

    fn insert(&mut self, key: &[u8], standing: Standing, now: Timestamp) {
        self.remove(key);
        if self.by_key.len() == self.by_key.capacity() {
            // To grow is dear already: that is when those that ended go, so that they never pile up.
            self.drop_ended(now);
        }
        self.text_bytes += key.len() + standing.reason.len();
        self.by_key.insert(key.into(), standing);
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(standing) = self.by_key.remove(key) {
            self.text_bytes -= key.len() + standing.reason.len();
        }
    }

    /// Lets no block stand longer after `now` than it was to stand when it was set.
    pub(super) fn clamp(&mut self, now: Timestamp) {
        for standing in self.by_key.values_mut() {
            if let (Some(until), Some(span)) = (&mut standing.until, standing.span) {
                *until = now.after(span).min(*until);
            }
        }
    }

    fn drop_ended(&mut self, now: Timestamp) {
        let text_bytes = &mut self.text_bytes;
        self.by_key.retain(|key, standing| {
            let stands = !standing.is_over(now);
            if !stands {
                *text_bytes -= key.len() + standing.reason.len();
            }
            stands
        });
    }
}

impl Standing {
    fn is_over(&self, now: Timestamp) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    fn as_block(&self, key: &[u8]) -> Block {
        Block {
            key: key.into(),
            until: self.until,
            reason: self.reason.to_string(),
        }
    }
}

impl Shard {
    /// The block on `key` that stands at `now`: when it ends, if it does.
    #[inline]
    pub(super) fn blocked(&mut self, key: &[u8], now: Timestamp) -> Option<Option<Timestamp>> {
        self.blocks.as_ref()?;
        self.standing(key, now).map(|standing| standing.until)
    }

    pub(super) fn block(&mut self, key: &[u8], span: Option<Span>, reason: &str, now: Timestamp) {
        let standing = Standing {
            until: span.map(|span| now.after(span)),
            span,
            reason: reason.into(),
        };
        let blocks = self.blocks.get_or_insert_default();
        blocks.insert(key, standing, now);
    }

    /// Lifts the block on `key`; true if one stood.
    pub(super) fn unblock(&mut self, key: &[u8], now: Timestamp) -> bool {
        let stood = self.standing(key, now).is_some();
        self.drop_block(key);
        stood
    }

    pub(super) fn block_on(&mut self, key: &[u8], now: Timestamp) -> Option<Block> {
        self.standing(key, now)
            .map(|standing| standing.as_block(key))
    }

    /// The blocks that stand at `now`; those that ended are dropped.
    pub(super) fn blocks(&mut self, now: Timestamp) -> Vec<Block> {
        self.drop_ended_blocks(now);
        let blocks = self.blocks.iter().flat_map(|blocks| &blocks.by_key);
        blocks
            .map(|(key, standing)| standing.as_block(key))
            .collect()
    }

    /// How many blocks there are; those that ended may be among them.
    pub(super) fn block_count(&self) -> usize {
        self.blocks.as_ref().map_or(0, |blocks| blocks.len())
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.blocks.as_ref().map_or(0, |blocks| blocks.heap_bytes())
    }

    pub(super) fn drop_ended_blocks(&mut self, now: Timestamp) {
        if let Some(blocks) = &mut self.blocks {
            blocks.drop_ended(now);
        }
        self.blocks.take_if(|blocks| blocks.len() == 0);
    }

    /// The block on `key`, which is dropped if it has ended.
    fn standing(&mut self, key: &[u8], now: Timestamp) -> Option<&Standing> {
        let ended = self.blocks.as_ref()?.by_key.get(key)?.is_over(now);
        if ended {
            self.drop_block(key);
        }
        self.blocks.as_ref()?.by_key.get(key)
    }

    fn drop_block(&mut self, key: &[u8]) {
        if let Some(blocks) = &mut self.blocks {
            blocks.remove(key);
        }
        self.blocks.take_if(|blocks| blocks.len() == 0);
    }
}
