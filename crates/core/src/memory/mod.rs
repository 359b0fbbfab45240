//! The memory store.
use crate::{charge::{Charge, Effect}, outcome::{Decision, Outcome}, time::{Span, Timestamp}};

/// What a full store does for a key that it has not seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Forgets a key that has spent less than half of its limits; if none is at hand, denies the newcomer.
    #[default]
    Evict,
    /// Forgets nothing and denies the newcomer.
    Deny,
    /// Forgets nothing and lets the newcomer pass uncounted.
    Allow,
}

/// The bounds of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBounds {
    /// The most keys; default 1,000,000... 
    pub max_keys: usize,
    /// The most bytes.
    pub max_bytes: usize,
    /// What a full store does for newcomers.
    pub when_full: WhenFull,
}

impl Default for MemoryBounds {
    fn default() -> Self { Self { max_keys: 10_000_000, max_bytes: 1 << 30, when_full: WhenFull::Evict } }
}

/// What the store has done so far and holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Keys held now.
    pub keys: usize,
    /// Bytes held now, by the store's own account.
    pub bytes: usize,
    /// Expired keys that were dropped.
    pub expired: u64,
    /// Live keys that were forgotten to make room.
    pub evicted: u64,
    /// Newcomers denied because the store was full.
    pub newcomers_denied: u64,
    /// Newcomers let through uncounted because the store was full.
    pub newcomers_allowed: u64,
    /// Manual blocks that stand now.
    pub blocks: usize,
}

/// A manual block on one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The key, as charged.
    pub key: Box<[u8]>,
    /// When it ends; `None` stands until lifted.
    pub until: Option<Timestamp>,
    /// Why, in the operator's words.
    pub reason: String,
}

/// The store that keeps its state in this process.
#[derive(Debug)]
pub struct MemoryStore {}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new(_bounds: MemoryBounds) -> Self { Self {} }
    /// Decides `charges` at `now`: all charged, or none. Fills `outcomes` (cleared first) with one outcome a
    /// limit, in order; they stay empty when no limit was asked (a block, a full store).
    pub fn check(&self, _charges: &[Charge<'_>], _now: Timestamp, _effect: Effect, outcomes: &mut Vec<Outcome>) -> Decision { outcomes.clear(); Decision::Admitted }
    /// Forgets what `key` has spent; true if there was anything.
    pub fn reset(&self, _key: &[u8]) -> bool { false }
    /// Blocks `key` for `span`, or until lifted; replaces an earlier block. False if there are
    /// [`MAX_BLOCKS`](crate::bounds::MAX_BLOCKS) blocks already.
    pub fn block(&self, _key: &[u8], _span: Option<Span>, _reason: &str, _now: Timestamp) -> bool { true }
    /// Lifts the block on `key`; true if one stood.
    pub fn unblock(&self, _key: &[u8], _now: Timestamp) -> bool { false }
    /// The block on `key` that stands at `now`.
    #[must_use]
    pub fn block_on(&self, _key: &[u8], _now: Timestamp) -> Option<Block> { None }
    /// Every block that stands at `now`, in no order.
    #[must_use]
    pub fn blocks(&self, _now: Timestamp) -> Vec<Block> { Vec::new() }
    /// What the store holds and has done.
    #[must_use]
    pub fn stats(&self) -> MemoryStats { MemoryStats::default() }
}
