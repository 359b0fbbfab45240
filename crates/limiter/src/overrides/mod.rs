//! Overrides and blocks by entries that operators set while the server runs. The store determines
//! where overrides and blocks are kept:
//!
//! ```text
//!   memory store    in this process, and in a file beside the snapshot, if there is one
//!   Redis           in Redis; every server reads the changes twice a second
//! ```
//!
//! Decisions use the copies in [`Overrides`] and [`tidegate_core::EntryBlocks`], which are part of
//! the core crate.

mod block_listing;
mod descriptor_rules;
mod inactive;
mod listing;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use tidegate_core::{
    EntryBlock, EntryBlockError, EntryBlockTarget, EntryBlocks, Override, OverrideError,
    OverrideTarget, Overrides, Rule, Store as _, Timestamp,
};
use tidegate_redis::{OverrideChanges, OverridePutResult, OverrideVersion, RedisStore, StoreError};

pub use self::{
    block_listing::{EntryBlockFilter, EntryBlockPage, inactive_reason},
    inactive::InactiveOverrides,
    listing::{ListedOverride, OverrideFilter, OverridePage},
};
pub use crate::override_state::{
    ChangeBlockError, ChangeError, ChangeOverrideError, DESCRIPTOR_RULE_PREFIX, DescriptorRules,
    OverridableRule, StateMoved,
};
use crate::{
    ServerLimiter,
    override_state::{
        BlockDocument, ChangeFile, OverrideDocument, OverrideFile, StoredDocument, StoredId, id,
    },
};

/// The interval at which a server reads the changes of overrides and blocks from Redis.
const SYNC_INTERVAL: Duration = Duration::from_millis(500);

/// The interval between attempts to read the overrides at the start.
const START_RETRY: Duration = Duration::from_millis(20);

/// Expired overrides are removed after this number of reads, which is once an hour.
const READS_PER_CLEANUP: u32 = 7_200;

/// The maximum number of times that one read is restarted from the beginning.
const MAX_RESTARTS: u32 = 2;

impl ServerLimiter {
    /// Returns the overrides.
    #[must_use]
    pub fn overrides(&self) -> &Overrides {
        &self.override_state.tables.overrides
    }

    /// Returns the blocks by entries.
    #[must_use]
    pub fn entry_blocks(&self) -> &EntryBlocks {
        &self.override_state.tables.entry_blocks
    }

    /// Keeps the overrides and the blocks by entries in the file at `path`, and restores those in
    /// the file. Without this call, the overrides and blocks of a memory store do not survive a
    /// restart. Returns the number of overrides and blocks.
    ///
    /// # Errors
    ///
    /// Returns the file system error.
    pub fn persist_overrides_in(&mut self, path: &Path) -> io::Result<usize> {
        let file = OverrideFile::restore(path, &self.override_state.tables, self.now())?;
        self.override_state.keeper.has_file = true;
        self.override_state.keeper.changes().file = ChangeFile::Open(file);
        Ok(self.override_state.tables.len())
    }

    /// Works like [`Self::persist_overrides_in`], but uses the file only after this process has
    /// taken over the state of another process. Until then, the other process writes to the file.
    pub fn persist_overrides_later_in(&mut self, path: PathBuf) {
        self.override_state.keeper.has_file = true;
        self.override_state.keeper.changes().file = ChangeFile::Later(path);
    }

    /// Returns the path of the override file that this process writes to.
    pub(crate) fn override_file(&self) -> Option<PathBuf> {
        match &self.override_state.keeper.changes().file {
            ChangeFile::Open(file) => file.path().canonicalize().ok(),
            ChangeFile::None | ChangeFile::Later(_) => None,
        }
    }

    /// Takes the path of the override file that the old process of an upgrade writes to.
    pub(crate) fn take_old_override_file(&self, path: PathBuf) {
        self.override_state.keeper.changes().old_file = Some(path);
    }

    /// Sets whether another process has taken over the overrides and blocks by entries. All earlier
    /// changes are complete when this function returns, and all later changes fail.
    pub(crate) fn set_overrides_moved(&self, is_moved: bool) {
        self.override_state.keeper.changes().is_moved = is_moved;
    }

    /// Returns whether an override or a block by entries that is set now would survive a restart of
    /// this server.
    #[must_use]
    pub fn are_overrides_persistent(&self) -> bool {
        self.redis_store().is_some() || self.override_state.keeper.has_file
    }

