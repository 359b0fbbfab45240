//! Blocks by entries: an operator denies all requests with certain entries, such as all requests
//! from a network, whatever rules apply to them. In contrast, a block of a key denies the requests
//! of one rule with one key. Blocks by entries can be changed at any time, and are kept when the
//! rules are reloaded.

mod table;
mod target;

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

use self::table::BlockTable;
pub use self::target::{BlockedEntry, BlockedValue, EntryBlockTarget};
use super::Request;
use crate::{eval::BlockEnd, limit::bounds, time::Timestamp};

/// A block by entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryBlock {
    /// When the block ends; `None` if it lasts until it is removed.
    pub until: Option<Timestamp>,
    /// The reason given by the operator, at most [`bounds::MAX_REASON_BYTES`].
    pub reason: Box<str>,
}

impl EntryBlock {
    /// Returns whether the block has not ended at `now`.
    #[must_use]
    pub fn is_unexpired(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// The reason why a block cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryBlockError {
    /// There are already [`bounds::MAX_ENTRY_BLOCKS`] blocks.
    TooMany,
    /// The blocks of all rules, or of one rule, already have [`bounds::MAX_ENTRY_BLOCK_FORMS`]
    /// different combinations of entry names and prefix lengths.
    TooManyForms,
}

impl fmt::Display for EntryBlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => write!(
                f,
                "the maximum of {} blocks by entries is reached; lift some first, or block larger \
                 networks",
                bounds::MAX_ENTRY_BLOCKS
            ),
            Self::TooManyForms => write!(
                f,
                "the maximum of {} combinations of entry names and prefix lengths is reached; use \
                 the prefix length of an existing block, or lift some blocks first",
                bounds::MAX_ENTRY_BLOCK_FORMS
            ),
        }
    }
}

impl std::error::Error for EntryBlockError {}

/// A block with its target.
#[derive(Clone, Debug)]
struct StoredBlock {
    target: EntryBlockTarget,
    block: EntryBlock,
    /// The number of times that all blocks had been replaced when this block was set.
    generation: usize,
}

impl StoredBlock {
    fn end(&self) -> BlockEnd {
        BlockEnd::at(self.block.until)
    }

    fn found(&self) -> (EntryBlockTarget, EntryBlock) {
        (self.target.clone(), self.block.clone())
    }
}

/// A lookup of the blocks on one request.
pub(super) struct BlockLookup<'b>(RwLockReadGuard<'b, Tables>);

impl BlockLookup<'_> {
    /// Returns the end of the block on `request` that does not depend on a rule. If several blocks
    /// apply, returns the latest end.
    pub(super) fn end(&self, request: &Request<'_>, now: Timestamp) -> Option<BlockEnd> {
        self.0.all.end(request, now)
    }

    /// Returns the end of the block on `request` that depends on `rule`, a rule that applies to the
    /// request. If several blocks apply, returns the latest end.
    pub(super) fn end_of_rule(
        &self,
        rule: &str,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Option<BlockEnd> {
        if self.0.by_rule.is_empty() {
            return None;
        }
        self.0.by_rule.get(rule)?.end(request, now)
    }
}

/// All blocks by entries. Clones share the blocks, so a change through one clone takes effect in
/// all clones.
#[derive(Clone, Debug, Default)]
pub struct EntryBlocks(Arc<BlockRegistry>);

#[derive(Debug, Default)]
struct BlockRegistry {
    /// The number of blocks. Requests read only this number if there are no blocks.
    count: AtomicUsize,
    tables: RwLock<Tables>,
    /// The number of times that all blocks were replaced.
    generation: AtomicUsize,
}

#[derive(Debug, Default)]
struct Tables {
    /// The blocks that do not depend on a rule.
    all: BlockTable,
    by_rule: HashMap<Box<str>, BlockTable>,
    /// No block ends before this instant; `None` if no block has an end. Without this field, every
    /// attempt to set a block when there are too many would scan all blocks for ended ones.
    earliest_end: Option<Timestamp>,
}

impl Tables {
    fn of(&self, rule: Option<&str>) -> Option<&BlockTable> {
        match rule {
            None => Some(&self.all),
            Some(rule) => self.by_rule.get(rule),
        }
    }

    fn get(&self, target: &EntryBlockTarget) -> Option<&StoredBlock> {
        self.of(target.rule())?.get(target)
    }

