//! The overrides and the blocks by entries that this server knows, and the file that keeps them.

mod block_document;
mod descriptor_rules;
mod document;
mod file;
pub(crate) mod id;
mod stored;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};

use arc_swap::ArcSwapOption;
use tidegate_core::{EntryBlockError, OverrideError, RuleSet, Timestamp};
use tidegate_net::prometheus::{Metric, Page, count};
use tidegate_redis::{OverrideVersion, StoreError};

pub use self::descriptor_rules::{DESCRIPTOR_RULE_PREFIX, DescriptorRules, OverridableRule};
pub(crate) use self::{
    block_document::BlockDocument,
    document::OverrideDocument,
    file::OverrideFile,
    id::StoredId,
    stored::{LiveTables, StoredDocument},
};

const OVERRIDES: Metric = Metric::gauge(
    "tidegate_overrides",
    [],
    "Overrides, including expired overrides that have not been removed yet.",
);

const ENTRY_BLOCKS: Metric = Metric::gauge(
    "tidegate_entry_blocks",
    [],
    "Blocks by entries, including ended blocks that have not been removed yet.",
);

/// The reason why an override or a block by entries was not changed. `E` is the error of an invalid
/// change, or of a change for which there is no room.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError<E> {
    /// The change is not valid, or there are too many overrides or blocks.
    #[error(transparent)]
    Refused(E),
    /// Redis cannot be reached.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The override file cannot be written.
    #[error("cannot write the override file: {0}")]
    File(#[from] io::Error),
    /// Another process has taken over the overrides and blocks.
    #[error(transparent)]
    Moved(#[from] StateMoved),
}

/// The reason why an override was not changed.
pub type ChangeOverrideError = ChangeError<OverrideError>;

/// The reason why a block by entries was not changed.
pub type ChangeBlockError = ChangeError<EntryBlockError>;

/// The error of a change after another process has taken over the overrides and blocks.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a new process has taken over from this process; repeat the request on a new connection")]
pub struct StateMoved;

/// The overrides and the blocks by entries of a server.
#[derive(Debug, Default)]
pub(crate) struct OverrideState {
    pub(crate) tables: LiveTables,
    pub(crate) keeper: OverrideKeeper,
    /// The rules of Envoy's rate limit service; `None` until its configuration is loaded.
    pub(crate) descriptor_rules: ArcSwapOption<DescriptorRules>,
}

impl OverrideState {
    /// Returns `rules` with the overrides and the blocks by entries. Later changes also apply.
    pub(crate) fn apply_to(&self, rules: RuleSet) -> RuleSet {
        rules
            .with_overrides(&self.tables.overrides)
            .with_entry_blocks(&self.tables.entry_blocks)
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        page.single(&OVERRIDES, count(self.tables.overrides.len()));
        page.single(&ENTRY_BLOCKS, count(self.tables.entry_blocks.len()));
    }
}

/// Where the overrides and the blocks by entries are kept.
#[derive(Debug, Default)]
pub(crate) struct OverrideKeeper {
    /// Whether the overrides are kept in a file. This flag is separate from `changes`, because the
    /// lock of `changes` is held while the file is written.
    pub(crate) has_file: bool,
    pub(crate) changes: Arc<Mutex<MemoryChanges>>,
    /// The version of the overrides that this server last read from Redis. The lock ensures that an
    /// older change never replaces a newer change.
    pub(crate) version: tokio::sync::Mutex<OverrideVersion>,
    pub(crate) is_failing: AtomicBool,
}

impl OverrideKeeper {
    pub(crate) fn changes(&self) -> MutexGuard<'_, MemoryChanges> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The changes of the overrides and blocks of a memory store. A change is made under a lock, so
/// that each change is either handed over to a new process or refused.
#[derive(Debug, Default)]
pub(crate) struct MemoryChanges {
    pub(crate) file: ChangeFile,
    /// The override file of the old process of an upgrade.
    pub(crate) old_file: Option<PathBuf>,
    /// Whether another process has taken over the overrides and blocks.
    pub(crate) is_moved: bool,
}

/// The override file of a memory store.
#[derive(Debug, Default)]
pub(crate) enum ChangeFile {
    /// The changes are not kept, because there is no snapshot.
    #[default]
    None,
    /// The file is opened when the old process of an upgrade no longer writes to it.
    Later(PathBuf),
    Open(OverrideFile),
}

impl MemoryChanges {
    /// Makes a change: first in the file, if there is one, and then with `apply`.
    pub(crate) fn make<T, E>(
        &mut self,
        line: &[u8],
        now: Timestamp,
        apply: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, ChangeError<E>> {
        if self.is_moved {
            return Err(StateMoved.into());
        }
        match &mut self.file {
            ChangeFile::Open(file) => file.change(line, now, apply),
            ChangeFile::None | ChangeFile::Later(_) => apply().map_err(ChangeError::Refused),
        }
    }
}
