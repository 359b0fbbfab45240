//! The limiter that all listeners share: the active rules, one store and one clock.
//!
//! A decision may need a call to Redis, so its result is a [`MaybeReady`]. The result is ready if
//! the decision needs no call to Redis, which is always the case with the memory store. A caller
//! that is not async uses a ready result immediately, and passes a pending result to a task.
//!
//! [`MaybeReady`]: tidegate_core::MaybeReady
//!
//! The modules form layers. A module imports from the layers below it, and from other modules of
//! its layer, but never in a cycle:
//!
//! ```text
//! operations  decide, store, observe, reservations, overrides, fleet_lists, explain, listing,
//!             blocks, admin_ops, handover: methods of `ServerLimiter`
//! struct      server_limiter: owns the parts, replaces the rules, collects the metrics
//! parts       backend, observers (metrics, entries, denials, top, events, candidate, record),
//!             reservation_state, override_state, snapshot
//! helpers     build_cache, date, https_client, publisher, scratch, throttle_key, trace
//! ```

mod admin_ops;
mod backend;
pub mod blocks;
mod build_cache;
pub mod candidate;
pub mod date;
mod decide;
pub mod denials;
pub mod entries;
pub mod events;
mod explain;
mod fleet_lists;
mod handover;
pub mod https_client;
mod listing;
pub mod metrics;
mod observe;
mod observers;
mod override_state;
pub mod overrides;
mod publisher;
mod record;
mod reservation_state;
pub mod reservations;
mod scratch;
mod server_limiter;
pub mod snapshot;
mod store;
mod throttle_key;
pub mod top;
pub mod trace;

use tidegate_core::{Limit, LimitError, Limits};

pub use self::{
    backend::{Backend, LimiterReceipt},
    build_cache::BuildCache,
    decide::DecisionRequest,
    denials::ThrottledRequest,
    explain::{ExplainError, ExplainedCharge, Explanation},
    handover::{HandoverError, SendState, is_store_part},
    listing::{KeyListing, ListError},
    overrides::{DESCRIPTOR_RULE_PREFIX, DescriptorRules},
    record::RequestRecorder,
    scratch::with_scratch,
    server_limiter::ServerLimiter,
    throttle_key::{Database, MAX_THROTTLE_KEY_BYTES, throttle_key, throttle_key_in},
};
pub use tidegate_config::{KeyMask, NoRandomBytes};
pub use tidegate_redis::random_server_id;

/// Wraps a throttle request's single limit in [`Limits`]. The limit does not belong to a rule.
///
/// # Errors
///
/// Never fails if `limit` is valid.
pub fn single(limit: Limit) -> Result<Limits, LimitError> {
    Limits::new(vec![limit])
}
