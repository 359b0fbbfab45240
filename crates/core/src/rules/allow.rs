//! The allow list: requests that pass without a charge.

use super::{
    Condition, LookupBuffers, Request, When,
    pattern::index::{Index, Item},
};
use crate::time::Timestamp;

/// The allow list. A request that matches an item passes without a charge.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowList {
    items: Box<[When]>,
    index: Index,
}

/// The index is built from the items, so only the items have to be compared.
impl PartialEq for AllowList {
    fn eq(&self, other: &Self) -> bool {
        self.items == other.items
    }
}

impl AllowList {
    pub(super) fn new(items: Vec<When>) -> Self {
        let index = Index::new(
            items
                .iter()
                .map(|item| Item::new(item.iter().map(Condition::parts), item.weight())),
        );
        Self {
            items: items.into(),
            index,
        }
    }

    pub(super) fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.items.iter().flat_map(When::entry_names)
    }

    pub(super) fn index(&self) -> &Index {
        &self.index
    }

    pub(super) fn matches(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        buffers: &mut LookupBuffers,
    ) -> bool {
        if self.items.is_empty() {
            return false;
        }
        let LookupBuffers { allowed, work, .. } = buffers;
        self.index.look_up(request.entries(), allowed);
        work.expect(allowed.items.len());
        let mut found = allowed.items.iter();
        found.any(|item| self.items[*item].holds(request, now, work))
    }

    /// Returns the first item matched by `request`. The number of pattern evaluations is not
    /// limited.
    pub(super) fn find(&self, request: &Request<'_>, now: Timestamp) -> Option<&When> {
        let mut items = self.items.iter();
        items.find(|item| item.holds_at(request, now))
    }
}
