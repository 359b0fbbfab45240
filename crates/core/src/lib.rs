//! This crate makes rate limit decisions: whether a request is admitted now and, if not, when the
//! client can retry.
//!
//! This crate does no I/O, starts no async runtime, reads no clock and uses no randomness in a
//! decision. The caller passes the current time as an argument. All arithmetic uses integers. Every
//! maximum is a named constant in the module [`bounds`].
//!
//! Each line is a step in the evaluation of a request:
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
//! The modules form layers, and no module imports from a higher layer. From the lowest to the
//! highest, the layers are `time`, `limit`, `algorithm`, `eval`, then `rules` and `memory`, then
//! `store`. The modules `concurrency`, `backoff` and `holding_time` depend only on `time`, and
//! `hash_table` and `maybe_ready` depend on no other module. The module `top` ranks keys by their
//! number of requests, and depends on `rules` for the keys.

pub mod concurrency;
pub mod top;

mod algorithm;
mod backoff;
mod digest;
mod error;
mod eval;
mod hash_table;
mod holding_time;
mod limit;
mod maybe_ready;
mod memory;
mod rules;
mod shown;
mod store;
mod time;

/// Parsers for rates, durations and instants: `20/min`, `5/10s`, `1d`, `2030-01-31T09:00:00Z`.
pub mod notation {
    pub use crate::{
        limit::{integer_advice, integer_meant, rate},
        time::notation::{NotationError, instant, span},
    };
}

pub use algorithm::{Outcome, RetryAfter};
pub use backoff::{Backoff, Jitter};
pub use error::LimitError;
pub use eval::{
    BlockEnd, Charge, Cost, Decision, Effect, Exactness, FallbackShare, Limits, Line, Lines,
    OnFailure, Reason, Receipt, Refund, Renewal, RequestError, Settlement, Source, Verdict,
    has_repeated_key, remote_eval,
};
pub use holding_time::{HoldingTime, SlotEstimate};
pub use limit::{
    Algorithm, AlgorithmName, Anchor, Counting, Factor, Limit, LimitSpec, QuotaUnit, Rate,
    RefillMode, SlotWait, Window, bounds,
};
pub use maybe_ready::{MaybeReady, MaybeReadyFuture, Never};
pub use memory::{
    Block, BlockNote, KeyCursor, KeyPage, MemoryBounds, MemoryStats, MemoryStore, SnapshotError,
    WhenFull,
};
pub use rules::{
    ActiveHours, BLOCK_KEY, BlockedEntry, BlockedRule, BlockedValue, BodyCost, BodyNumbers, Bypass,
    Condition, CostSource, DESCRIPTOR_KEY, Days, EntryBlock, EntryBlockError, EntryBlockTarget,
    EntryBlocks, FailedCondition, Headroom, Hours, JsonPointer, MAX_KEY_SPACE, Mode, Override,
    OverrideError, OverrideTarget, Overrides, Parents, Pattern, Replacement, Request, ResponseCost,
    Rule, RuleError, RuleErrors, RuleOverrides, RuleSet, Scratch, TokenFormula, TokenUsage,
    USAGE_ENTRIES, UnusedShare, When, canonical_net, former_key, free_key, free_key_in,
    free_key_parts,
};
pub use store::{Accounting, CacheSearch, DecisionAndReceipt, Store, StoreDecision, StoreRequest};
pub use time::{CLOCK_JUMP, Calendar, CalendarUnit, Span, Timestamp};
