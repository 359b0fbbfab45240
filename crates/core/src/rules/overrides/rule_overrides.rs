//! The overrides of a single rule.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    Override, OverrideError, OverrideTarget, Replacement,
    key_filter::KeyFilter,
    key_override::KeyOverride,
    key_overrides::KeyOverrides,
    patterns::{self, PatternOverrides},
    replacement::CompiledReplacement,
    stored::{Generation, StoredOverride},
};
use crate::{
    eval::{Charge, Limits},
    hash_table::{RandomState, hash_with},
    limit::bounds,
    rules::{LookupBuffers, Rule, RuleError, key},
    time::Timestamp,
};

/// The hash of a key of the rule, from [`RuleOverrides::prefetch`].
#[derive(Clone, Copy, Debug)]
pub(in crate::rules) struct KeyHash(u64);

/// The overrides of a single rule. The overrides can change while requests are decided.
#[derive(Debug, Default)]
pub struct RuleOverrides {
    count: AtomicUsize,
    /// The number of overrides with patterns.
    pattern_count: AtomicUsize,
    hasher: RandomState,
    /// A filter for the keys that have an override in any rule.
    filter: Arc<KeyFilter>,
    keys: KeyOverrides,
    patterns: RwLock<PatternOverrides>,
    compiled: Mutex<SharedReplacements>,
}

/// The replacements in use, so that overrides with the same limits share one replacement.
#[derive(Debug, Default)]
struct SharedReplacements {
    by_replacement: HashMap<Replacement, Weak<CompiledReplacement>>,
    /// When the map has more than this number of replacements, unused replacements are removed.
    clean_at: usize,
}

impl SharedReplacements {
    fn get(&mut self, replacement: Replacement) -> Arc<CompiledReplacement> {
        let known = self
            .by_replacement
            .get(&replacement)
            .and_then(Weak::upgrade);
        if let Some(known) = known {
            return known;
        }
        let compiled = Arc::new(CompiledReplacement::new(replacement.clone()));
        self.by_replacement
            .insert(replacement, Arc::downgrade(&compiled));
        if self.by_replacement.len() > self.clean_at {
            self.by_replacement
                .retain(|_, shared| shared.strong_count() > 0);
            self.clean_at = (2 * self.by_replacement.len()).max(64);
        }
        compiled
    }
}

impl RuleOverrides {
    pub(super) fn new(filter: Arc<KeyFilter>) -> Self {
        Self {
            filter,
            ..Self::default()
        }
    }

    /// Returns whether the rule has no overrides.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the number of overrides, including expired overrides that have not been removed yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the override for exactly `target`, even if it has expired.
    #[must_use]
    pub fn get(&self, target: &OverrideTarget) -> Option<Override> {
        match target {
            OverrideTarget::Key(values) => {
                let bytes = encode(values.iter().map(|value| &**value));
                let hash = self.hash(&bytes);
                let table = self.keys.read(hash);
                let known = &table[table.find(hash, &bytes)?];
                known
                    .is_for(values.len())
                    .then(|| known.stored.to_override())
            }
            OverrideTarget::Pattern(texts) => {
                let patterns = read(&self.patterns);
                patterns.get(texts).map(StoredOverride::to_override)
            }
        }
    }

    /// Prepares [`Self::limits`] for `key`, an encoded key of the rule: returns the hash of the
    /// key, and starts to load the memory in which the lookup begins. Returns `None` if the rule
    /// has no overrides.
    ///
    /// A lookup reads the filter, the tags and the override one after the other, and each of them
    /// is in another cache line. If the last key that was looked up with `buffers` had an override,
    /// all of them are loaded at once, because this key probably has an override as well.
    #[inline]
    pub(in crate::rules) fn prefetch(
        &self,
        key: &[u8],
        buffers: &LookupBuffers,
    ) -> Option<KeyHash> {
        if self.is_empty() {
            return None;
        }
        let (_, bytes) = key::split(key)?;
        let hash = self.hash(bytes);
        self.filter.prefetch(hash);
        if buffers.expects_override {
            self.keys.prefetch(hash);
        }
        Some(KeyHash(hash))
    }

