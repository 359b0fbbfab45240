//! The index: which of many conditions can hold for a request, without looking at each.
//!
//! Every item (a rule, a line of an allow list) is filed under one thing that must be true of a request
//! for its conditions to hold: a value that an entry has, a literal that a value begins with, a network
//! that an address is in, an entry that is present. A request is looked up by each of its entries, and
//! only the items found are evaluated. Of the ways to file an item, the one is taken that the fewest
//! others share, so that ten thousand rules with one path and ten thousand customers are filed by customer.
//!
//! What has no such way (no conditions, nothing but negations) is evaluated for every request.
//!
//! The maps hold what the operator wrote, so a fast hash will do: no client can fill them with collisions.

use foldhash::HashMap;
use ipnet::IpNet;

use super::{Condition, Pattern, Request, nets::address, pattern::Kind};

/// The longest prefix by which a glob is filed. It bounds how many prefixes of a value are looked up.
const MAX_PREFIX_BYTES: usize = 64;

/// Items by what must be true of a request for them to matter.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    by_entry: HashMap<Box<str>, Postings>,
    residual: Vec<usize>,
}

/// What must be true of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Hook<'a> {
    entry: &'a str,
    on: On<'a>,
}

/// What must be true of an entry, the most telling first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum On<'a> {
    Value(&'a str),
    Net(IpNet),
    Prefix(&'a [u8]),
    Presence,
}

/// One way to file an item: under all of these hooks, one of which is true whenever the item matters.
type Filing<'a> = Vec<Hook<'a>>;

/// The items filed under one entry.
#[derive(Clone, Debug, Default)]
struct Postings {
    present: Vec<usize>,
    values: HashMap<Box<str>, Vec<usize>>,
    prefixes: HashMap<Box<[u8]>, Vec<usize>>,
    prefix_lengths: Vec<usize>,
    nets: HashMap<IpNet, Vec<usize>>,
    v4_lengths: Vec<u8>,
    v6_lengths: Vec<u8>,
}

impl Index {
    /// Files items by number: the conditions of each, and the entries without which it does not matter.
    pub(super) fn new<'a, C, K>(items: impl Iterator<Item = (C, K)>) -> Self
    where
        C: Iterator<Item = &'a Condition>,
        K: Iterator<Item = &'a str>,
    {
        let filings: Vec<Vec<Filing<'a>>> = items
            .map(|(conditions, needed)| {
                let present = |entry| {
                    vec![Hook {
                        entry,
                        on: On::Presence,
                    }]
                };
                conditions
                    .flat_map(ways_to_file)
                    .chain(needed.map(present))
                    .collect()
            })
            .collect();
        let mut crowds: HashMap<&Hook<'a>, usize> = HashMap::default();
        for hook in filings.iter().flatten().flatten() {
            *crowds.entry(hook).or_default() += 1;
        }
        let mut index = Self::default();
        for (item, ways) in filings.iter().enumerate() {
            match ways.iter().min_by_key(|filing| crowd(filing, &crowds)) {
                Some(filing) => filing.iter().for_each(|hook| index.file(hook, item)),
                None => index.residual.push(item),
            }
        }
        index.by_entry.values_mut().for_each(Postings::sort_lengths);
        index
    }

    /// Puts the numbers of all items that can matter for `request` into `found`, in order, each once.
    pub(super) fn look_up(&self, request: &Request<'_>, found: &mut Vec<usize>) {
        found.clear();
        found.extend_from_slice(&self.residual);
        if !self.by_entry.is_empty() {
            for (name, value) in request.entries() {
                if let Some(postings) = self.by_entry.get(*name) {
                    postings.look_up(value, found);
                }
            }
        }
        found.sort_unstable();
        found.dedup();
    }

    fn file(&mut self, hook: &Hook<'_>, item: usize) {
        let postings = self.by_entry.entry(hook.entry.into()).or_default();
        let items = match &hook.on {
            On::Value(value) => postings.values.entry((*value).into()).or_default(),
            On::Net(net) => postings.nets.entry(*net).or_default(),
            On::Prefix(prefix) => postings.prefixes.entry((*prefix).into()).or_default(),
            On::Presence => &mut postings.present,
        };
        items.push(item);
    }
}

impl Postings {
    fn look_up(&self, value: &str, found: &mut Vec<usize>) {
        found.extend_from_slice(&self.present);
        if let Some(items) = self.values.get(value) {
            found.extend_from_slice(items);
        }
        for length in &self.prefix_lengths {
            let Some(prefix) = value.as_bytes().get(..*length) else {
                break;
            };
            if let Some(items) = self.prefixes.get(prefix) {
                found.extend_from_slice(items);
            }
        }
        if !self.nets.is_empty() {
            self.look_up_address(value, found);
        }
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

    fn sort_lengths(&mut self) {
        let of_family = |is_v4: bool| {
            let nets = self.nets.keys().filter(|net| net.addr().is_ipv4() == is_v4);
            distinct(nets.map(IpNet::prefix_len))
        };
        (self.v4_lengths, self.v6_lengths) = (of_family(true), of_family(false));
        self.prefix_lengths = distinct(self.prefixes.keys().map(|prefix| prefix.len()));
    }
}

fn distinct<T: Ord>(lengths: impl Iterator<Item = T>) -> Vec<T> {
    let mut lengths: Vec<T> = lengths.collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// How crowded a filing is: by the most items that one of its hooks would bring up, then by how telling
/// it is, then by how many hooks it takes.
fn crowd<'a, 'f>(
    filing: &'f Filing<'a>,
    crowds: &HashMap<&Hook<'a>, usize>,
) -> (usize, Option<&'f On<'a>>, usize) {
    let largest = filing.iter().filter_map(|hook| crowds.get(hook)).max();
    let vaguest = filing.iter().map(|hook| &hook.on).max();
    (largest.copied().unwrap_or(0), vaguest, filing.len())
}

fn ways_to_file(condition: &Condition) -> Vec<Filing<'_>> {
    let ways = ways_of(condition.pattern()).into_iter();
    let hook = |on| Hook {
        entry: condition.entry(),
        on,
    };
    ways.map(|way| way.into_iter().map(hook).collect())
        .collect()
}

/// The ways to file a pattern, each a list of things of which one is true of every value that matches.
fn ways_of(pattern: &Pattern) -> Vec<Vec<On<'_>>> {
    match pattern.kind() {
        Kind::Exact(value) => vec![vec![On::Value(value)]],
        Kind::Glob(glob) => {
            let head = glob.head().as_bytes();
            match head.get(..MAX_PREFIX_BYTES).unwrap_or(head) {
                [] => vec![vec![On::Presence]],
                prefix => vec![vec![On::Prefix(prefix)]],
            }
        }
        Kind::Nets(nets) => vec![nets.iter().copied().map(On::Net).collect()],
        Kind::Regex(_) | Kind::Present => vec![vec![On::Presence]],
        Kind::Any(exact, others) => ways_of_any(exact.iter().map(|value| &**value), others),
        Kind::All(patterns) => patterns.iter().flat_map(ways_of).collect(),
        Kind::Not(_) => Vec::new(),
    }
}

/// Alternatives are filed only if each of them can be.
fn ways_of_any<'a>(
    exact: impl Iterator<Item = &'a str>,
    others: &'a [Pattern],
) -> Vec<Vec<On<'a>>> {
    let mut way: Vec<On<'a>> = exact.map(On::Value).collect();
    for pattern in others {
        match ways_of(pattern).into_iter().next() {
            Some(hooks) => way.extend(hooks),
            None => return Vec::new(),
        }
    }
    vec![way]
}