    /// Sets the override of `target` for `rule`, and returns the override that it replaces. The
    /// override takes effect immediately on this server, and within a second on the other servers
    /// that share its Redis.
    ///
    /// # Errors
    ///
    /// [`ChangeOverrideError`] if the override was not set. If Redis did not confirm the change,
    /// the override may or may not have been set.
    pub async fn set_override(
        &self,
        rule: &Rule,
        target: &OverrideTarget,
        new: Override,
    ) -> Result<Option<Override>, ChangeOverrideError> {
        let checked = Overrides::check(rule, target, &new.replacement);
        checked.map_err(|error| ChangeError::Refused(error.into()))?;
        let overrides = &self.override_state.tables.overrides;
        let room = overrides.check_room(rule.name(), target, self.now());
        room.map_err(ChangeError::Refused)?;
        let Some(redis) = self.redis_store() else {
            let document = OverrideDocument::new(rule.name(), target, &new);
            return self.change_override_in_memory(document).await;
        };
        let (document, until) = (OverrideDocument::new(rule.name(), target, &new), new.until);
        let store = redis.store();
        let put = store.put_override(document.id(), document.encode(), until);
        let OverridePutResult::Set(replaced) = put.await? else {
            return Err(ChangeError::Refused(OverrideError::TooMany));
        };
        self.read_own_change(store).await;
        Ok(replaced.as_deref().and_then(decode_override))
    }

    /// Removes the override of `target` for the rule with the name `rule`, and returns it. Returns
    /// `None` if the rule has no override of `target`. The rule does not have to exist.
    ///
    /// # Errors
    ///
    /// [`ChangeOverrideError`] if the override was not removed. If Redis did not confirm the
    /// change, the override may or may not have been removed.
    pub async fn remove_override(
        &self,
        rule: &str,
        target: &OverrideTarget,
    ) -> Result<Option<Override>, ChangeOverrideError> {
        let Some(redis) = self.redis_store() else {
            let removal = OverrideDocument::removal(rule, target);
            return self.change_override_in_memory(removal).await;
        };
        let id = id::of_override(rule, target);
        let removed = redis.store().drop_override(id).await?;
        self.read_own_change(redis.store()).await;
        Ok(removed.as_deref().and_then(decode_override))
    }

    /// Sets the block by entries with this `target`, and returns the block that it replaces. The
    /// block takes effect immediately on this server, and within a second on the other servers that
    /// share its Redis.
    ///
    /// # Errors
    ///
    /// [`ChangeBlockError`] if the block was not set. If Redis did not confirm the change, the
    /// block may or may not have been set.
    pub async fn set_entry_block(
        &self,
        target: &EntryBlockTarget,
        new: EntryBlock,
    ) -> Result<Option<EntryBlock>, ChangeBlockError> {
        let blocks = &self.override_state.tables.entry_blocks;
        let room = blocks.check_room(target, self.now());
        room.map_err(ChangeError::Refused)?;
        let document = BlockDocument::new(target, &new);
        let Some(redis) = self.redis_store() else {
            return self.change_block_in_memory(document).await;
        };
        let (store, id, until) = (redis.store(), document.id(), new.until);
        let put = store.put_override(id.clone(), document.encode(), until);
        let OverridePutResult::Set(replaced) = put.await? else {
            return Err(ChangeError::Refused(EntryBlockError::TooMany));
        };
        self.read_own_change(store).await;
        // Another server may have set the last possible block at the same time. The servers apply
        // the changes in the same order, so no server enforces the excess block.
        if let (None, Err(error)) = (blocks.get(target), blocks.check_room(target, self.now())) {
            store.drop_override(id).await?;
            return Err(ChangeError::Refused(error));
        }
        Ok(replaced.as_deref().and_then(decode_block))
    }

    /// Removes the block by entries with this `target`, and returns it. Returns `None` if there is
    /// no block with this target.
    ///
    /// # Errors
    ///
    /// [`ChangeBlockError`] if the block was not removed. If Redis did not confirm the change, the
    /// block may or may not have been removed.
    pub async fn remove_entry_block(
        &self,
        target: &EntryBlockTarget,
    ) -> Result<Option<EntryBlock>, ChangeBlockError> {
        let Some(redis) = self.redis_store() else {
            let removal = BlockDocument::removal(target);
            return self.change_block_in_memory(removal).await;
        };
        let removed = redis.store().drop_override(id::of_block(target)).await?;
        self.read_own_change(redis.store()).await;
        Ok(removed.as_deref().and_then(decode_block))
    }