    /// Starts to load the word of the filter for the key with these `bytes` after its scope.
    pub(in crate::rules) fn prefetch_filter(&self, bytes: &[u8]) -> KeyHash {
        let hash = self.hash(bytes);
        self.filter.prefetch(hash);
        KeyHash(hash)
    }

    /// Starts to load the override of the key with this hash, if it passes the filter.
    pub(in crate::rules) fn prefetch_entry(&self, KeyHash(hash): KeyHash) {
        if self.filter.may_contain(hash) {
            self.keys.prefetch(hash);
        }
    }

    /// Returns the limits of the override for `key`, an encoded key of `rule`, if there is one.
    /// `base` are the limits that would apply without the override: the limits of a plan, or the
    /// rule's own.
    #[inline]
    pub(in crate::rules) fn limits(
        &self,
        rule: &Rule,
        base: &Arc<Limits>,
        key: &[u8],
        KeyHash(hash): KeyHash,
        now: Timestamp,
        buffers: &mut LookupBuffers,
    ) -> Option<Arc<Limits>> {
        let may_have_own = self.filter.may_contain(hash);
        buffers.expects_override = may_have_own;
        if may_have_own || self.has_patterns() {
            let (_, bytes) = key::split(key)?;
            let hash = may_have_own.then_some(hash);
            let limits = |compiled: &CompiledReplacement| compiled.limits(rule, base);
            self.find_limits(rule, bytes, hash, now, buffers, limits)
        } else {
            None
        }
    }

    /// Returns the limits on which `charge` was made, if they come from an override of `rule` that
    /// has not been changed since.
    pub(in crate::rules) fn limits_of(
        &self,
        rule: &Rule,
        charge: &Charge<'_>,
    ) -> Option<Arc<Limits>> {
        let (_, bytes) = key::split(charge.key)?;
        let (hash, buffers) = (self.hash(bytes), &mut LookupBuffers::default());
        // At this time, no override has expired. An override of the key that had ended when the
        // charge was made does not contain its limits, so the limits are those of a pattern.
        let now = Timestamp::default();
        let limits = |compiled: &CompiledReplacement| compiled.limits_of(charge);
        self.find_limits(rule, bytes, Some(hash), now, buffers, limits)
            .or_else(|| self.find_limits(rule, bytes, None, now, buffers, limits))
    }

    /// Returns the limits of the override for the key of `rule` with these `values`, if there is
    /// one. A factor multiplies the rule's own limits.
    #[must_use]
    pub fn limits_of_values(
        &self,
        rule: &Rule,
        values: &[&str],
        now: Timestamp,
    ) -> Option<Arc<Limits>> {
        let length: usize = values.iter().map(|value| value.len()).sum();
        if self.is_empty() || length > bounds::MAX_KEY_BYTES {
            return None;
        }
        let bytes = encode(values.iter().copied());
        let (hash, buffers) = (self.hash(&bytes), &mut LookupBuffers::default());
        let limits = |compiled: &CompiledReplacement| compiled.limits(rule, rule.limits());
        self.find_limits(rule, &bytes, Some(hash), now, buffers, limits)
    }