    /// Checks whether there is room for a new block with `target`.
    fn check_room(&self, target: &EntryBlockTarget) -> Result<(), EntryBlockError> {
        let table = self.of(target.rule());
        let is_full = table.is_some_and(|table| {
            table.forms() >= bounds::MAX_ENTRY_BLOCK_FORMS && !table.has_form(target)
        });
        match is_full {
            true => Err(EntryBlockError::TooManyForms),
            false => Ok(()),
        }
    }

    /// Sets a block, and returns the block that it replaces.
    fn set(&mut self, stored: StoredBlock) -> Option<EntryBlock> {
        if let Some(until) = stored.block.until {
            let earliest = self.earliest_end.map_or(until, |end| end.min(until));
            self.earliest_end = Some(earliest);
        }
        let table = match stored.target.rule() {
            None => &mut self.all,
            Some(rule) => self.by_rule.entry(rule.into()).or_default(),
        };
        table.set(stored)
    }

    /// Removes the blocks that have ended at `now`, and returns their number. Scans the blocks only
    /// if one of them may have ended since the last scan.
    fn remove_ended(&mut self, now: Timestamp) -> usize {
        match self.earliest_end {
            Some(end) if end <= now => self.retain(|stored| stored.block.is_unexpired(now)),
            _ => 0,
        }
    }

    /// Removes the blocks for which `keep` returns false, and returns their number.
    fn retain(&mut self, keep: impl Fn(&StoredBlock) -> bool) -> usize {
        let mut removed = self.all.retain(&keep);
        for table in self.by_rule.values_mut() {
            removed += table.retain(&keep);
        }
        self.by_rule.retain(|_, table| !table.is_empty());
        self.earliest_end = self.iter().filter_map(|stored| stored.block.until).min();
        removed
    }

    fn iter(&self) -> impl Iterator<Item = &StoredBlock> {
        let of_rules = self.by_rule.values().flat_map(BlockTable::iter);
        self.all.iter().chain(of_rules)
    }
}

impl EntryBlocks {
    /// Returns whether there are no blocks.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of blocks, including ended blocks that have not been removed yet.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Sets the block with this `target`, and returns the block that it replaces. The new block
    /// takes effect immediately.
    ///
    /// # Errors
    ///
    /// Returns an error and changes nothing if there are too many blocks.
    pub fn set(
        &self,
        target: &EntryBlockTarget,
        new: EntryBlock,
        now: Timestamp,
    ) -> Result<Option<EntryBlock>, EntryBlockError> {
        let mut tables = self.write();
        self.make_room(&mut tables, target, now)?;
        let replaced = tables.set(StoredBlock {
            target: target.clone(),
            block: new,
            generation: self.0.generation.load(Ordering::Relaxed),
        });
        if replaced.is_none() {
            self.0.count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(replaced)
    }

    /// Checks whether there is room for a block with this `target`. If there are too many blocks,
    /// blocks that have ended at `now` are removed.
    ///
    /// # Errors
    ///
    /// Returns an error if there are too many blocks.
    pub fn check_room(
        &self,
        target: &EntryBlockTarget,
        now: Timestamp,
    ) -> Result<(), EntryBlockError> {
        self.make_room(&mut self.write(), target, now)
    }

    fn make_room(
        &self,
        tables: &mut Tables,
        target: &EntryBlockTarget,
        now: Timestamp,
    ) -> Result<(), EntryBlockError> {
        if tables.get(target).is_some() {
            return Ok(());
        }
        let is_full = self.len() >= bounds::MAX_ENTRY_BLOCKS;
        if is_full || tables.check_room(target).is_err() {
            let removed = tables.remove_ended(now);
            self.0.count.fetch_sub(removed, Ordering::Relaxed);
        }
        if self.len() >= bounds::MAX_ENTRY_BLOCKS {
            return Err(EntryBlockError::TooMany);
        }
        tables.check_room(target)
    }

    /// Returns the block with exactly this `target`, even if it has ended.
    #[must_use]
    pub fn get(&self, target: &EntryBlockTarget) -> Option<EntryBlock> {
        Some(self.read().get(target)?.block.clone())
    }

    /// Removes and returns the block with this `target`.
    pub fn remove(&self, target: &EntryBlockTarget) -> Option<EntryBlock> {
        let mut tables = self.write();
        let removed = match target.rule() {
            None => tables.all.remove(target)?,
            Some(rule) => {
                let table = tables.by_rule.get_mut(rule)?;
                let removed = table.remove(target)?;
                if table.is_empty() {
                    tables.by_rule.remove(rule);
                }
                removed
            }
        };
        self.0.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed)
    }