    /// Changes a block of a memory store. Returns the replaced or removed block.
    async fn change_block_in_memory(
        &self,
        document: BlockDocument,
    ) -> Result<Option<EntryBlock>, ChangeBlockError> {
        let (blocks, now) = (self.override_state.tables.entry_blocks.clone(), self.now());
        let line = document.encode();
        let apply = move || document.apply(&blocks, now);
        let changed = self.change_in_memory(line, now, apply).await;
        self.waiters.recheck_entry_blocks();
        changed
    }

    /// Changes an override of a memory store. Returns the replaced or removed override.
    async fn change_override_in_memory(
        &self,
        document: OverrideDocument,
    ) -> Result<Option<Override>, ChangeOverrideError> {
        let (overrides, now) = (self.override_state.tables.overrides.clone(), self.now());
        let line = document.encode();
        let apply = move || document.apply(&overrides, now);
        self.change_in_memory(line, now, apply).await
    }

    /// Makes a change in a memory store: first in the file, if there is one, and then in the table
    /// with `apply`. Returns the result of `apply`.
    async fn change_in_memory<T, E>(
        &self,
        line: Vec<u8>,
        now: Timestamp,
        apply: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, ChangeError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        if !self.override_state.keeper.has_file {
            return self.override_state.keeper.changes().make(&line, now, apply);
        }
        let changes = Arc::clone(&self.override_state.keeper.changes);
        // The blocking task completes the change even if the caller's future is dropped.
        let changed = tokio::task::spawn_blocking(move || {
            let mut changes = changes.lock().unwrap_or_else(PoisonError::into_inner);
            changes.make(&line, now, apply)
        });
        let shutdown = |_| Err(io::Error::other("the server is shutting down").into());
        changed.await.unwrap_or_else(shutdown)
    }

    /// Returns the overrides and the blocks by entries, as documents for another process.
    pub(crate) fn override_documents(&self) -> Vec<Vec<u8>> {
        let (mut documents, now) = (Vec::new(), self.now());
        for (name, overrides) in self.overrides().by_name() {
            for (target, found) in overrides.page(None, usize::MAX, now, |_, _| true) {
                documents.push(OverrideDocument::new(&name, &target, &found).encode());
            }
        }
        for (target, block) in self.entry_blocks().page(None, usize::MAX, |_, _| true) {
            documents.push(BlockDocument::new(&target, &block).encode());
        }
        documents
    }

    /// Begins to replace all overrides and blocks with those of another process.
    pub(crate) fn begin_override_restore(&self) {
        self.override_state.tables.begin_replacement();
    }

    /// Restores an override or a block of another process from its document. Does not change the
    /// override file.
    pub(crate) fn restore_override(&self, document: &[u8]) -> Result<(), String> {
        StoredDocument::decode(document)?.apply(&self.override_state.tables, self.now())
    }

    /// Ends the replacement of all overrides and blocks, and removes the overrides and blocks that
    /// were not restored. Opens the override file. If the old process wrote to another file, an
    /// earlier file at `path` is obsolete, so this method renames it. Restored overrides and blocks
    /// that the file does not contain are added to it.
    pub(crate) fn end_override_restore(&self) -> io::Result<()> {
        let restored = self.override_documents();
        let mut changes = self.override_state.keeper.changes();
        if let ChangeFile::Later(path) = &changes.file {
            if changes.old_file.is_none() || changes.old_file != path.canonicalize().ok() {
                OverrideFile::set_aside(path)?;
            }
            let mut file = OverrideFile::restore(path, &self.override_state.tables, self.now())?;
            file.add_missing(&restored, self.now())?;
            changes.file = ChangeFile::Open(file);
        }
        self.override_state.tables.end_replacement();
        Ok(())
    }

    /// Applies a change that this server has just written to Redis. If Redis cannot be read, the
    /// next regular read applies the change.
    async fn read_own_change(&self, store: &RedisStore) {
        self.record_sync(&self.read_override_changes(store).await);
    }

    /// Reads all overrides from Redis. A server calls this method before it accepts requests, so
    /// that the server does not decide a request under a rule's own limits while the key has an
    /// override. Tries again for up to `patience` while Redis does not reply, and then logs the
    /// error. With a memory store, this method does nothing.
    pub async fn read_overrides_at_start(&self, patience: Duration) {
        let Some(redis) = self.redis_store() else {
            return;
        };
        let end = tokio::time::Instant::now() + patience;
        loop {
            let result = self.read_override_changes(redis.store()).await;
            if result.is_ok() || tokio::time::Instant::now() >= end {
                return self.record_sync(&result);
            }
            tokio::time::sleep(START_RETRY).await;
        }
    }

