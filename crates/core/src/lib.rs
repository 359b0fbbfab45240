//! Rate limit decisions: may this request pass now, and if not, when can the client retry?
//!
//! This crate only decides. It does no I/O, starts no runtime, reads no clock and uses no
//! randomness in a decision. The time is an argument, the arithmetic uses integers, and every
//! maximum has a name in [`bounds`].
//!
//! The path of one request, one step a line:
//! ```text
//! rules      Request, RuleSet::charges    the rules that apply, as charges: limits, key and cost
//! charge     Charge, Effect               the input of a store
//! store      Store: Question -> Decided   the interface to the state, in memory or in Redis
//! memory     MemoryStore::check           manual blocks, eviction, locks; charges all or none
//! limits     Limits: members              the state of one key, one part for each kernel
//! kernel     state, now, cost -> state    the algorithms: pure functions, with their guarantees
//! outcome    Outcome, Decision            the result of one limit; the result of the store
//! verdict    Verdict::of                  the result for the request
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
