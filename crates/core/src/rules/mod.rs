//! Rules: when a limit applies, and whose count it is.
//!
//! A [`Request`] is a handful of named values. A [`RuleSet`] says which rules apply to it and turns each
//! into a charge on a key. However many rules there are, only those are looked at that the [`index`] finds.

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
