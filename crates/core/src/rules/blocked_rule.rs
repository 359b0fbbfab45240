//! The rule that a manual block belongs to.

use crate::limit::bounds;

/// The rule that a manual block belongs to, as of the block's creation. A key contains only its
/// values and a hash of the rule's name. If the rule is later renamed or removed, only this record
/// tells which rule the key belonged to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedRule {
    /// The name of the rule.
    pub name: Box<str>,
    /// The names of the rule's key entries, in the order of the key.
    pub key: Box<[Box<str>]>,
}

impl BlockedRule {
    /// Returns true if all names are within their maximum length and the key has at most
    /// [`bounds::MAX_KEY_ENTRIES`] entries. Every [`Rule`](crate::Rule) is within these bounds.
    pub(crate) fn is_within_bounds(&self) -> bool {
        self.name.len() <= bounds::MAX_RULE_NAME_BYTES
            && self.key.len() <= bounds::MAX_KEY_ENTRIES
            && (self.key.iter()).all(|entry| entry.len() <= bounds::MAX_ENTRY_NAME_BYTES)
    }

    /// Returns the approximate heap size in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let entries = self.key.iter();
        let key: usize = entries.map(|entry| size_of_val(entry) + entry.len()).sum();
        self.name.len() + key
    }
}
