//! The decision: may this request pass now, and if not, exactly when?
//!
//! This crate decides and does not act: no I/O, no runtime, no clock, no randomness in a decision. Time
//! is an argument, arithmetic is in integers, and every maximum has a name in [`bounds`].
//!
//! The story of one request, a step a line:
//!
//! ```text
//! rules      Request, RuleSet::charges    the rules that apply, each one's limits on one key at a cost
//! charge     Charge, Effect               what is asked of a store
//! store      Store: Question -> Decided   the seam: whoever keeps the state
//! memory     MemoryStore::check           blocks, room, locks: all charged, or none
//! limits     Limits: members              one key's state, a kernel each
//! kernel     state, now, cost -> state    pure; the promise of each algorithm is written there
//! outcome    Outcome, Decision            one limit's answer; why it came out so
//! verdict    Verdict::of                  the request's answer
//! ```

pub mod adaptive;
pub mod bounds;
pub mod notation;
pub mod remote;

mod calendar;
mod cell;
mod charge;
mod digest;
mod failure;
mod kernel;
mod limit;
mod limits;
mod member;
mod memory;
mod outcome;
mod prefetch;
mod question;
mod receipt;
mod rules;
mod spec;
mod store;
mod sync;
mod time;
mod verdict;
mod zone;

pub use calendar::{Calendar, CalendarUnit};
pub use charge::{Charge, Cost, Effect, RequestError, has_repeated_key};
pub use failure::{OnFailure, Share};
pub use limit::{Algorithm, Counting, Limit, LimitError, Rate, RefillMode, Window};
pub use limits::Limits;
pub use memory::{Block, MemoryBounds, MemoryStats, MemoryStore, SnapshotError, WhenFull};
pub use outcome::{Decision, Outcome, Retry};
pub use receipt::{Receipt, Renewal, Settlement};
pub use rules::{
    Bill, Condition, CostSource, DESCRIPTOR_KEY, Days, Escape, Headroom, Hours, MAX_KEY_SPACE,
    Mode, Parents, Pattern, Request, Rule, RuleError, RuleErrors, RuleSet, Schedule, Scratch,
    Unused, When, canonical_net, free_key, free_key_in,
};
pub use spec::{AlgorithmName, Anchor, LimitSpec};
pub use store::{Decided, Question, Store};
pub use time::{Span, Timestamp};
pub use verdict::{Exactness, Line, Reason, Source, Verdict};
