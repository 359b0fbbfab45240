//! Admin operations on one key, which affect this node or, with Redis, all nodes.

use tidegate_core::{
    Block, BlockNote, Charge, Effect, MaybeReady, Outcome, Span, Store, Timestamp,
};
use tidegate_redis::StoreError;

use crate::ServerLimiter;

impl ServerLimiter {
    /// Returns all blocks, in no particular order.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis cannot be queried.
    pub async fn blocks(&self) -> Result<Vec<Block>, StoreError> {
        match self.redis_store() {
            Some(redis_store) => redis_store.store().blocks().await,
            None => Ok(self.local_store().blocks(self.now())),
        }
    }

    /// Returns the block on `key`, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis cannot be queried.
    pub async fn block_on(&self, key: &[u8]) -> Result<Option<Block>, StoreError> {
        match self.redis_store() {
            Some(redis_store) => redis_store.store().block_on(key).await,
            None => Ok(self.local_store().block_on(key, self.now())),
        }
    }

    /// Returns the remaining time of `block`, measured by the clock of the store that holds the
    /// block. Returns `None` if the block never expires.
    ///
    /// # Errors
    ///
    /// Fails if the block is in Redis and Redis cannot be queried.
    pub async fn time_left(&self, block: &Block) -> Result<Option<Span>, StoreError> {
        match self.redis_store() {
            Some(redis_store) => redis_store.store().time_left(block).await,
            None => Ok(self.local_store().time_left(block, self.now())),
        }
    }

    /// Returns the current time of the clock that determines when blocks expire. With Redis, blocks
    /// expire by the Redis clock, otherwise by this server's clock.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis cannot be queried.
    pub async fn block_clock(&self) -> Result<Timestamp, StoreError> {
        match self.redis_store() {
            Some(redis_store) => redis_store.store().block_clock().await,
            None => Ok(self.now()),
        }
    }

    /// Blocks `key` for `span`; without a span, the key stays blocked until it is unblocked.
    /// Returns false and changes nothing if there are too many blocks.
    ///
    /// With Redis, this node also keeps a local copy of the block. If the copy does not fit, only a
    /// warning is logged, because every node that can reach Redis enforces the block.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis did not confirm the change. After an error, the
    /// caller cannot know whether the change was made.
    pub async fn block<'a>(
        &self,
        key: &[u8],
        span: Option<Span>,
        note: impl Into<BlockNote<'a>>,
    ) -> Result<bool, StoreError> {
        let note = note.into();
        let Some(redis_store) = self.redis_store() else {
            let is_blocked = self.local_store().block(key, span, note, self.now());
            self.waiters.wake(key);
            return Ok(is_blocked);
        };
        if !redis_store.store().block(key, span, note).await? {
            return Ok(false);
        }
        // A denial removes the first request from the queue, and the next request is decided. The
        // other servers notice the block when the first request in their queue polls Redis.
        self.waiters.wake(key);
        // Blocks are listed from Redis, so the local copy does not need the rule's name.
        if !redis_store.block_locally(key, span, note.reason, self.now()) {
            tracing::warn!(
                rule = note.rule.map(|rule| &*rule.name),
                "cannot cache another block: this server has reached its maximum; while Redis is unreachable, this \
                 server does not enforce the new block"
            );
        }
        Ok(true)
    }

    /// Removes the block on `key`. Returns true if the key was blocked.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis did not confirm the change. After an error, the
    /// caller cannot know whether the change was made.
    pub async fn unblock(&self, key: &[u8]) -> Result<bool, StoreError> {
        let Some(redis_store) = self.redis_store() else {
            return Ok(self.local_store().unblock(key, self.now()));
        };
        // If Redis does not confirm the change, the local copy of the block stays active.
        let was_blocked = redis_store.store().unblock(key).await?;
        self.local_store().unblock(key, self.now());
        redis_store.clear_denial_cache();
        Ok(was_blocked)
    }

    /// Resets the counters of `key`. Returns true if the key had counters. Without Redis, the
    /// result is ready immediately. A block on the key stays active.
    ///
    /// # Errors
    ///
    /// Fails if the counters are in Redis and Redis did not confirm the change. After an error, the
    /// caller cannot know whether the change was made.
    pub fn reset(
        &self,
        key: &[u8],
    ) -> MaybeReady<Result<bool, StoreError>, impl Future<Output = Result<bool, StoreError>>> {
        let Some(redis_store) = self.redis_store() else {
            return MaybeReady::Ready(Ok(self.local_store().reset(key)));
        };
        MaybeReady::Pending(async move {
            // If Redis does not confirm the change, the local counters are kept as well.
            let had_counters = redis_store.store().reset(key).await?;
            self.local_store().reset(key);
            redis_store.clear_denial_cache();
            Ok(had_counters)
        })
    }

    /// Returns the state of the limits without charging them. With [`Effect::Look`], returns the
    /// current state, regardless of the cost and of blocks. With [`Effect::Peek`], returns the
    /// outcomes that a charge would have now, or no outcomes for a blocked key.
    ///
    /// # Errors
    ///
    /// Fails if the counters are in Redis and Redis cannot be queried.
    pub async fn inspect(
        &self,
        charge: Charge<'_>,
        effect: Effect,
    ) -> Result<Vec<Outcome>, StoreError> {
        let (charges, mut outcomes) = ([charge], Vec::new());
        // An inspection must never charge or refund.
        let effect = match effect {
            Effect::Charge | Effect::Peek => Effect::Peek,
            Effect::Look | Effect::Refund => Effect::Look,
        };
        match self.redis_store() {
            Some(redis_store) => {
                redis_store
                    .store()
                    .check(&charges, effect, &mut outcomes)
                    .await?;
            }
            None => {
                self.local_store()
                    .check(&charges, self.now(), effect, &mut outcomes);
            }
        }
        Ok(outcomes)
    }
}
