//! The blocks of one scope: all rules, or one rule.
//!
//! Blocks form a *form*, which has one hash table, if they have the same entry names and the same
//! kinds of values. The kind of a value is a text, or a network with a certain prefix length. A
//! lookup computes one key for each form, so its time does not depend on the number of blocks:
//!
//! ```text
//! names       form            keys
//! ip       ─▶ IPv4 /32     ─▶ 203.0.113.9, 198.51.100.7, …
//!             IPv4 /24     ─▶ 203.0.113.0, …
//!             IPv6 /32     ─▶ 2001:db8::, …
//! region,  ─▶ text, text   ─▶ (eu, acme), …
//! tenant
//! ```

use std::{collections::HashMap, net::IpAddr};

use foldhash::quality::RandomState;
use ipnet::IpNet;
use smallvec::SmallVec;

use super::{BlockedValue, EntryBlock, EntryBlockTarget, StoredBlock};
use crate::{
    eval::BlockEnd,
    rules::{Request, pattern::canonical_net},
    time::Timestamp,
};

/// The kind of a blocked value: a text, or a network with a prefix length of an IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockedValueKind {
    Text,
    Ipv4(u8),
    Ipv6(u8),
}

impl BlockedValueKind {
    fn of(value: &BlockedValue) -> Self {
        match value {
            BlockedValue::Text(_) => Self::Text,
            BlockedValue::Network(IpNet::V4(net)) => Self::Ipv4(net.prefix_len()),
            BlockedValue::Network(IpNet::V6(net)) => Self::Ipv6(net.prefix_len()),
        }
    }
}

/// The blocks of a [`BlockGroup`] whose values have the same kinds.
#[derive(Debug)]
struct Form {
    kinds: Box<[BlockedValueKind]>,
    blocks: HashMap<Box<[u8]>, StoredBlock, RandomState>,
}

/// The blocks on entries with the same names.
#[derive(Debug)]
struct BlockGroup {
    names: Box<[Box<str>]>,
    forms: Vec<Form>,
}

/// The blocks of all rules, or of one rule.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    groups: Vec<BlockGroup>,
}

/// The value of an entry of a request.
struct RequestValue<'r> {
    text: &'r str,
    /// The value as a network; `None` if it is not an address. A single address has the longest
    /// prefix length.
    net: Option<IpNet>,
}

impl<'r> RequestValue<'r> {
    fn new(text: &'r str) -> Self {
        let net = match text.parse::<IpAddr>() {
            Ok(address) => Some(IpNet::from(address.to_canonical())),
            Err(_) if text.contains('/') => text.parse().ok().map(canonical_net),
            Err(_) => None,
        };
        Self { text, net }
    }
}

/// The key of a block in the hash table of its form: the encoded values of its entries.
type BlockKey = SmallVec<[u8; 64]>;

fn push_text(key: &mut BlockKey, text: &str) {
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    key.extend_from_slice(&length.to_be_bytes());
    key.extend_from_slice(text.as_bytes());
}

fn push_address(key: &mut BlockKey, address: IpAddr) {
    match address {
        IpAddr::V4(address) => key.extend_from_slice(&address.octets()),
        IpAddr::V6(address) => key.extend_from_slice(&address.octets()),
    }
}

/// Returns the key of a target in its form's table.
fn key_of(target: &EntryBlockTarget) -> BlockKey {
    let mut key = BlockKey::new();
    for entry in target.entries() {
        match &entry.value {
            BlockedValue::Text(text) => push_text(&mut key, text),
            BlockedValue::Network(net) => push_address(&mut key, net.network()),
        }
    }
    key
}

impl Form {
    /// Returns the block on a request with these `values`.
    fn find(&self, values: &[RequestValue<'_>], now: Timestamp) -> Option<&StoredBlock> {
        let mut key = BlockKey::new();
        for (kind, value) in self.kinds.iter().zip(values) {
            match (*kind, value.net) {
                (BlockedValueKind::Text, _) => push_text(&mut key, value.text),
                (BlockedValueKind::Ipv4(length), Some(IpNet::V4(net)))
                    if net.prefix_len() >= length =>
                {
                    let net = IpNet::new(net.addr().into(), length).ok()?;
                    push_address(&mut key, net.network());
                }
                (BlockedValueKind::Ipv6(length), Some(IpNet::V6(net)))
                    if net.prefix_len() >= length =>
                {
                    let net = IpNet::new(net.addr().into(), length).ok()?;
                    push_address(&mut key, net.network());
                }
                (BlockedValueKind::Ipv4(_) | BlockedValueKind::Ipv6(_), _) => return None,
            }
        }
        let found = self.blocks.get(&*key);
        found.filter(|stored| stored.block.is_unexpired(now))
    }
}

impl BlockGroup {
    fn is_of(&self, target: &EntryBlockTarget) -> bool {
        let names = target.entries().iter().map(|entry| &entry.name);
        self.names.iter().eq(names)
    }

