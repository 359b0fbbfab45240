//! Lifts this node's local copies of blocks when other nodes have lifted the blocks in Redis.
//!
//! A node copies each block that it enforces to its local store. While Redis is slow or
//! unreachable, the local store enforces the copy. Redis does not notify the node when another node
//! lifts the block. Therefore, every few seconds, the node checks its local blocks against the
//! index in Redis, and lifts the local blocks that are no longer active in Redis.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tidegate_core::{MemoryStore, Span, Timestamp};
use tokio::{runtime::Handle, task::AbortHandle};

use crate::{RedisStore, StoreError};

/// Interval between two calls that compare the local copies with the blocks in Redis.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// Interval between attempts while Redis does not reply.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum number of blocks in one call. A node with more blocks checks the remaining blocks in the
/// next calls, so that the load on Redis stays small.
const BLOCKS_PER_CALL: usize = 1_000;

/// Makes local copies of blocks, and lifts the copies of blocks that were lifted in Redis. Dropping
/// the value stops the synchronisation.
#[derive(Debug)]
pub(super) struct BlockSync {
    copies: Arc<LocalCopies>,
    task: AbortHandle,
}

impl BlockSync {
    /// Starts comparing the blocks in `local` with the blocks in `store`.
    pub(super) fn start(store: RedisStore, local: Arc<MemoryStore>, runtime: &Handle) -> Self {
        let copies = Arc::new(LocalCopies::new(local));
        let task = runtime.spawn(keep_synced(store, Arc::clone(&copies)));
        Self {
            copies,
            task: task.abort_handle(),
        }
    }

    /// Copies a block. Returns false if there are too many blocks.
    pub(super) fn copy(
        &self,
        key: &[u8],
        span: Option<Span>,
        reason: &str,
        now: Timestamp,
    ) -> bool {
        self.copies.copy(key, span, reason, now)
    }
}

impl Drop for BlockSync {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The local copies of blocks.
#[derive(Debug)]
struct LocalCopies {
    local: Arc<MemoryStore>,
    /// The keys whose blocks were copied since the call in flight was sent; `None` while no call is
    /// in flight. The reply may be older than these copies, so do not lift the copies.
    copied_during_call: Mutex<Option<HashSet<Box<[u8]>>>>,
}

impl LocalCopies {
    fn new(local: Arc<MemoryStore>) -> Self {
        Self {
            local,
            copied_during_call: Mutex::default(),
        }
    }

    fn copy(&self, key: &[u8], span: Option<Span>, reason: &str, now: Timestamp) -> bool {
        let mut copied_during_call = self.copied_during_call();
        if let Some(keys) = copied_during_call.as_mut() {
            keys.insert(key.into());
        }
        self.local.block(key, span, reason, now)
    }

    /// Lifts the copies of `keys` that were made before the call was sent.
    fn lift_older(&self, keys: &[Vec<u8>]) {
        let copied_during_call = self.copied_during_call();
        let is_newer = |key: &[u8]| {
            copied_during_call
                .as_ref()
                .is_some_and(|keys| keys.contains(key))
        };
        for key in keys.iter().filter(|key| !is_newer(key)) {
            self.local.drop_block(key);
        }
    }

