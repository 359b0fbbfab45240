//! Postings: the items (rules, allow list entries or alternatives) filed under one entry name. A
//! lookup finds the items of an entry name by the value of the entry.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use foldhash::HashMap;
use ipnet::IpNet;

use crate::rules::pattern::{
    Pattern, PatternKind, cidr::address, glob::Glob, literals::Literals, route,
};

/// The maximum length of a prefix or suffix under which an item is filed. This maximum bounds the
/// number of lookups for a value.
const MAX_AFFIX_BYTES: usize = 64;

/// The maximum length of a literal in the automaton. This maximum limits the number of states of
/// the automaton, and the number of literals that can end at one byte of a value.
const MAX_PART_BYTES: usize = 32;

/// A fact about an entry's value that must be true for an item to apply. The most specific kind
/// comes first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::rules) enum Criterion<'a> {
    /// The value equals this string.
    Value(&'a str),
    /// The value is an address in this network.
    Net(IpNet),
    /// The value begins with this string.
    Prefix(&'a [u8]),
    /// The value ends with this string.
    Suffix(&'a [u8]),
    /// The value contains this string.
    Part(&'a [u8]),
    /// The value, normalised with [`route::form`], meets this criterion.
    Route(Box<Self>),
    /// The entry is present.
    Presence,
}

/// Items, each filed under a [`Criterion`] that the value must meet for the item to apply.
#[derive(Clone, Debug, Default)]
pub(in crate::rules) struct Postings {
    present: Vec<usize>,
    values: HashMap<Box<str>, Vec<usize>>,
    prefixes: Affixes,
    suffixes: Affixes,
    /// The items filed under a string inside the value, until [`Self::finish`] moves them into the
    /// automaton.
    parts: HashMap<Box<[u8]>, Vec<usize>>,
    nets: HashMap<IpNet, Vec<usize>>,
    v4_lengths: Vec<u8>,
    v6_lengths: Vec<u8>,
    /// The items filed under criteria for the value normalised with [`route::form`].
    routes: Option<Box<Self>>,
    /// The automaton that finds all literals in one pass over a value.
    automaton: Option<Automaton>,
}

/// Items filed under prefixes of the value, or items filed under suffixes of the value.
#[derive(Clone, Debug, Default)]
struct Affixes {
    items: HashMap<Box<[u8]>, Vec<usize>>,
    /// The distinct lengths of all affixes, in ascending order.
    lengths: Vec<usize>,
}

/// An Aho-Corasick automaton that searches for many literals at once.
#[derive(Clone, Debug)]
struct Automaton {
    search: AhoCorasick,
    /// The items filed under each literal, in the order of the literals in the automaton.
    items: Box<[Box<[usize]>]>,
}

/// The result of a lookup. The buffers are reused for all requests.
#[derive(Debug, Default)]
pub(in crate::rules) struct Matches {
    /// The positions of the items found by the lookup.
    pub(in crate::rules) items: Vec<usize>,
    /// The literals already found in the current value, with one bit per literal.
    seen: Vec<u64>,
}

impl Postings {
    /// Files `item` under the criterion `on`, which is required for the item to apply.
    pub(in crate::rules) fn file(&mut self, on: &Criterion<'_>, item: usize) {
        let items = match on {
            Criterion::Value(value) => self.values.entry((*value).into()).or_default(),
            Criterion::Net(net) => self.nets.entry(*net).or_default(),
            Criterion::Prefix(prefix) => self.prefixes.items.entry((*prefix).into()).or_default(),
            Criterion::Suffix(suffix) => self.suffixes.items.entry((*suffix).into()).or_default(),
            Criterion::Part(part) => self.parts.entry((*part).into()).or_default(),
            Criterion::Route(on) => return self.routes.get_or_insert_default().file(on, item),
            Criterion::Presence => &mut self.present,
        };
        items.push(item);
    }

    /// Prepares the postings for lookups. If the automaton cannot be built, the items that it would
    /// contain are filed under [`Criterion::Presence`] instead.
    pub(in crate::rules) fn finish(&mut self) {
        let of_family = |is_v4: bool| {
            let nets = self.nets.keys().filter(|net| net.addr().is_ipv4() == is_v4);
            distinct(nets.map(IpNet::prefix_len))
        };
        (self.v4_lengths, self.v6_lengths) = (of_family(true), of_family(false));
        self.prefixes.finish();
        self.suffixes.finish();
        if let Some(routes) = &mut self.routes {
            routes.finish();
        }
        let parts = std::mem::take(&mut self.parts);
        if parts.is_empty() {
            return;
        }
        match Automaton::new(&parts) {
            Some(automaton) => self.automaton = Some(automaton),
            None => self.present.extend(parts.into_values().flatten()),
        }
    }

    /// Appends to `matches` all items that can apply if the entry has this `value`, possibly with
    /// duplicates.
    pub(in crate::rules) fn look_up(&self, value: &str, matches: &mut Matches) {
        let found = &mut matches.items;
        found.extend_from_slice(&self.present);
        if let Some(items) = self.values.get(value) {
            found.extend_from_slice(items);
        }
        let bytes = value.as_bytes();
        for length in &self.prefixes.lengths {
            let Some(prefix) = bytes.get(..*length) else {
                break;
            };
            found.extend_from_slice(self.prefixes.of(prefix));
        }
        for length in &self.suffixes.lengths {
            let Some(start) = bytes.len().checked_sub(*length) else {
                break;
            };
            found.extend_from_slice(self.suffixes.of(&bytes[start..]));
        }
        if !self.nets.is_empty() {
            self.look_up_address(value, found);
        }
        if let Some(automaton) = &self.automaton {
            automaton.look_up(bytes, matches);
        }
        if let Some(routes) = &self.routes {
            routes.look_up(&route::form(value), matches);
        }
    }

    /// Returns the weight of the costliest lookup: the highest total weight of items that a lookup
    /// of one value can find. `weight` returns the weight of an item. The result assumes that a
    /// value contains only one literal. A lookup of a value crafted to contain many literals can
    /// find more items.
    pub(in crate::rules) fn costliest(&self, weight: &dyn Fn(usize) -> usize) -> usize {
        let of = |items: &[usize]| {
            let weights = items.iter().map(|item| weight(*item));
            weights.fold(0, usize::saturating_add)
        };
        let nested = |net: &IpNet| {
            let around = (0..=net.prefix_len()).filter_map(|length| {
                let wider = IpNet::new(net.addr(), length).ok()?.trunc();
                self.nets.get(&wider).map(|items| of(items))
            });
            around.fold(0, usize::saturating_add)
        };
        let costliest = [
            self.values.values().map(|items| of(items)).max(),
            self.prefixes.costliest(|key, length| key.get(..length), of),
            self.suffixes
                .costliest(|key, length| key.get(key.len().checked_sub(length)?..), of),
            self.automaton
                .as_ref()
                .map(|automaton| automaton.costliest(of)),
            self.nets.keys().map(nested).max(),
            self.routes.as_ref().map(|routes| routes.costliest(weight)),
        ];
        let costliest = costliest.into_iter().flatten();
        costliest.fold(of(&self.present), usize::saturating_add)
    }

    fn look_up_address(&self, value: &str, found: &mut Vec<usize>) {
        let Some(address) = address(value) else {
            return;
        };
        let lengths = if address.is_ipv4() {
            &self.v4_lengths
        } else {
            &self.v6_lengths
        };
        for length in lengths {
            let net = IpNet::new(address, *length).map(|net| net.trunc());
            if let Some(items) = net.ok().and_then(|net| self.nets.get(&net)) {
                found.extend_from_slice(items);
            }
        }
    }
}

impl Affixes {
    fn of(&self, affix: &[u8]) -> &[usize] {
        self.items.get(affix).map_or(&[], Vec::as_slice)
    }

    fn finish(&mut self) {
        self.lengths = distinct(self.items.keys().map(|affix| affix.len()));
    }

    /// For each affix, adds up the weights of the items filed under the affix and under the shorter
    /// affixes that it contains. Returns the highest sum.
    fn costliest(
        &self,
        cut: impl Fn(&[u8], usize) -> Option<&[u8]>,
        weight: impl Fn(&[usize]) -> usize,
    ) -> Option<usize> {
        let of = |affix: &[u8]| {
            let shorter = self.lengths.iter().filter_map(|length| cut(affix, *length));
            let weights = shorter.map(|shorter| weight(self.of(shorter)));
            weights.fold(0, usize::saturating_add)
        };
        self.items.keys().map(|affix| of(affix)).max()
    }
}

impl Automaton {
    /// Builds the automaton. Returns `None` if there are more literals than an automaton supports.
    fn new(parts: &HashMap<Box<[u8]>, Vec<usize>>) -> Option<Self> {
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            // A DFA would take a kilobyte of transitions for each byte of a literal.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(parts.keys())
            .ok()?;
        let items = parts.values().map(|items| items.as_slice().into());
        let items = items.collect();
        Some(Self { search, items })
    }

    fn costliest(&self, weight: impl Fn(&[usize]) -> usize) -> usize {
        let weights = self.items.iter().map(|items| weight(items));
        weights.max().unwrap_or(0)
    }

    /// Finds all literals that occur in `value`, and appends their items to `matches`. The items of
    /// a literal are appended only once, even if it occurs several times.
    fn look_up(&self, value: &[u8], matches: &mut Matches) {
        matches.seen.clear();
        matches.seen.resize(self.items.len().div_ceil(64), 0);
        for hit in self.search.find_overlapping_iter(value) {
            let literal = hit.pattern().as_usize();
            let (word, bit) = (literal / 64, 1 << (literal % 64));
            if matches.seen[word] & bit == 0 {
                matches.seen[word] |= bit;
                matches.items.extend_from_slice(&self.items[literal]);
            }
        }
    }
}

fn distinct<T: Ord>(lengths: impl Iterator<Item = T>) -> Vec<T> {
    let mut lengths: Vec<T> = lengths.collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Returns the ways to file a pattern. Each way is a list of criteria, and every matching value
/// meets at least one criterion of each list. Returns an empty list for a pattern that can match an
/// absent entry.
pub(in crate::rules) fn ways_of(pattern: &Pattern) -> Vec<Vec<Criterion<'_>>> {
    match pattern.kind() {
        PatternKind::Exact(value) => vec![vec![Criterion::Value(value)]],
        PatternKind::Glob(glob) => ways_of_glob(glob),
        PatternKind::Regex(expression) => {
            let mut ways: Vec<_> = expression.literals().iter().map(ways_of_literals).collect();
            ways.push(vec![Criterion::Presence]);
            ways
        }
        PatternKind::Route(route) => {
            let of_form = |way: Vec<_>| way.into_iter().map(|on| Criterion::Route(Box::new(on)));
            let ways = ways_of(route.inner()).into_iter();
            ways.map(|way| of_form(way).collect()).collect()
        }
        PatternKind::Cidr(nets) => vec![nets.iter().copied().map(Criterion::Net).collect()],
        PatternKind::Present => vec![vec![Criterion::Presence]],
        PatternKind::Any(any) => ways_of_any(any.exact().map(|value| &**value), any.others()),
        PatternKind::All(patterns) => patterns.iter().flat_map(ways_of).collect(),
        PatternKind::Not(_) => Vec::new(),
    }
}

fn ways_of_glob(glob: &Glob) -> Vec<Vec<Criterion<'_>>> {
    let mut ways = Vec::new();
    if let prefix @ [_, ..] = first(glob.head().as_bytes(), MAX_AFFIX_BYTES) {
        ways.push(vec![Criterion::Prefix(prefix)]);
    }
    if let suffix @ [_, ..] = last(glob.tail().as_bytes(), MAX_AFFIX_BYTES) {
        ways.push(vec![Criterion::Suffix(suffix)]);
    }
    for part in glob.parts() {
        if let part @ [_, ..] = first(part.as_bytes(), MAX_PART_BYTES) {
            ways.push(vec![Criterion::Part(part)]);
        }
    }
    ways.push(vec![Criterion::Presence]);
    ways
}

fn ways_of_literals(literals: &Literals) -> Vec<Criterion<'_>> {
    match literals {
        Literals::Values(values) => values.iter().map(|value| Criterion::Value(value)).collect(),
        Literals::Prefixes(prefixes) => prefixes
            .iter()
            .map(|prefix| Criterion::Prefix(first(prefix, MAX_AFFIX_BYTES)))
            .collect(),
        Literals::Suffixes(suffixes) => suffixes
            .iter()
            .map(|suffix| Criterion::Suffix(last(suffix, MAX_AFFIX_BYTES)))
            .collect(),
        Literals::Parts(parts) => parts
            .iter()
            .map(|part| Criterion::Part(first(part, MAX_PART_BYTES)))
            .collect(),
    }
}

/// Returns a single way, which combines the most specific way of each alternative. Returns no ways
/// if one of the alternatives cannot be filed.
fn ways_of_any<'a>(
    exact: impl Iterator<Item = &'a str>,
    others: &'a [Pattern],
) -> Vec<Vec<Criterion<'a>>> {
    let mut way: Vec<Criterion<'a>> = exact.map(Criterion::Value).collect();
    for pattern in others {
        match most_telling(ways_of(pattern)) {
            Some(on) => way.extend(on),
            None => return Vec::new(),
        }
    }
    vec![way]
}

