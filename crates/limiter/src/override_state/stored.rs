//! Documents of the two stored kinds: overrides, and blocks by entries.

use serde_json::Value;
use tidegate_core::{EntryBlocks, Overrides, Timestamp};

use super::{block_document::BlockDocument, document::OverrideDocument, id::StoredId};

/// The overrides and the blocks by entries that decisions use. Clones share the overrides and
/// blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct LiveTables {
    pub(crate) overrides: Overrides,
    pub(crate) entry_blocks: EntryBlocks,
}

impl LiveTables {
    /// Returns the number of overrides and blocks.
    pub(crate) fn len(&self) -> usize {
        self.overrides.len() + self.entry_blocks.len()
    }

    /// Begins to replace all overrides and blocks. Overrides and blocks that are not set again stay
    /// active until [`Self::end_replacement`] removes them.
    pub(crate) fn begin_replacement(&self) {
        self.overrides.begin_replacement();
        self.entry_blocks.begin_replacement();
    }

    /// Removes the overrides and blocks that have not been set since [`Self::begin_replacement`],
    /// and returns their number.
    pub(crate) fn end_replacement(&self) -> usize {
        self.overrides.end_replacement() + self.entry_blocks.end_replacement()
    }

    /// Removes the overrides and blocks that have ended at `now`.
    pub(crate) fn remove_ended(&self, now: Timestamp) {
        self.overrides.remove_ended(now);
        self.entry_blocks.remove_ended(now);
    }

    /// Removes the override or the block with this ID.
    pub(crate) fn remove(&self, id: &StoredId) {
        match id {
            StoredId::Override(rule, target) => drop(self.overrides.remove(rule, target)),
            StoredId::Block(target) => drop(self.entry_blocks.remove(target)),
        }
    }
}

/// A stored change: an override or a block by entries is set or removed. The change is stored in
/// Redis or in the override file, as a JSON document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredDocument {
    Override(OverrideDocument),
    Block(BlockDocument),
}

impl StoredDocument {
    /// Parses a document.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let document: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match document.get("block") {
            Some(block) => BlockDocument::read(block).map(Self::Block),
            None => OverrideDocument::read(&document).map(Self::Override),
        }
    }

    /// Returns the ID of the override or block.
    pub(crate) fn id(&self) -> Vec<u8> {
        match self {
            Self::Override(document) => document.id(),
            Self::Block(document) => document.id(),
        }
    }

    /// Returns whether the document is the removal of an override or a block, or whether its
    /// override or block has ended at `now`.
    pub(crate) fn is_obsolete(&self, now: Timestamp) -> bool {
        match self {
            Self::Override(document) => document.is_obsolete(now),
            Self::Block(document) => document.is_obsolete(now),
        }
    }

    /// Applies the change.
    pub(crate) fn apply(self, tables: &LiveTables, now: Timestamp) -> Result<(), String> {
        match self {
            Self::Override(document) => {
                let changed = document.apply(&tables.overrides, now);
                changed.map(drop).map_err(|error| error.to_string())
            }
            Self::Block(document) => {
                let changed = document.apply(&tables.entry_blocks, now);
                changed.map(drop).map_err(|error| error.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_document_has_no_effect() {
        for text in [
            "{",
            "{}",
            r#"{"block": 7}"#,
            r#"{"block": {"entries": []}}"#,
        ] {
            assert!(StoredDocument::decode(text.as_bytes()).is_err(), "{text}");
        }
    }
}
