//! The index: finds the items whose conditions can hold for a request without evaluating all items.
//!
//! An item is a rule, an allow list entry or an alternative in a long list of patterns. Each item
//! is filed under a requirement that a request must meet for the item's conditions to hold.
//! Examples of requirements: a value equals, begins with, ends with or contains a string; an
//! address is in a network; an entry is present. A lookup searches the index once for each entry of
//! the request, and only the items found are evaluated. If an item has several requirements, the
//! index uses the requirement shared with the fewest other items. For example, ten thousand rules
//! with the same path and different customers are filed by customer.
//!
//! An item without conditions, or with only negated conditions, cannot be filed, so it is evaluated
//! for every request.
//!
//! The index's hash maps contain only values from the rules file. Therefore, clients cannot cause
//! collisions, and a fast hash function is safe.
//!
//! Each item is filed once, so the index needs little memory. A hash map takes at most 64 bytes per
//! alternative of an item. Items that are found by a string inside a value are in an Aho-Corasick
//! automaton. The automaton uses at most the first 32 bytes of each string, and takes about 12
//! bytes of memory for each of these bytes. A test measures the memory.

mod postings;

use foldhash::HashMap;

pub(in crate::rules) use self::postings::Matches;

use self::postings::{Criterion, Postings, ways_of};
use super::Pattern;
use crate::{limit::bounds, rules::RuleError};

/// An index of items, each filed under a fact required by its conditions.
#[derive(Clone, Debug, Default)]
pub(in crate::rules) struct Index {
    by_entry: HashMap<Box<str>, Postings>,
    residual: Vec<usize>,
    costliest: CostliestLookup,
}

/// The lookup that leads to the most pattern evaluations. Values crafted to contain many literals
/// can lead to more evaluations.
#[derive(Clone, Debug, Default)]
pub(in crate::rules) struct CostliestLookup {
    /// The total weight of the items found by the lookup. An item's weight is the maximum number of
    /// its pattern evaluations.
    pub(in crate::rules) weight: usize,
    /// The entry whose items have most of the total weight; `None` if the items that are evaluated
    /// for every request have most of the total weight.
    pub(in crate::rules) entry: Option<Box<str>>,
}

impl CostliestLookup {
    /// Returns the combined weight of two lookups.
    pub(in crate::rules) fn with(&self, other: &Self) -> Self {
        let larger = if self.weight >= other.weight {
            self
        } else {
            other
        };
        Self {
            weight: self.weight.saturating_add(other.weight),
            entry: larger.entry.clone(),
        }
    }

    /// Returns an error if the lookup leads to more than [`bounds::MAX_EVALUATIONS`] pattern
    /// evaluations.
    pub(in crate::rules) fn check(&self) -> Result<(), RuleError> {
        let most = bounds::MAX_EVALUATIONS;
        if self.weight <= most {
            return Ok(());
        }
        let whose = match &self.entry {
            Some(entry) => format!("most of these rules match on \"{entry}\""),
            None => "most of these rules have no condition that the index can use".to_owned(),
        };
        let problem = format!(
            "one request could need {} pattern evaluations, which exceeds the maximum of {most}: too many rules \
             cannot be found by an index; {whose}: give them an exact value, or a pattern with \
             literal text outside its wildcards",
            self.weight
        );
        Err(RuleError::new("rules", problem))
    }
}

/// An item to be filed in an index.
pub(in crate::rules) struct Item<'a> {
    ways: Vec<Filing<'a>>,
    /// The maximum number of pattern evaluations of the item.
    weight: usize,
}

/// A fact about a request under which items are filed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Hook<'a> {
    entry: &'a str,
    on: Criterion<'a>,
}

/// One way to file an item: the requirements (hooks) under which the index finds the item. Whenever
/// the item applies, at least one of these requirements is met.
type Filing<'a> = Vec<Hook<'a>>;

impl<'a> Item<'a> {
    /// Creates an item that applies if all of `conditions` hold. A condition consists of an entry
    /// name and its pattern.
    pub(in crate::rules) fn new(
        conditions: impl Iterator<Item = (&'a str, &'a Pattern)>,
        weight: usize,
    ) -> Self {
        let ways = conditions
            .flat_map(|(entry, pattern)| ways_at(entry, pattern))
            .collect();
        Self { ways, weight }
    }

    /// Creates an item for an alternative in a list of patterns. The index of a list has no entry
    /// names, because all alternatives are matched against the same value.
    pub(in crate::rules) fn alternative(pattern: &'a Pattern) -> Self {
        Self {
            ways: ways_at(ANY_ENTRY, pattern),
            weight: pattern.weight(),
        }
    }

