//! Rules determine when limits apply, and to which key.
//!
//! A [`Request`] consists of named values, its entries. A [`RuleSet`] finds the rules that apply to
//! a request and turns each rule into a charge on a key. The time for finding the rules does not
//! grow with the number of rules, because only rules found by the [`index`](pattern::index) are
//! evaluated.

mod active_hours;
mod allow;
mod blocked_rule;
mod body_cost;
mod bypass;
mod condition;
mod elastic;
mod entry_blocks;
mod error;
mod explain;
mod key;
mod overrides;
mod pattern;
mod plans;
mod request;
mod response_cost;
mod rule;
mod rule_set;
mod text;
mod token_formula;

pub use active_hours::{ActiveHours, Days, Hours};
use allow::AllowList;
pub use blocked_rule::BlockedRule;
pub use body_cost::{BodyCost, BodyNumbers, JsonPointer};
pub use bypass::Bypass;
pub use condition::{Condition, When};
pub use elastic::{Headroom, Parents, UnusedShare};
pub use entry_blocks::{
    BlockedEntry, BlockedValue, EntryBlock, EntryBlockError, EntryBlockTarget, EntryBlocks,
};
pub use error::{RuleError, RuleErrors};
pub use explain::FailedCondition;
pub use key::{
    BLOCK_KEY, DESCRIPTOR_KEY, MAX_KEY_SPACE, former_key, free_key, free_key_in, free_key_parts,
};
pub(crate) use key::{former_values, is_of_rule, scope_of_key};
pub use overrides::{
    Override, OverrideError, OverrideTarget, Overrides, Replacement, RuleOverrides,
};
pub use pattern::{Pattern, canonical_net};
pub use request::Request;
pub use response_cost::{ResponseCost, USAGE_ENTRIES};
pub use rule::{CostSource, Mode, Rule};
use rule_set::LookupBuffers;
pub use rule_set::{RuleSet, Scratch};
pub use token_formula::{TokenFormula, TokenUsage};
