//! An override for a single key, as an entry of the table of these overrides.

use super::{
    OverrideTarget,
    stored::{Generation, StoredOverride},
};
use crate::{
    hash_table::{Distance, TableEntry, TableKey},
    rules::key,
};

/// An override for a single key. It fits in a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct KeyOverride {
    /// The bytes of the key after its scope.
    pub(super) key: TableKey,
    pub(super) stored: StoredOverride,
    pub(super) generation: Generation,
    distance: Distance,
    /// The number of values in the target. If the rule's key now has a different number of entries,
    /// the override has no effect.
    values: u8,
}

const _: () = assert!(size_of::<Option<KeyOverride>>() == 64);

impl KeyOverride {
    pub(super) fn new(
        key: &[u8],
        values: usize,
        stored: StoredOverride,
        generation: Generation,
    ) -> Self {
        Self {
            key: TableKey::new(key),
            stored,
            generation,
            distance: Distance::default(),
            // A key has at most 16 values.
            values: u8::try_from(values).unwrap_or(u8::MAX),
        }
    }

    /// Returns whether the target has as many values as a key with this number of entries.
    pub(super) fn is_for(&self, entries: usize) -> bool {
        usize::from(self.values) == entries
    }

    /// Returns the target. Returns `None` if the bytes of the key are damaged.
    pub(super) fn target(&self) -> Option<OverrideTarget> {
        let values = key::values(self.key.bytes(), usize::from(self.values))?;
        Some(OverrideTarget::Key(
            values.into_iter().map(Box::from).collect(),
        ))
    }
}

impl TableEntry for KeyOverride {
    /// With a table that is at most half full, three of four entries are in their home slot, which
    /// a lookup loads while it waits for the tags. An override then takes about 150 bytes; in a
    /// fuller table, it would take 85 bytes.
    const MAX_EIGHTHS: usize = 4;

    #[inline]
    fn is_of(&self, key: &[u8]) -> bool {
        self.key.is(key)
    }

    fn distance(&self) -> Distance {
        self.distance
    }

    fn set_distance(&mut self, distance: Distance) {
        self.distance = distance;
    }
}
