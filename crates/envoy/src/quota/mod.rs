//! Quotas: limits that are divided among the Envoys that enforce them.
//!
//! Envoy's rate limit quota filter does not send a query for every request. The filter groups
//! requests into *buckets*. Every few seconds, the filter reports how many requests it allowed in
//! each bucket. The server then assigns the number of further requests that the filter may allow.
//! If several Envoys share a limit, the limit is divided among their streams in proportion to
//! recent demand.
//!
//! ```text
//! reports ──▶ Quotas ──▶ Bucket ──▶ share::divide ──▶ assignments to one or all streams
//!             rules and streams     divides the limit
//! ```
//!
//! This module does no I/O and does not read the clock: callers pass the time. The gRPC listener
//! sends and receives the messages.

mod bucket;
mod metrics;
mod registry;
pub mod share;

pub use bucket::{Assignment, StreamId, Usage};
pub use registry::{BucketAssignments, MAX_QUOTA_BUCKETS, MAX_STREAM_BUCKETS, QuotaCounts, Quotas};