    /// Restricts the item to requests with all of `entries`.
    pub(in crate::rules) fn needing(mut self, entries: impl Iterator<Item = &'a str>) -> Self {
        let present = |entry| {
            vec![Hook {
                entry,
                on: Criterion::Presence,
            }]
        };
        self.ways.extend(entries.map(present));
        self
    }
}

/// The placeholder entry name under which the alternatives of a list are filed.
const ANY_ENTRY: &str = "";

fn ways_at<'a>(entry: &'a str, pattern: &'a Pattern) -> Vec<Filing<'a>> {
    let hook = |on| Hook { entry, on };
    let ways = ways_of(pattern).into_iter();
    ways.map(|way| way.into_iter().map(hook).collect())
        .collect()
}

impl Index {
    /// Builds an index of `items`. A lookup returns the positions of items in `items`.
    pub(in crate::rules) fn new<'a>(items: impl Iterator<Item = Item<'a>>) -> Self {
        let items: Vec<Item<'a>> = items.collect();
        let mut crowds: HashMap<&Hook<'a>, usize> = HashMap::default();
        for hook in items.iter().flat_map(|item| &item.ways).flatten() {
            *crowds.entry(hook).or_default() += 1;
        }
        let mut index = Self::default();
        for (at, item) in items.iter().enumerate() {
            match item.ways.iter().min_by_key(|filing| crowd(filing, &crowds)) {
                Some(filing) => filing.iter().for_each(|hook| index.file(hook, at)),
                None => index.residual.push(at),
            }
        }
        index.by_entry.values_mut().for_each(Postings::finish);
        index.costliest = index.costliest_of(|at| items[at].weight);
        index
    }

    /// Writes the positions of all items that can apply to a request with `entries` to `matches`,
    /// sorted and without duplicates.
    pub(in crate::rules) fn look_up(&self, entries: &[(&str, &str)], matches: &mut Matches) {
        matches.items.clear();
        matches.items.extend_from_slice(&self.residual);
        if !self.by_entry.is_empty() {
            for (name, value) in entries {
                if let Some(postings) = self.by_entry.get(*name) {
                    postings.look_up(value, matches);
                }
            }
        }
        matches.items.sort_unstable();
        matches.items.dedup();
    }

    /// Writes the positions of all alternatives of a list that can match `value` to `matches`,
    /// sorted and without duplicates. `value` is `None` if the entry is absent.
    pub(in crate::rules) fn look_up_value(&self, value: Option<&str>, matches: &mut Matches) {
        matches.items.clear();
        matches.items.extend_from_slice(&self.residual);
        if let Some(value) = value
            && let Some(postings) = self.by_entry.get(ANY_ENTRY)
        {
            postings.look_up(value, matches);
        }
        matches.items.sort_unstable();
        matches.items.dedup();
    }

    /// Returns the lookup that leads to the most pattern evaluations.
    pub(in crate::rules) fn costliest(&self) -> &CostliestLookup {
        &self.costliest
    }

    fn costliest_of(&self, weight: impl Fn(usize) -> usize) -> CostliestLookup {
        let residual = self.residual.iter().map(|at| weight(*at));
        let residual = residual.fold(0, usize::saturating_add);
        let entries = self.by_entry.iter();
        let mut entries: Vec<_> = entries
            .map(|(entry, postings)| (postings.costliest(&weight), entry))
            .collect();
        entries.sort_unstable_by(|a, b| b.cmp(a));
        // A request has at most `MAX_ENTRIES` entries.
        entries.truncate(bounds::MAX_ENTRIES);
        let first = entries.first().filter(|(weight, _)| *weight > residual);
        let weights = entries.iter().map(|(weight, _)| *weight);
        CostliestLookup {
            weight: weights.fold(residual, usize::saturating_add),
            entry: first.map(|(_, entry)| (*entry).clone()),
        }
    }

    fn file(&mut self, hook: &Hook<'_>, item: usize) {
        let postings = self.by_entry.entry(hook.entry.into()).or_default();
        postings.file(&hook.on, item);
    }
}

/// Returns the sort key for one way to file an item; the index uses the way with the smallest sort
/// key. The parts of the sort key are, in this order: the largest number of items that share a
/// hook; the least specific hook; the number of hooks.
fn crowd<'a>(filing: &Filing<'a>, crowds: &HashMap<&Hook<'a>, usize>) -> impl Ord + use<> {
    let largest = filing.iter().filter_map(|hook| crowds.get(hook)).max();
    let vaguest = filing.iter().map(|hook| hook.on.vagueness()).max();
    (largest.copied().unwrap_or(0), vaguest, filing.len())
}
