//! The allow list: what passes without being charged.

use super::{Request, Room, When, index::Index};
use crate::time::Timestamp;

/// Requests that pass uncharged: those for which one of the items holds.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowList {
    items: Box<[When]>,
    index: Index,
}

impl AllowList {
    pub(super) fn new(items: Vec<When>) -> Self {
        let filed = items.iter().map(|item| (item.iter(), std::iter::empty()));
        let index = Index::new(filed);
        Self {
            items: items.into(),
            index,
        }
    }

    pub(super) fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.items.iter().flat_map(When::entry_names)
    }

    pub(super) fn covers(&self, request: &Request<'_>, now: Timestamp, room: &mut Room) -> bool {
        if self.items.is_empty() {
            return false;
        }
        self.index.look_up(request, &mut room.allowed);
        let (found, evaluated) = (&room.allowed, &mut room.evaluated);
        found
            .iter()
            .any(|item| self.items[*item].holds(request, now, evaluated))
    }
}
