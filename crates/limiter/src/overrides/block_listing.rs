//! Lists blocks by entries page by page.

use std::net::IpAddr;

use tidegate_core::{BlockedValue, EntryBlock, EntryBlockTarget, RuleSet};

use crate::{
    ServerLimiter,
    override_state::{StoredId, id},
};

/// A filter that selects the blocks by entries to list.
#[derive(Clone, Copy, Debug, Default)]
pub struct EntryBlockFilter<'a> {
    /// A string that must occur in a value or in the reason. If the string is an address, the
    /// listing also contains the blocks of networks that contain the address.
    pub search: Option<&'a str>,
    /// The position at which the page begins: [`EntryBlockPage::next`] of the previous page.
    pub after: Option<&'a str>,
    /// The maximum number of blocks on the page.
    pub most: usize,
}

/// A page of blocks by entries, sorted by target.
#[derive(Debug, Default)]
pub struct EntryBlockPage {
    /// The blocks with their targets.
    pub blocks: Vec<(EntryBlockTarget, EntryBlock)>,
    /// The position of the next page; `None` after the last page.
    pub next: Option<String>,
    /// The number of blocks that the filter selects, on all pages.
    pub count: usize,
}

impl ServerLimiter {
    /// Returns a page of the active blocks by entries. Returns `None` if
    /// [`EntryBlockFilter::after`] is not a position.
    #[must_use]
    pub fn list_entry_blocks(&self, filter: EntryBlockFilter<'_>) -> Option<EntryBlockPage> {
        let after = match filter.after {
            Some(position) => Some(parse_position(position)?),
            None => None,
        };
        let now = self.now();
        let search = filter.search.map(Search::new);
        let mut count = 0;
        let select = |target: &EntryBlockTarget, block: &EntryBlock| {
            let is_found = block.is_unexpired(now)
                && search
                    .as_ref()
                    .is_none_or(|search| search.finds(target, block));
            count += usize::from(is_found);
            is_found
        };
        // One more block than fits on the page is requested, to find out whether another page
        // follows.
        let most = filter.most + 1;
        let mut blocks = self.entry_blocks().page(after.as_ref(), most, select);
        let mut next = None;
        if blocks.len() > filter.most {
            blocks.truncate(filter.most);
            next = blocks
                .last()
                .map(|(target, _)| id::to_position(&id::of_block(target)));
        }
        Some(EntryBlockPage {
            blocks,
            next,
            count,
        })
    }

    /// Returns the number of blocks by entries that no request can match under the current rules.
    #[must_use]
    pub fn inactive_entry_blocks(&self) -> usize {
        let (rules, mut inactive) = (self.rules(), 0);
        self.entry_blocks()
            .for_each_target(|target| inactive += usize::from(is_inactive(target, &rules)));
        inactive
    }
}

/// Returns why no request can match `target` under `rules`; `None` if a request can.
#[must_use]
pub fn inactive_reason(target: &EntryBlockTarget, rules: &RuleSet) -> Option<&'static str> {
    if target.rule().is_some_and(|rule| rules.rule(rule).is_none()) {
        return Some("rule no longer exists");
    }
    let mut entries = target.entries().iter();
    let is_unused = entries.any(|entry| !rules.uses_entry(&entry.name));
    is_unused.then_some("no rule uses the entry")
}

fn is_inactive(target: &EntryBlockTarget, rules: &RuleSet) -> bool {
    inactive_reason(target, rules).is_some()
}

struct Search<'s> {
    text: &'s str,
    address: Option<IpAddr>,
}

impl<'s> Search<'s> {
    fn new(text: &'s str) -> Self {
        let address = text.parse().ok();
        Self {
            text,
            address: address.map(|address: IpAddr| address.to_canonical()),
        }
    }

    fn finds(&self, target: &EntryBlockTarget, block: &EntryBlock) -> bool {
        let mut entries = target.entries().iter();
        let in_entries = entries.any(|entry| match (&entry.value, &self.address) {
            (BlockedValue::Network(net), Some(address)) if net.contains(address) => true,
            (value, _) => value.to_string().contains(self.text),
        });
        in_entries || block.reason.contains(self.text)
    }
}

fn parse_position(text: &str) -> Option<EntryBlockTarget> {
    match id::parse_position(text)? {
        StoredId::Block(target) => Some(target),
        StoredId::Override(..) => None,
    }
}
