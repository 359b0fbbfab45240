//! The stored form of an override.

use std::sync::Arc;

use super::{Override, replacement::CompiledReplacement};
use crate::time::Timestamp;

/// The stored form of an override.
#[derive(Clone, Debug)]
pub(super) struct StoredOverride {
    pub(super) compiled: Arc<CompiledReplacement>,
    /// When the override expires; [`Timestamp::MAX`] if it lasts until it is removed.
    pub(super) until: Timestamp,
    pub(super) reason: Box<str>,
    /// The number of times that a replacement of all overrides had been begun when this override
    /// was set.
    pub(super) generation: u32,
    /// The number of values in the target. If the rule's key now has a different number of entries,
    /// the override has no effect.
    pub(super) values: u8,
}

impl StoredOverride {
    pub(super) fn is_unexpired(&self, now: Timestamp) -> bool {
        self.until > now
    }

    pub(super) fn to_override(&self) -> Override {
        Override {
            replacement: self.compiled.replacement().clone(),
            until: Some(self.until).filter(|until| *until < Timestamp::MAX),
            reason: self.reason.clone(),
        }
    }
}