    /// Returns the block on `request` that ends last.
    fn find(&self, request: &Request<'_>, now: Timestamp) -> Option<&StoredBlock> {
        let mut values: SmallVec<[RequestValue<'_>; 2]> = SmallVec::new();
        for name in &self.names {
            values.push(RequestValue::new(request.entry(name)?));
        }
        let found = self.forms.iter().filter_map(|form| form.find(&values, now));
        found.max_by_key(|stored| stored.end())
    }
}

impl BlockTable {
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the number of forms.
    pub(super) fn forms(&self) -> usize {
        self.groups.iter().map(|group| group.forms.len()).sum()
    }

    /// Returns whether there are blocks with the same form as `target`.
    pub(super) fn has_form(&self, target: &EntryBlockTarget) -> bool {
        self.form(target).is_some()
    }

    fn form(&self, target: &EntryBlockTarget) -> Option<&Form> {
        let group = self.groups.iter().find(|group| group.is_of(target))?;
        let mut forms = group.forms.iter();
        forms.find(|form| form.kinds.iter().copied().eq(kinds(target)))
    }

    pub(super) fn get(&self, target: &EntryBlockTarget) -> Option<&StoredBlock> {
        self.form(target)?.blocks.get(&*key_of(target))
    }

    /// Returns the end of the block on `request` that ends last.
    pub(super) fn end(&self, request: &Request<'_>, now: Timestamp) -> Option<BlockEnd> {
        let mut found = None;
        for group in &self.groups {
            found = found.max(group.find(request, now).map(StoredBlock::end));
        }
        found
    }

    /// Returns the block on `request` that ends last.
    pub(super) fn find(&self, request: &Request<'_>, now: Timestamp) -> Option<&StoredBlock> {
        let found = self.groups.iter();
        let found = found.filter_map(|group| group.find(request, now));
        found.max_by_key(|stored| stored.end())
    }

    /// Sets a block, and returns the block that it replaces.
    pub(super) fn set(&mut self, stored: StoredBlock) -> Option<EntryBlock> {
        let target = &stored.target;
        let at = self.groups.iter().position(|group| group.is_of(target));
        let at = at.unwrap_or_else(|| {
            let names = target.entries().iter().map(|entry| entry.name.clone());
            self.groups.push(BlockGroup {
                names: names.collect(),
                forms: Vec::new(),
            });
            self.groups.len() - 1
        });
        // `at` is the index of an existing group.
        let forms = &mut self.groups[at].forms;
        let is_form = |form: &Form| form.kinds.iter().copied().eq(kinds(target));
        let form = forms.iter().position(is_form).unwrap_or_else(|| {
            forms.push(Form {
                kinds: kinds(target).collect(),
                blocks: HashMap::default(),
            });
            forms.len() - 1
        });
        let key = Box::from(&*key_of(target));
        // `form` is the index of an existing form.
        let replaced = forms[form].blocks.insert(key, stored);
        replaced.map(|replaced| replaced.block)
    }

    pub(super) fn remove(&mut self, target: &EntryBlockTarget) -> Option<EntryBlock> {
        let group = self.groups.iter_mut().find(|group| group.is_of(target))?;
        let mut forms = group.forms.iter_mut();
        let form = forms.find(|form| form.kinds.iter().copied().eq(kinds(target)))?;
        let removed = form.blocks.remove(&*key_of(target))?;
        self.remove_empty();
        Some(removed.block)
    }

    /// Removes the blocks for which `keep` returns false, and returns their number.
    pub(super) fn retain(&mut self, keep: impl Fn(&StoredBlock) -> bool) -> usize {
        let mut removed = 0;
        for form in self.groups.iter_mut().flat_map(|group| &mut group.forms) {
            let before = form.blocks.len();
            form.blocks.retain(|_, stored| keep(stored));
            removed += before - form.blocks.len();
        }
        self.remove_empty();
        removed
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &StoredBlock> {
        let forms = self.groups.iter().flat_map(|group| &group.forms);
        forms.flat_map(|form| form.blocks.values())
    }

    /// Removes forms without blocks, so that lookups do not compute keys for them.
    fn remove_empty(&mut self) {
        for group in &mut self.groups {
            group.forms.retain(|form| !form.blocks.is_empty());
        }
        self.groups.retain(|group| !group.forms.is_empty());
    }
}

fn kinds(target: &EntryBlockTarget) -> impl Iterator<Item = BlockedValueKind> {
    target
        .entries()
        .iter()
        .map(|entry| BlockedValueKind::of(&entry.value))
}