    /// Reads override changes from Redis twice a second, and removes expired overrides once an
    /// hour. The future never completes.
    pub async fn sync_overrides(&self) {
        let mut reads = 0;
        loop {
            if let Some(redis) = self.redis_store() {
                self.record_sync(&self.read_override_changes(redis.store()).await);
            }
            reads += 1;
            if reads % READS_PER_CLEANUP == 0 {
                self.remove_ended_overrides().await;
            }
            tokio::time::sleep(SYNC_INTERVAL).await;
        }
    }

    /// Reads the changes since the last call from Redis, and applies them. On success, all changes
    /// made before this call have been applied.
    async fn read_override_changes(&self, store: &RedisStore) -> Result<(), StoreError> {
        let mut version = self.override_state.keeper.version.lock().await;
        let mut restarts = 0;
        loop {
            let before = *version;
            let Some(changes) = store.override_changes(before).await? else {
                // Redis has lost its data, or no longer stores which overrides were removed since
                // version `before`. The current overrides stay active until all overrides have been
                // read again.
                *version = OverrideVersion::default();
                restarts += 1;
                if restarts > MAX_RESTARTS {
                    return Ok(());
                }
                continue;
            };
            if before.is_beginning() {
                self.override_state.tables.begin_replacement();
            }
            if self.apply_override_changes(&changes) {
                self.waiters.recheck_entry_blocks();
            }
            let mut removed = 0;
            if before.is_replacing(changes.has_more) {
                removed = self.override_state.tables.end_replacement();
            }
            *version = changes.version;
            if before != changes.version || removed > 0 {
                // A cached denial may be based on the previous limits.
                self.clear_denial_cache();
            }
            if !changes.has_more {
                return Ok(());
            }
        }
    }

    /// Applies changes from Redis. Returns whether the changes set blocks by entries.
    fn apply_override_changes(&self, changes: &OverrideChanges) -> bool {
        let mut sets_blocks = false;
        for id in changes.removed.iter().filter_map(|id| id::parse(id)) {
            self.override_state.tables.remove(&id);
        }
        for (id, document) in &changes.set {
            let document = StoredDocument::decode(document);
            sets_blocks |= matches!(document, Ok(StoredDocument::Block(_)));
            let applied =
                document.map(|document| document.apply(&self.override_state.tables, self.now()));
            match applied {
                Ok(Ok(())) => {}
                Ok(Err(problem)) => {
                    let rule = rule_of_id(id);
                    tracing::warn!(rule, "an override or a block was not applied: {problem}");
                }
                // A newer version of Tidegate may have written a document in a different format.
                Err(problem) => {
                    let rule = rule_of_id(id);
                    tracing::warn!(
                        rule,
                        "failed to read an override or a block in Redis, so it has no effect: {problem}"
                    );
                    if let Some(id) = id::parse(id) {
                        self.override_state.tables.remove(&id);
                    }
                }
            }
        }
        sets_blocks
    }

    /// Logs when reads of the changes start to fail, and when they succeed again.
    fn record_sync(&self, result: &Result<(), StoreError>) {
        let keeper = &self.override_state.keeper;
        let was_failing = keeper.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match result {
            Err(error) if !was_failing => tracing::warn!(
                "failed to read overrides and blocks from Redis, so only those that this server has already read apply: \
                 {error}; retrying (further failures are not logged until an attempt succeeds)"
            ),
            Ok(()) if was_failing => {
                tracing::info!("reading overrides and blocks from Redis succeeded again")
            }
            _ => {}
        }
    }

    async fn remove_ended_overrides(&self) {
        let now = self.now();
        if let Some(redis) = self.redis_store() {
            // The other servers see the removals when they read the changes.
            while let Ok(true) = redis.store().sweep_overrides(now).await {}
        } else {
            self.override_state.tables.remove_ended(now);
        }
    }
}

/// Returns the override in a document from Redis. Returns `None` if a newer version of Tidegate has
/// written the document in a different format.
fn decode_override(document: &[u8]) -> Option<Override> {
    match StoredDocument::decode(document) {
        Ok(StoredDocument::Override(document)) => document.into_override(),
        _ => None,
    }
}

/// Returns the block in a document from Redis, like [`decode_override`].
fn decode_block(document: &[u8]) -> Option<EntryBlock> {
    match StoredDocument::decode(document) {
        Ok(StoredDocument::Block(document)) => document.into_block(),
        _ => None,
    }
}

/// Returns the name of the rule in an ID, for the log.
fn rule_of_id(id: &[u8]) -> Option<String> {
    match id::parse(id)? {
        StoredId::Override(rule, _) => Some(rule),
        StoredId::Block(target) => target.rule().map(str::to_owned),
    }
}
