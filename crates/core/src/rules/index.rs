//! The index: which of many conditions can hold for a request, without looking at each.
//!
//! Every item (a rule, a line of an allow list, an alternative of a long list) is filed under one thing
//! that must be true of a request for its conditions to hold: a value that an entry has, text that a
//! value begins with, ends with or contains, a network that an address is in, an entry that is present.
//! A request is looked up by each of its entries, and only the items found are evaluated. Of the ways to
//! file an item, the one is taken that the fewest others share, so that ten thousand rules with one path
//! and ten thousand customers are filed by customer.
//!
//! What has no such way (no conditions, nothing but negations) is evaluated for every request.
//!
//! The maps hold what the operator wrote, so a fast hash will do: no client can fill them with collisions.
//!
//! Memory: each item is filed once, under at most 64 bytes for each of its alternatives, in a hash map or,
//! where it is found by text inside a value, in an automaton that takes about 12 bytes for each of at most
//! 32 bytes of text. A test measures it.

use foldhash::HashMap;

use super::{
    Condition, Pattern, Request,
    postings::{Finds, On, Postings, ways_of},
};
use crate::bounds;

/// Items by what must be true of a request for them to matter.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    by_entry: HashMap<Box<str>, Postings>,
    residual: Vec<usize>,
    heaviest: Heaviest,
}

/// The most that one look-up can bring up, but for values that were made to contain many literals.
#[derive(Clone, Debug, Default)]
pub(super) struct Heaviest {
    /// What the items weigh together.
    pub(super) weight: usize,
    /// The entry by which most of it is found; `None` if most of it is evaluated for every request.
    pub(super) entry: Option<Box<str>>,
}

impl Heaviest {
    /// What two look-ups bring up together.
    pub(super) fn with(&self, other: &Self) -> Self {
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
}

/// What is filed.
pub(super) struct Item<'a> {
    ways: Vec<Filing<'a>>,
    /// How many evaluations it takes at most.
    weight: usize,
}

/// What must be true of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Hook<'a> {
    entry: &'a str,
    on: On<'a>,
}

/// One way to file an item: under all of these hooks, one of which is true whenever the item matters.
type Filing<'a> = Vec<Hook<'a>>;

impl<'a> Item<'a> {
    /// An item that matters if all of `conditions` hold.
    pub(super) fn new(conditions: impl Iterator<Item = &'a Condition>, weight: usize) -> Self {
        let ways = conditions
            .flat_map(|condition| ways_at(condition.entry(), condition.pattern()))
            .collect();
        Self { ways, weight }
    }

    /// An alternative of a list, of which it is looked up by the value alone.
    pub(super) fn alternative(pattern: &'a Pattern) -> Self {
        Self {
            ways: ways_at(ANY_ENTRY, pattern),
            weight: pattern.weight(),
        }
    }

    /// It matters only if the request has all of `entries`, too.
    pub(super) fn needing(mut self, entries: impl Iterator<Item = &'a str>) -> Self {
        let present = |entry| {
            vec![Hook {
                entry,
                on: On::Presence,
            }]
        };
        self.ways.extend(entries.map(present));
        self
    }
}

/// The entry under which alternatives of a list are filed.
const ANY_ENTRY: &str = "";

fn ways_at<'a>(entry: &'a str, pattern: &'a Pattern) -> Vec<Filing<'a>> {
    let hook = |on| Hook { entry, on };
    let ways = ways_of(pattern).into_iter();
    ways.map(|way| way.into_iter().map(hook).collect())
        .collect()
}

impl Index {
    /// Files items by number.
    pub(super) fn new<'a>(items: impl Iterator<Item = Item<'a>>) -> Self {
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
        index.heaviest = index.heaviest_of(|at| items[at].weight);
        index
    }

    /// Puts the numbers of all items that can matter for `request` into `finds`, in order, each once.
    pub(super) fn look_up(&self, request: &Request<'_>, finds: &mut Finds) {
        finds.items.clear();
        finds.items.extend_from_slice(&self.residual);
        if !self.by_entry.is_empty() {
            for (name, value) in request.entries() {
                if let Some(postings) = self.by_entry.get(*name) {
                    postings.look_up(value, finds);
                }
            }
        }
        finds.items.sort_unstable();
        finds.items.dedup();
    }

    /// The same for alternatives of a list and the value of an entry, `None` if it is absent.
    pub(super) fn look_up_value(&self, value: Option<&str>, finds: &mut Finds) {
        finds.items.clear();
        finds.items.extend_from_slice(&self.residual);
        if let Some(value) = value
            && let Some(postings) = self.by_entry.get(ANY_ENTRY)
        {
            postings.look_up(value, finds);
        }
        finds.items.sort_unstable();
        finds.items.dedup();
    }

    /// The most that one look-up can bring up.
    pub(super) fn heaviest(&self) -> &Heaviest {
        &self.heaviest
    }

    fn heaviest_of(&self, weight: impl Fn(usize) -> usize) -> Heaviest {
        let residual = self.residual.iter().map(|at| weight(*at));
        let residual = residual.fold(0, usize::saturating_add);
        let entries = self.by_entry.iter();
        let mut entries: Vec<_> = entries
            .map(|(entry, postings)| (postings.heaviest(&weight), entry))
            .collect();
        entries.sort_unstable_by(|a, b| b.cmp(a));
        // No request has more entries than these.
        entries.truncate(bounds::MAX_ENTRIES);
        let first = entries.first().filter(|(weight, _)| *weight > residual);
        let weights = entries.iter().map(|(weight, _)| *weight);
        Heaviest {
            weight: weights.fold(residual, usize::saturating_add),
            entry: first.map(|(_, entry)| (*entry).clone()),
        }
    }

    fn file(&mut self, hook: &Hook<'_>, item: usize) {
        let postings = self.by_entry.entry(hook.entry.into()).or_default();
        postings.file(&hook.on, item);
    }
}

/// How crowded a filing is: by the most items that one of its hooks would bring up, then by how telling
/// it is, then by how many hooks it takes.
fn crowd<'a>(filing: &Filing<'a>, crowds: &HashMap<&Hook<'a>, usize>) -> impl Ord + use<> {
    let largest = filing.iter().filter_map(|hook| crowds.get(hook)).max();
    let vaguest = filing.iter().map(|hook| hook.on.vagueness()).max();
    (largest.copied().unwrap_or(0), vaguest, filing.len())
}