    /// Begins to replace all blocks. Blocks that are not [set](Self::set) again stay active until
    /// [`Self::end_replacement`] removes them.
    pub fn begin_replacement(&self) {
        self.0.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the blocks that have not been set since [`Self::begin_replacement`], and returns
    /// their number.
    pub fn end_replacement(&self) -> usize {
        let generation = self.0.generation.load(Ordering::Relaxed);
        self.remove_with(|tables| tables.retain(|stored| stored.generation == generation))
    }

    /// Removes the blocks that have ended at `now` to free their memory. Ended blocks have no
    /// effect.
    pub fn remove_ended(&self, now: Timestamp) {
        self.remove_with(|tables| tables.remove_ended(now));
    }

    /// Calls `remove`, which removes blocks and returns their number, unless there are no blocks.
    fn remove_with(&self, remove: impl FnOnce(&mut Tables) -> usize) -> usize {
        if self.is_empty() {
            return 0;
        }
        let removed = remove(&mut self.write());
        self.0.count.fetch_sub(removed, Ordering::Relaxed);
        removed
    }

    /// Returns up to `most` blocks that `select` accepts, starting after the target `after` and
    /// sorted by target. Blocks that do not depend on a rule come first. `select` is called with
    /// each block, even if it is not on the page, so the caller can count those that it accepts.
    #[must_use]
    pub fn page(
        &self,
        after: Option<&EntryBlockTarget>,
        most: usize,
        mut select: impl FnMut(&EntryBlockTarget, &EntryBlock) -> bool,
    ) -> Vec<(EntryBlockTarget, EntryBlock)> {
        let tables = self.read();
        let mut page = BTreeMap::new();
        for stored in tables.iter() {
            let target = &stored.target;
            if !select(target, &stored.block) {
                continue;
            }
            let is_after = after.is_none_or(|after| target > after);
            let last = page.last_key_value();
            let is_beyond = page.len() == most && last.is_none_or(|(last, _)| target > *last);
            if !is_after || is_beyond {
                continue;
            }
            page.insert(target, stored);
            if page.len() > most {
                page.pop_last();
            }
        }
        page.into_values().map(StoredBlock::found).collect()
    }

    /// Calls `visit` with each target.
    pub fn for_each_target(&self, mut visit: impl FnMut(&EntryBlockTarget)) {
        for stored in self.read().iter() {
            visit(&stored.target);
        }
    }

    /// Returns the block on `request` that ends last, among the blocks for all rules and, if `rule`
    /// is given, the blocks for this rule.
    #[must_use]
    pub fn find(
        &self,
        request: &Request<'_>,
        rule: Option<&str>,
        now: Timestamp,
    ) -> Option<(EntryBlockTarget, EntryBlock)> {
        if self.is_empty() {
            return None;
        }
        let tables = self.read();
        let of_rule = rule.and_then(|rule| tables.by_rule.get(rule));
        let found = [Some(&tables.all), of_rule].into_iter().flatten();
        let found = found.filter_map(|table| table.find(request, now));
        let longest = found.max_by_key(|stored| stored.end());
        longest.map(StoredBlock::found)
    }

    /// Starts a lookup of the blocks on one request. No block changes until the lookup is dropped.
    pub(super) fn look_up(&self) -> BlockLookup<'_> {
        BlockLookup(self.read())
    }

    // Poisoning is ignored: no operation leaves the tables in an inconsistent state, even if it
    // panics.

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0
            .tables
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_end_bounds_the_ends_of_all_blocks() {
        let mut tables = Tables::default();
        let at = |micros| Some(Timestamp::from_micros(micros));
        let set = |tables: &mut Tables, address: &str, until| {
            let target = EntryBlockTarget::new(None, &[("ip", address)]).unwrap();
            let block = EntryBlock {
                until,
                reason: "a test".into(),
            };
            tables.set(StoredBlock {
                target,
                block,
                generation: 0,
            })
        };
        set(&mut tables, "203.0.113.1", None);
        assert_eq!(tables.earliest_end, None);
        for (address, until) in [("203.0.113.2", 20), ("203.0.113.3", 10)] {
            set(&mut tables, address, at(until));
        }
        assert_eq!(tables.earliest_end, at(10));
        // The replaced block had the earliest end, so the next scan removes no block.
        set(&mut tables, "203.0.113.3", at(30));
        for (now, removed, earliest) in [
            (9, 0, at(10)),
            (10, 0, at(20)),
            (20, 1, at(30)),
            (30, 1, None),
        ] {
            assert_eq!(tables.remove_ended(Timestamp::from_micros(now)), removed);
            assert_eq!(tables.earliest_end, earliest);
        }
        assert_eq!(tables.iter().count(), 1);
    }
}