/// Returns the most specific of `ways`. The specificity of a way is that of the least specific
/// criterion in its list.
pub(in crate::rules) fn most_telling(ways: Vec<Vec<Criterion<'_>>>) -> Option<Vec<Criterion<'_>>> {
    let vagueness = |way: &Vec<Criterion<'_>>| way.iter().map(Criterion::vagueness).max();
    ways.into_iter().min_by_key(vagueness)
}

impl Criterion<'_> {
    /// Returns a sort key for criteria: the less specific a criterion, the higher the key. The kind
    /// is compared first. Within a kind, a shorter string is less specific.
    pub(in crate::rules) fn vagueness(&self) -> (u8, std::cmp::Reverse<usize>) {
        let (kind, length) = match self {
            Self::Value(value) => (0, value.len()),
            Self::Net(net) => (1, usize::from(net.prefix_len())),
            Self::Prefix(prefix) => (2, prefix.len()),
            Self::Suffix(suffix) => (3, suffix.len()),
            Self::Part(part) => (4, part.len()),
            Self::Route(on) => return on.vagueness(),
            Self::Presence => (5, 0),
        };
        (kind, std::cmp::Reverse(length))
    }
}

fn first(bytes: &[u8], most: usize) -> &[u8] {
    bytes.get(..most).unwrap_or(bytes)
}

fn last(bytes: &[u8], most: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(most)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_automaton_takes_a_few_bytes_for_each_byte_of_its_literals() {
        let parts = (0..10_000_usize).map(|at| {
            let text = format!("/{at:0>30}/", at = at * 7_919);
            (text.into_bytes().into_boxed_slice(), vec![at])
        });
        let parts: HashMap<Box<[u8]>, Vec<usize>> = parts.collect();
        let automaton = Automaton::new(&parts).unwrap();
        let bytes: usize = parts.keys().map(|part| part.len()).sum();
        let taken = automaton.search.memory_usage();
        assert!(taken <= 16 * bytes, "{taken} bytes for {bytes}");
    }
}
