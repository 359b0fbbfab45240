//! The request entries used by rules.

use std::borrow::Cow;

use smallvec::SmallVec;
use tidegate_core::RuleSet;
use tidegate_identity::{AmbiguousRequest, RequestEntries};

/// A list with inline capacity for the usual number of entries that rules use.
pub(super) type Few<T> = SmallVec<[T; 4]>;

/// Returns the entries of `request` that `rules` use. Also returns the extra entries of `rules`,
/// which only other rules use (such as candidate rules). An extra entry is left out if it is
/// invalid or there is no room for it.
pub(super) fn used_entries<'n, 'r>(
    request: &'r RequestEntries<'_>,
    rules: &'n RuleSet,
) -> Result<Few<(&'n str, Cow<'r, str>)>, AmbiguousRequest> {
    let mut values = Few::new();
    for name in rules.entry_names() {
        if let Some(value) = request.entry(name)? {
            values.push((name, value));
        }
    }
    for name in rules.extra_entry_names() {
        if let Ok(Some(value)) = request.entry(name)
            && tidegate_core::Request::has_room(values.len(), &value)
        {
            values.push((name, value));
        }
    }
    Ok(values)
}
