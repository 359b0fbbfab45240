//! A rule's overrides with patterns, indexed by their patterns.

use super::{
    OverrideError,
    stored::{Generation, StoredOverride},
};
use crate::{
    limit::bounds,
    rules::{
        LookupBuffers, Pattern, RuleError,
        pattern::index::{Index, Item},
    },
    time::Timestamp,
};

/// The entry names that the index uses for the values of a key, by their position in the key.
const POSITIONS: [&str; bounds::MAX_KEY_ENTRIES] = [
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
];

/// The overrides with patterns, longest pattern first.
#[derive(Debug, Default)]
pub(super) struct PatternOverrides {
    items: Vec<PatternOverride>,
    index: Index,
}

#[derive(Debug)]
struct PatternOverride {
    pattern: KeyPattern,
    stored: StoredOverride,
    generation: Generation,
}

/// One pattern for each value of a key.
#[derive(Debug)]
struct KeyPattern {
    texts: Vec<Box<str>>,
    patterns: Vec<Pattern>,
}

impl KeyPattern {
    fn parse(texts: &[Box<str>]) -> Result<Self, RuleError> {
        Ok(Self {
            texts: texts.to_vec(),
            patterns: parse(texts.iter().map(|text| &**text))?,
        })
    }

    /// Returns the sort key of the pattern: first the number of characters other than `*`, and then
    /// the text, so that the order is the same on all servers.
    fn rank(&self) -> (usize, &[Box<str>]) {
        let literal = |text: &str| text.chars().filter(|char| *char != '*').count();
        (
            self.texts.iter().map(|text| literal(text)).sum(),
            &self.texts,
        )
    }

    /// Returns whether the pattern matches the key with these `values`. Counts the evaluations in
    /// `buffers`.
    fn matches(&self, values: &[&str], buffers: &mut LookupBuffers) -> bool {
        self.patterns.len() == values.len()
            && self
                .patterns
                .iter()
                .zip(values)
                .all(|(pattern, value)| pattern.evaluate(Some(value), &mut buffers.work))
    }

    fn item(&self) -> Item<'_> {
        let weight = self.patterns.iter().map(Pattern::weight).sum::<usize>();
        Item::new(POSITIONS.into_iter().zip(&self.patterns), weight.max(1))
    }
}

/// Parses the patterns of a key.
pub(super) fn parse<'t>(texts: impl Iterator<Item = &'t str>) -> Result<Vec<Pattern>, RuleError> {
    let parse = |text| Pattern::text(text).map_err(|error| RuleError::new("key", error.problem));
    texts.map(parse).collect()
}

impl PatternOverrides {
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn get(&self, texts: &[Box<str>]) -> Option<&StoredOverride> {
        let item = self.items.iter().find(|item| item.pattern.texts == texts);
        item.map(|item| &item.stored)
    }

    /// Returns the override that applies to the key with these `values` at `now`, which is the
    /// override with the longest pattern. Also returns the patterns of this override.
    pub(super) fn find(
        &self,
        values: &[&str],
        now: Timestamp,
        buffers: &mut LookupBuffers,
    ) -> Option<(&[Box<str>], &StoredOverride)> {
        let mut entries = [("", ""); bounds::MAX_KEY_ENTRIES];
        let named = POSITIONS.into_iter().zip(values);
        for (entry, (position, value)) in entries.iter_mut().zip(named) {
            *entry = (position, value);
        }
        let mut found = std::mem::take(&mut buffers.allowed);
        self.index
            .look_up(&entries[..values.len().min(entries.len())], &mut found);
        buffers.work.expect(found.items.len());
        // The items are sorted by rank, so the first match has the longest pattern.
        let mut candidates = found.items.iter().map(|at| &self.items[*at]);
        let item = candidates
            .find(|item| item.stored.is_unexpired(now) && item.pattern.matches(values, buffers))
            .map(|item| (&item.pattern.texts[..], &item.stored));
        buffers.allowed = found;
        item
    }

    /// Sets the override for the pattern `texts`, and returns the override that it replaces.
    pub(super) fn set(
        &mut self,
        texts: &[Box<str>],
        stored: StoredOverride,
        generation: Generation,
    ) -> Result<Option<StoredOverride>, OverrideError> {
        if let Some(item) = self
            .items
            .iter_mut()
            .find(|item| item.pattern.texts == texts)
        {
            item.generation = generation;
            return Ok(Some(std::mem::replace(&mut item.stored, stored)));
        }
        let pattern = KeyPattern::parse(texts)?;
        self.check_index_with(&pattern)?;
        let ranks_before = |other: &PatternOverride| other.pattern.rank() > pattern.rank();
        let at = self.items.partition_point(ranks_before);
        let new = PatternOverride {
            pattern,
            stored,
            generation,
        };
        self.items.insert(at, new);
        // The index contains positions in the sorted list, so rebuild the index.
        self.index = self.build_index();
        Ok(None)
    }

    /// Checks whether there is room for the new pattern `texts`.
    pub(super) fn check_room(&self, texts: &[Box<str>]) -> Result<(), OverrideError> {
        self.check_index_with(&KeyPattern::parse(texts)?)
    }

    /// Returns an error if there is no room for `new`, because there are too many patterns or an
    /// ordinary key would need too many evaluations.
    fn check_index_with(&self, new: &KeyPattern) -> Result<(), OverrideError> {
        if self.items.len() >= bounds::MAX_OVERRIDE_PATTERNS {
            return Err(OverrideError::TooManyPatterns);
        }
        let known = self.items.iter().map(|item| &item.pattern);
        let index = Index::new(known.chain([new]).map(KeyPattern::item));
        let checked = index.costliest().check();
        Ok(checked.map_err(|error| RuleError::new("key", error.problem))?)
    }

    pub(super) fn remove(&mut self, texts: &[Box<str>]) -> Option<StoredOverride> {
        let at = self
            .items
            .iter()
            .position(|item| item.pattern.texts == texts)?;
        let removed = self.items.remove(at);
        self.index = self.build_index();
        Some(removed.stored)
    }

    /// Removes the overrides for which `keep` returns false, and returns their number.
    pub(super) fn retain(&mut self, keep: impl Fn(&StoredOverride, Generation) -> bool) -> usize {
        let before = self.items.len();
        self.items
            .retain(|item| keep(&item.stored, item.generation));
        let removed = before - self.items.len();
        if removed > 0 {
            self.index = self.build_index();
        }
        removed
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&[Box<str>], &StoredOverride)> {
        self.items
            .iter()
            .map(|item| (&item.pattern.texts[..], &item.stored))
    }

    fn build_index(&self) -> Index {
        Index::new(self.items.iter().map(|item| item.pattern.item()))
    }
}
