//! Rate limit decisions: whether a request is admitted now, and otherwise when the client can
//! retry.
//!
//! This crate only decides. The crate does no I/O, starts no runtime, reads no clock and uses no
//! randomness in a decision. The time is an argument, the arithmetic uses integers, and every
//! maximum has a name in [`bounds`].
//!
//! The steps of one request, one per line:
//! ```text
//! rules      Request, RuleSet::charges    the rules that apply, as charges: limits, key and cost
//! eval       Charge, Effect               the input of a store
//! store      Store::decide                the interface to the state, in memory or in Redis
//! memory     MemoryStore::check           manual blocks, eviction, locks; charges all or none
//! eval       Limits: groups               the state of one key, one part for each group
//! algorithm  state, now, cost -> state    the algorithms: pure functions, with their guarantees
//! eval       Outcome, Decision            the result of one limit; the result of the store
//! eval       Verdict::of                  the result for the request
//! ```
//!
//! The layers, from the lowest; none imports from a higher one: `time`, `limit`, `algorithm`,
//! `eval`, then `rules` and `memory`, then `store`. `concurrency` and `backoff` need only `time`,
//! and `maybe_ready` needs nothing. `top`, which ranks keys by their requests, needs the keys of
//! `rules`.

pub mod concurrency;
pub mod top;

mod algorithm;
mod backoff;
mod digest;
mod error;
mod eval;
mod limit;
mod maybe_ready;
mod memory;
mod rules;
mod store;
mod time;

/// The notation of rates and durations: `20/min`, `5/10s`, `1d`, `500ms`.
pub mod notation {
    pub use crate::{
        limit::rate,
        time::notation::{NotationError, span},
    };
}

pub use algorithm::{Outcome, RetryAfter};
pub use backoff::{Backoff, Jitter};
pub use error::LimitError;
pub use eval::{
    Charge, Cost, Decision, Effect, Exactness, FallbackShare, Limits, Line, Lines, OnFailure,
    Reason, Receipt, Renewal, RequestError, Settlement, Source, Verdict, has_repeated_key,
    remote_eval,
};
pub use limit::{
    Algorithm, AlgorithmName, Anchor, Counting, Limit, LimitSpec, Rate, RefillMode, Window, bounds,
};
pub use maybe_ready::{MaybeReady, MaybeReadyFuture, Never};
pub use memory::{
    Block, BlockNote, BlockedRule, KeyCursor, KeyPage, MemoryBounds, MemoryStats, MemoryStore,
    SnapshotError, WhenFull,
};
pub use rules::{
    ActiveHours, Bypass, Condition, CostSource, DESCRIPTOR_KEY, Days, FailedCondition, Headroom,
    Hours, MAX_KEY_SPACE, Mode, Parents, Pattern, Request, ResponseCost, Rule, RuleError,
    RuleErrors, RuleSet, Scratch, UnusedShare, When, canonical_net, former_key, free_key,
    free_key_in, free_key_parts,
};
pub use store::{CacheSearch, DecisionAndReceipt, Store, StoreDecision, StoreRequest};
pub use time::{Calendar, CalendarUnit, Span, Timestamp};
