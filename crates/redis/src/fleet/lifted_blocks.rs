//! Lifts local copies of blocks that were lifted in Redis.
//!
//! A node copies each block that it enforces to its local store, which keeps enforcing it while
//! Redis is unreachable. The node is not told when another node lifts the block. So every few
//! seconds it asks the index in Redis which of its local blocks are still in force, and lifts the
//! others.

use std::{sync::Arc, time::Duration};

use tidegate_core::MemoryStore;
use tokio::{runtime::Handle, task::AbortHandle};

use crate::{RedisStore, StoreError};

/// Interval between two calls.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// Interval between attempts while Redis does not answer.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Maximum number of blocks in one call. A node with more of them asks about the rest in the next
/// calls, so that the load on Redis stays small.
const BLOCKS_PER_CALL: usize = 1_000;

/// Lifts the local copies of lifted blocks. Dropping it stops that.
#[derive(Debug)]
pub(super) struct LiftedBlocks(AbortHandle);

impl LiftedBlocks {
    /// Starts to compare the blocks in `local` with those in `store`.
    pub(super) fn start(store: RedisStore, local: Arc<MemoryStore>, runtime: &Handle) -> Self {
        Self(runtime.spawn(keep_lifting(store, local)).abort_handle())
    }
}

impl Drop for LiftedBlocks {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn keep_lifting(store: RedisStore, local: Arc<MemoryStore>) {
    let mut unchecked = Vec::new();
    loop {
        if unchecked.is_empty() {
            unchecked = local.blocked_keys();
        }
        let pause = match lift(&store, &local, &mut unchecked).await {
            Ok(()) => ASK_EVERY,
            Err(problem) => {
                tracing::debug!("failed to ask Redis which blocks are in force: {problem}");
                TRY_AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Asks about the last keys of `unchecked`, lifts the blocks that are not in force, and removes
/// these keys from the list. The list is unchanged if Redis does not answer.
async fn lift(
    store: &RedisStore,
    local: &MemoryStore,
    unchecked: &mut Vec<Box<[u8]>>,
) -> Result<(), StoreError> {
    let rest = unchecked.len().saturating_sub(BLOCKS_PER_CALL);
    if rest == unchecked.len() {
        return Ok(());
    }
    for key in store.lifted_of(&unchecked[rest..]).await? {
        // If the key is blocked again at this moment, its next denied request copies that block.
        local.drop_block(&key);
    }
    unchecked.truncate(rest);
    Ok(())
}