    fn copied_during_call(&self) -> MutexGuard<'_, Option<HashSet<Box<[u8]>>>> {
        self.copied_during_call
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

async fn keep_synced(store: RedisStore, copies: Arc<LocalCopies>) {
    let mut unchecked = Vec::new();
    loop {
        if unchecked.is_empty() {
            unchecked = copies.local.blocked_keys();
        }
        let pause = match lift_batch(&store, &copies, &mut unchecked).await {
            Ok(()) => SYNC_INTERVAL,
            Err(problem) => {
                tracing::debug!("failed to query the active blocks in Redis: {problem}");
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Queries Redis for the last keys of `unchecked`, and lifts the copies of blocks that are no
/// longer active in Redis. Then removes the queried keys from `unchecked`. If Redis does not reply,
/// `unchecked` is not changed.
async fn lift_batch(
    store: &RedisStore,
    copies: &LocalCopies,
    unchecked: &mut Vec<Box<[u8]>>,
) -> Result<(), StoreError> {
    let rest = unchecked.len().saturating_sub(BLOCKS_PER_CALL);
    if rest == unchecked.len() {
        return Ok(());
    }
    *copies.copied_during_call() = Some(HashSet::new());
    let lifted = store.find_lifted(&unchecked[rest..]).await;
    if let Ok(lifted) = &lifted {
        // If another node blocks a lifted key again at the same time, this node copies the new
        // block when the block denies the next request.
        copies.lift_older(lifted);
        unchecked.truncate(rest);
    }
    *copies.copied_during_call() = None;
    lifted.map(drop)
}

#[cfg(test)]
mod tests {
    use std::{future::ready, pin::Pin};

    use tidegate_core::MemoryBounds;
    use tokio::sync::Notify;

    use super::*;
    use crate::{
        call::{Call, Reply},
        exec::{ExecError, Executor, Replies},
    };

    /// A fake Redis that reports every block as lifted. If `reply` is set, the fake waits for a
    /// notification before each reply.
    #[derive(Debug, Default)]
    struct AllLifted {
        called: Notify,
        reply: Option<Notify>,
    }

    impl Executor for AllLifted {
        fn run<'a>(
            &'a self,
            calls: &'a [Call],
        ) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>> {
            // The three arguments before the keys are the instant, the slack and the name of the
            // operation.
            let replies = calls.iter().map(|call| {
                let keys = call.args[3..].iter().cloned();
                Ok(Reply::Array(keys.map(Reply::BulkString).collect()))
            });
            let replies: Replies = replies.collect();
            self.called.notify_one();
            match &self.reply {
                None => Box::pin(ready(replies)),
                Some(reply) => Box::pin(async move {
                    reply.notified().await;
                    replies
                }),
            }
        }

        fn is_cluster(&self) -> bool {
            false
        }

        fn servers(&self) -> Result<Vec<String>, ExecError> {
            Ok(Vec::new())
        }

        fn run_on<'a>(
            &'a self,
            _server: &'a str,
            _command: redis::Cmd,
        ) -> Pin<Box<dyn Future<Output = Result<Reply, ExecError>> + Send + 'a>> {
            let problem = "only scripts run here".to_owned();
            Box::pin(ready(Err(ExecError::Refused(problem))))
        }
    }

    const NOW: Timestamp = Timestamp::from_micros(1_767_225_600_000_000);

    fn local(blocks: usize) -> Arc<MemoryStore> {
        let local = MemoryStore::new(MemoryBounds::default());
        for number in 0..blocks {
            assert!(local.block(&number.to_be_bytes(), None, "", NOW));
        }
        Arc::new(local)
    }

    /// If a node has more copied blocks than one call can check, it removes the remaining ones
    /// after the next call.
    #[tokio::test(start_paused = true)]
    async fn each_call_lifts_a_thousand_copies() {
        let (redis, local) = (Arc::new(AllLifted::default()), local(BLOCKS_PER_CALL + 1));
        let store = RedisStore::with_executor(redis, b"tg");
        let _sync = BlockSync::start(store, Arc::clone(&local), &Handle::current());
        tokio::time::sleep(SYNC_INTERVAL / 2).await;
        assert_eq!(local.blocked_keys().len(), 1);
        tokio::time::sleep(SYNC_INTERVAL).await;
        assert_eq!(local.blocked_keys().len(), 0);
    }

    /// A key is blocked again while the reply that reports its former block as lifted is in flight.
    #[tokio::test]
    async fn a_block_that_is_set_during_a_call_is_kept() {
        let redis = Arc::new(AllLifted {
            reply: Some(Notify::new()),
            ..AllLifted::default()
        });
        let executor: Arc<dyn Executor> = redis.clone();
        let store = RedisStore::with_executor(executor, b"tg");
        let copies = LocalCopies::new(local(2));
        let mut unchecked = copies.local.blocked_keys();
        let again = 1_usize.to_be_bytes();
        let set = async {
            redis.called.notified().await;
            assert!(copies.copy(&again, None, "again", NOW));
            redis.reply.as_ref().unwrap().notify_one();
        };
        let (lifted, ()) = tokio::join!(lift_batch(&store, &copies, &mut unchecked), set);
        lifted.unwrap();
        assert_eq!(copies.local.blocked_keys(), [Box::from(again)]);

        // The next call lifts the block.
        unchecked = copies.local.blocked_keys();
        redis.reply.as_ref().unwrap().notify_one();
        lift_batch(&store, &copies, &mut unchecked).await.unwrap();
        assert!(copies.local.blocked_keys().is_empty());
    }
}
