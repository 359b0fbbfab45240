//! Blocks by hand: keys that are denied before any limit is asked, until an instant or until somebody lifts it.

use std::collections::HashMap;

use super::{Block, shard::Shard};
use crate::time::Timestamp;

/// The blocks of one shard: at least one, for a shard without any has none of this.
#[derive(Debug, Default)]
pub(super) struct Blocks(HashMap<Box<[u8]>, Standing>);

#[derive(Clone, Debug)]
struct Standing {
    until: Option<Timestamp>,
    reason: Box<str>,
}

impl Blocks {
    pub(super) fn len(&self) -> usize {
        self.0.len()
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

    pub(super) fn block(&mut self, key: &[u8], until: Option<Timestamp>, reason: &str) {
        let reason = reason.into();
        let blocks = self.blocks.get_or_insert_default();
        blocks.0.insert(key.into(), Standing { until, reason });
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
        if let Some(blocks) = &mut self.blocks {
            blocks.0.retain(|_, standing| !standing.is_over(now));
        }
        self.blocks.take_if(|blocks| blocks.0.is_empty());
        let blocks = self.blocks.iter().flat_map(|blocks| &blocks.0);
        blocks
            .map(|(key, standing)| standing.as_block(key))
            .collect()
    }

    /// The block on `key`, which is dropped if it has ended.
    fn standing(&mut self, key: &[u8], now: Timestamp) -> Option<&Standing> {
        let ended = self.blocks.as_ref()?.0.get(key)?.is_over(now);
        if ended {
            self.drop_block(key);
        }
        self.blocks.as_ref()?.0.get(key)
    }

    fn drop_block(&mut self, key: &[u8]) {
        if let Some(blocks) = &mut self.blocks {
            blocks.0.remove(key);
        }
        self.blocks.take_if(|blocks| blocks.0.is_empty());
    }
}
