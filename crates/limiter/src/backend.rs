//! The backend of the limiter.

use tidegate_core::{MemoryStore, Receipt};
use tidegate_redis::{FallbackReceipt, FallbackStore};

/// The backend that makes decisions: the memory of this process, or a Redis that several servers
/// share.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a process has only one backend, and a box would add an indirection to every decision"
)]
pub enum Backend {
    /// The memory store of this process.
    Memory(MemoryStore),
    /// Redis, with this node's memory store as the fallback while Redis is unreachable.
    Redis(FallbackStore),
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self::Memory(store)
    }
}

impl From<FallbackStore> for Backend {
    fn from(redis_store: FallbackStore) -> Self {
        Self::Redis(redis_store)
    }
}

/// A receipt for a charge. Only the backend that issued a receipt can settle the receipt.
#[derive(Debug)]
pub enum LimiterReceipt {
    /// Issued by the memory store.
    Memory(Receipt),
    /// Issued by the Redis-backed store.
    Redis(FallbackReceipt),
}

impl LimiterReceipt {
    /// Returns whether the charge at this position was made.
    pub(crate) fn is_charged(&self, at: usize) -> bool {
        match self {
            Self::Memory(receipt) => receipt.is_charged(at),
            Self::Redis(receipt) => receipt.is_charged(at),
        }
    }
}