    /// Returns the result of `limits` for the override of the key with these `bytes` after its
    /// scope: the override for the key itself or, if there is no such override, for the longest
    /// matching pattern. `hash` is the hash of the key; `None` if the key has no override of its
    /// own.
    // This function is not inlined, so that the code of a decision without an override stays small.
    #[inline(never)]
    fn find_limits(
        &self,
        rule: &Rule,
        bytes: &[u8],
        hash: Option<u64>,
        now: Timestamp,
        buffers: &mut LookupBuffers,
        limits: impl FnOnce(&CompiledReplacement) -> Option<Arc<Limits>>,
    ) -> Option<Arc<Limits>> {
        if let Some(hash) = hash {
            let table = self.keys.read(hash);
            let known = table.find(hash, bytes).and_then(|slot| table.get(slot));
            if let Some(known) = known
                && known.is_for(rule.key().len())
                && known.stored.is_unexpired(now)
            {
                return limits(&known.stored.compiled);
            }
        }
        if !self.has_patterns() {
            return None;
        }
        let patterns = read(&self.patterns);
        let values = rule.decode_values(bytes)?;
        // Override patterns have a separate maximum, so their evaluations do not count towards the
        // maximum for the rules.
        let rules_work = std::mem::take(&mut buffers.work);
        let found = patterns.find(&values, now, buffers);
        let found = found.and_then(|(_, stored)| limits(&stored.compiled));
        if buffers.work.check().is_ok() {
            buffers.work = rules_work;
        }
        found
    }

    fn has_patterns(&self) -> bool {
        self.pattern_count.load(Ordering::Relaxed) != 0
    }

    /// Returns the override for `key`, an encoded key of `rule`, with its target.
    #[must_use]
    pub fn find(
        &self,
        rule: &Rule,
        key: &[u8],
        now: Timestamp,
    ) -> Option<(OverrideTarget, Override)> {
        let (_, bytes) = key::split(key)?;
        let values = rule.decode_values(bytes)?;
        let own = OverrideTarget::Key(values.iter().map(|value| Box::from(*value)).collect());
        if let Some(found) = self.get(&own).filter(|found| found.is_unexpired(now)) {
            return Some((own, found));
        }
        let patterns = read(&self.patterns);
        let (texts, stored) = patterns.find(&values, now, &mut LookupBuffers::default())?;
        Some((
            OverrideTarget::Pattern(texts.to_vec()),
            stored.to_override(),
        ))
    }

    pub(super) fn set(
        &self,
        target: &OverrideTarget,
        new: Override,
        generation: Generation,
    ) -> Result<Option<Override>, OverrideError> {
        let stored = StoredOverride {
            compiled: lock(&self.compiled).get(new.replacement),
            until: new.until.unwrap_or(Timestamp::MAX),
            reason: new.reason,
        };
        let replaced = match target {
            OverrideTarget::Key(values) => {
                let bytes = encode(values.iter().map(|value| &**value));
                let hash = self.hash(&bytes);
                let new = KeyOverride::new(&bytes, values.len(), stored, generation);
                let _added = self.filter.add(hash);
                let hash_of = |known: &KeyOverride| self.hash(known.key.bytes());
                self.keys.set(hash, new, hash_of).map(|known| known.stored)
            }
            OverrideTarget::Pattern(texts) => {
                self.change_patterns(|all| all.set(texts, stored, generation))?
            }
        };
        if replaced.is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(replaced.map(|stored| stored.to_override()))
    }

    /// Checks whether there is room for a new override for `target`.
    pub(super) fn check_room(&self, target: &OverrideTarget) -> Result<(), OverrideError> {
        match target {
            OverrideTarget::Key(_) => Ok(()),
            OverrideTarget::Pattern(texts) => read(&self.patterns).check_room(texts),
        }
    }

