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
}

/// The number of replacements of all overrides that had begun before an override was set.
pub(super) type Generation = u32;

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
