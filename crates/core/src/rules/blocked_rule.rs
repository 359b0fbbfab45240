//! The rule of a block.

use crate::limit::bounds;

/// The rule of a block, as it was when the block was made. A key contains only its values and a
/// hash of the rule's name. If the rule has since been renamed or removed, only this record shows
/// which rule the key belonged to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedRule {
    /// The name of the rule.
    pub name: Box<str>,
    /// The names of the entries of the rule's key, in the order of the key.
    pub key: Box<[Box<str>]>,
}

impl BlockedRule {
    /// Returns true if no name is too long and the key has at most [`bounds::MAX_KEY_ENTRIES`]
    /// entries. Every [`Rule`](crate::Rule) is within these bounds.
    pub(crate) fn is_within_bounds(&self) -> bool {
        self.name.len() <= bounds::MAX_RULE_NAME_BYTES
            && self.key.len() <= bounds::MAX_KEY_ENTRIES
            && (self.key.iter()).all(|entry| entry.len() <= bounds::MAX_ENTRY_NAME_BYTES)
    }

    /// Returns the approximate number of bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        let entries = self.key.iter();
        let key: usize = entries.map(|entry| size_of_val(entry) + entry.len()).sum();
        self.name.len() + key
    }
}
