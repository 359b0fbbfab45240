//! Rules: when limits apply, and to which key.
//!
//! A [`Request`] consists of named values, its entries. A [`RuleSet`] finds the rules that apply to
//! it and turns each into a charge on a key. The work does not grow with the number of rules: only
//! the rules that the [`index`] finds are evaluated.

mod allow;
mod alternatives;
mod bill;
mod error;
mod escape;
mod glob;
mod headroom;
mod index;
mod key;
mod literals;
mod nets;
mod pattern;
mod postings;
mod request;
mod route;
mod rule;
mod schedule;
mod set;
mod text;
mod when;
mod work;

use allow::AllowList;
pub use bill::Bill;
pub use error::{RuleError, RuleErrors};
pub use escape::Escape;
pub use headroom::{Headroom, Parents, Unused};
pub use key::{DESCRIPTOR_KEY, MAX_KEY_SPACE, free_key, free_key_in};
pub use nets::canonical_net;
pub use pattern::Pattern;
pub use request::Request;
pub use rule::{CostSource, Mode, Rule};
pub use schedule::{Days, Hours, Schedule};
use set::Room;
pub use set::{RuleSet, Scratch};
pub use when::{Condition, When};