    pub(super) fn remove(&self, target: &OverrideTarget) -> Option<Override> {
        let removed = match target {
            OverrideTarget::Key(values) => {
                let bytes = encode(values.iter().map(|value| &**value));
                let hash = self.hash(&bytes);
                let mut table = self.keys.write(hash);
                let slot = table.find(hash, &bytes)?;
                let removed = table.remove(slot)?;
                table.shrink_if_empty(|known| self.hash(known.key.bytes()));
                removed.stored
            }
            OverrideTarget::Pattern(texts) => self.change_patterns(|all| all.remove(texts))?,
        };
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed.to_override())
    }

    /// Removes the overrides for which `keep` returns false, and returns their number.
    pub(super) fn retain(&self, keep: &impl Fn(&StoredOverride, Generation) -> bool) -> usize {
        let mut removed = self.change_patterns(|all| all.retain(keep));
        self.keys.change_each_table(|table| {
            let before = table.len();
            table.retain(|known| keep(&known.stored, known.generation));
            removed += before - table.len();
            table.shrink_if_empty(|known| self.hash(known.key.bytes()));
        });
        self.count.fetch_sub(removed, Ordering::Relaxed);
        removed
    }

    /// Returns up to `most` overrides that have not expired at `now` and that `select` accepts,
    /// starting after the target `after` and sorted by target. Keys come before patterns. `select`
    /// is called with the target and the reason of each override, even if it is not on the page, so
    /// the caller can count those that it accepts. The rule does not have to exist, and its key may
    /// have another number of entries than a target has values.
    #[must_use]
    pub fn page(
        &self,
        after: Option<&OverrideTarget>,
        most: usize,
        now: Timestamp,
        mut select: impl FnMut(&OverrideTarget, &str) -> bool,
    ) -> Vec<(OverrideTarget, Override)> {
        let mut page = TargetPage {
            after,
            most,
            first: std::collections::BTreeMap::new(),
        };
        self.keys.for_each_table(|table| {
            for known in table.iter().filter(|known| known.stored.is_unexpired(now)) {
                if let Some(target) = known.target()
                    && select(&target, &known.stored.reason)
                {
                    page.offer(target, &known.stored);
                }
            }
        });
        for (texts, stored) in read(&self.patterns).iter() {
            let target = OverrideTarget::Pattern(texts.to_vec());
            if stored.is_unexpired(now) && select(&target, &stored.reason) {
                page.offer(target, stored);
            }
        }
        page.first.into_iter().collect()
    }

    /// Returns the number of overrides that apply to no key of `rule`, because their target is
    /// neither a key nor a pattern of `rule`, or because their limits are invalid for `rule`. A
    /// factor that is invalid for any plan is counted, although it applies to the other plans.
    ///
    /// Visits all overrides, and checks each distinct replacement once. The check of a factor
    /// compiles the limits of each plan, so the call can take seconds. It does not block changes
    /// during the checks.
    #[must_use]
    pub fn count_inactive(&self, rule: &Rule) -> usize {
        self.count_invalid(rule.key().len(), |replacement| {
            replacement.check(rule).is_ok()
        })
    }

    /// Returns the number of overrides whose target does not have `entries` values, or whose
    /// replacement `is_valid` rejects.
    fn count_invalid(&self, entries: usize, is_valid: impl Fn(&Replacement) -> bool) -> usize {
        let mut invalid = 0;
        // The replacements by address, with the numbers of their overrides. The references keep the
        // addresses in use.
        let mut by_address = HashMap::new();
        let mut add = |has_entries: bool, stored: &StoredOverride| {
            if !has_entries {
                invalid += 1;
                return;
            }
            let (_, count) = by_address
                .entry(Arc::as_ptr(&stored.compiled))
                .or_insert_with(|| (Arc::clone(&stored.compiled), 0));
            *count += 1;
        };
        self.keys.for_each_table(|table| {
            for known in table.iter() {
                add(known.is_for(entries), &known.stored);
            }
        });
        for (texts, stored) in read(&self.patterns).iter() {
            add(texts.len() == entries, stored);
        }
        // No table is locked here. A change that waits for a table also delays the decisions that
        // come after it.
        let of_invalid = by_address
            .into_values()
            .filter(|(shared, _)| !is_valid(shared.replacement()))
            .map(|(_, count): (_, usize)| count);
        invalid + of_invalid.sum::<usize>()
    }

    /// Calls `visit` with the hash of each key that has an override.
    pub(super) fn for_each_hash(&self, visit: &mut dyn FnMut(u64)) {
        self.keys.for_each_table(|table| {
            for known in table.iter() {
                visit(self.hash(known.key.bytes()));
            }
        });
    }

    fn change_patterns<T>(&self, change: impl FnOnce(&mut PatternOverrides) -> T) -> T {
        let mut patterns = write(&self.patterns);
        let result = change(&mut patterns);
        self.pattern_count.store(patterns.len(), Ordering::Relaxed);
        result
    }

    #[inline]
    fn hash(&self, bytes: &[u8]) -> u64 {
        hash_with(&self.hasher, bytes)
    }
}

