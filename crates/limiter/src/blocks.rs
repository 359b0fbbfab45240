//! Compares blocks with the active rules.
//!
//! A block is identified by its key, which contains a hash of the rule's name. A block therefore
//! stays in the store when its rule is renamed, removed or given different key entries. The block
//! is then usually inactive, because requests no longer have the blocked key. There is one
//! exception: the block denies a request whose values for the new key entries equal the blocked
//! values.

use std::collections::BTreeMap;

use tidegate_core::{Block, RuleSet};
use tidegate_redis::StoreError;

use crate::ServerLimiter;

/// The rule and the values of a block's key, for display.
#[derive(Debug, PartialEq, Eq)]
pub struct BlockedKey<'a> {
    /// The name of the rule; `None` if it is not known.
    pub rule: Option<&'a str>,
    /// The values of the key entries; `None` if they cannot be decoded.
    pub values: Option<Vec<&'a str>>,
    /// Why the block is inactive; `None` if it is enforced.
    pub inactive: Option<&'static str>,
}

impl<'a> BlockedKey<'a> {
    /// Decodes the key of `block` with the key entries of the active rule. If the active rule has
    /// other key entries, uses the entries that the rule had when the block was created.
    #[must_use]
    pub fn of(block: &'a Block, rules: &'a RuleSet) -> Self {
        let rule = rules.rule_of(&block.key);
        let former = block.rule.as_ref();
        // If the rule now has different key entries, the bytes would decode to values of other
        // entries, or to wrong values.
        let has_same_key = former.is_none_or(|former| {
            rule.is_some_and(|rule| rule.key().eq(former.key.iter().map(|entry| &**entry)))
        });
        if has_same_key && let Some((rule, values)) = rules.decode_key(&block.key) {
            return Self {
                rule: Some(rule.name()),
                values: Some(values),
                inactive: None,
            };
        }
        let inactive = match rule {
            Some(_) => "rule has another key now",
            None => "rule no longer exists",
        };
        let name = former.map(|former| &*former.name);
        Self {
            rule: name.or_else(|| rule.map(tidegate_core::Rule::name)),
            values: block.values(),
            // The key of a limit that was sent with a request does not belong to a rule, so a block
            // on this key is never inactive.
            inactive: block.is_of_rule().then_some(inactive),
        }
    }
}

/// The number of inactive blocks for each rule name; the name is `None` if it is unknown. A block
/// is inactive if its rule no longer exists or now has different key entries.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct InactiveBlocks(pub BTreeMap<Option<String>, usize>);

/// The maximum number of rule names in the text of [`InactiveBlocks::advice`].
const MAX_NAMED: usize = 10;

impl InactiveBlocks {
    /// Describes the inactive blocks, and explains how to enforce or remove them. Returns `None` if
    /// there are no inactive blocks.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let blocks: usize = self.0.values().sum();
        let (are, rules) = match blocks {
            0 => return None,
            1 => ("block is", "its rule no longer exists or has"),
            _ => ("blocks are", "their rules no longer exist or have"),
        };
        let named = self.0.keys().take(MAX_NAMED).map(|rule| match rule {
            Some(rule) => format!("\"{}\"", rule.escape_debug()),
            None => "(unknown)".to_owned(),
        });
        let mut named = named.collect::<Vec<_>>().join(", ");
        if self.0.len() > MAX_NAMED {
            let more = self.0.len() - MAX_NAMED;
            named = format!("{named} and {more} more");
        }
        Some(format!(
            "{blocks} {are} inactive, because {rules} another key: {named}; list inactive blocks with `tidegate blocks`, lift them \
             with `tidegate unblock`, and block the keys again under the new rule"
        ))
    }
}

impl ServerLimiter {
    /// Counts the blocks that are not enforced under the active rules.
    ///
    /// # Errors
    ///
    /// Fails if the blocks are in Redis and Redis cannot be queried.
    pub async fn inactive_blocks(&self) -> Result<InactiveBlocks, StoreError> {
        let (rules, mut inactive) = (self.rules(), InactiveBlocks::default());
        for block in self.blocks().await? {
            let key = BlockedKey::of(&block, &rules);
            if key.inactive.is_some() {
                *inactive.0.entry(key.rule.map(str::to_owned)).or_default() += 1;
            }
        }
        Ok(inactive)
    }
}