/// A page of a listing, sorted by target.
struct TargetPage<'a> {
    after: Option<&'a OverrideTarget>,
    most: usize,
    first: std::collections::BTreeMap<OverrideTarget, Override>,
}

impl TargetPage<'_> {
    fn offer(&mut self, target: OverrideTarget, stored: &StoredOverride) {
        let is_listed = self.after.is_some_and(|after| target <= *after);
        let is_beyond = self.first.len() == self.most
            && self
                .first
                .last_key_value()
                .is_none_or(|(last, _)| target > *last);
        if is_listed || is_beyond {
            return;
        }
        self.first.insert(target, stored.to_override());
        if self.first.len() > self.most {
            self.first.pop_last();
        }
    }
}

/// Rejects a target that is neither a key nor a pattern of `rule`.
pub(super) fn check_target(rule: &Rule, target: &OverrideTarget) -> Result<(), RuleError> {
    let values: Vec<&str> = target.values().collect();
    if let OverrideTarget::Key(_) = target {
        let encoded = rule.encode_key(&values);
        return encoded
            .map(drop)
            .map_err(|error| RuleError::new("key", error.problem));
    }
    let (own, given) = (rule.key().len(), values.len());
    if own != given {
        let mut problem = format!("{}, but the pattern has {given}", rule.key_description());
        if own > 0 {
            problem.push_str("; write one pattern for each entry of the key, such as `*`");
        }
        return Err(RuleError::new("key", problem));
    }
    patterns::parse(values.into_iter()).map(drop)
}

/// Encodes a key without its scope.
fn encode<'v>(values: impl ExactSizeIterator<Item = &'v str>) -> Box<[u8]> {
    let (mut bytes, count) = (Vec::new(), values.len());
    for (at, value) in values.enumerate() {
        key::push(&mut bytes, value, at + 1 == count);
    }
    bytes.into()
}

// Poisoning is ignored: no operation leaves a value in an inconsistent state, even if it panics.

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check can take seconds, so no table is locked meanwhile.
    #[test]
    fn the_count_of_invalid_overrides_locks_no_table_during_the_checks() {
        let overrides = RuleOverrides::default();
        let set = |target: OverrideTarget, factor: &str| {
            let new = Override {
                replacement: Replacement::Factor(factor.parse().unwrap()),
                until: None,
                reason: "a test".into(),
            };
            overrides.set(&target, new, 0).unwrap();
        };
        for (target, factor) in [
            (&["a"][..], "2x"),
            (&["b"], "2x"),
            (&["c"], "3x"),
            (&["a*"], "3x"),
            (&["b*"], "4x"),
            (&["a", "b"], "5x"),
            (&["a*", "b"], "2x"),
        ] {
            set(OverrideTarget::of(target), factor);
        }
        let checked = Mutex::new(Vec::new());
        let invalid = overrides.count_invalid(1, |replacement| {
            assert!(overrides.patterns.try_write().is_ok());
            assert!(overrides.keys.is_unlocked());
            lock(&checked).push(replacement.to_string());
            replacement.to_string() == "3x"
        });
        assert_eq!(invalid, 5);
        // Each replacement of an override for one value is checked once.
        let mut checked = checked.into_inner().unwrap();
        checked.sort_unstable();
        assert_eq!(checked, ["2x", "3x", "4x"]);
    }
}
