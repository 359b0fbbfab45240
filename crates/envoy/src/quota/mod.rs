//! Quotas: limits that are divided among the clients that enforce them.
//!
//! Envoy's rate limit quota filter does not ask for every request. Every few seconds it reports how
//! many requests of each of its *buckets* it let through, and it is assigned in advance how many it
//! may let through next. When several Envoys share a limit, the limit is divided among their
//! streams in proportion to recent demand.
//!
//! ```text
//! reports ──▶ Quotas ──▶ Bucket ──▶ share::divide ──▶ assignments, to one or all streams
//!             rules and streams     division of the limit
//! ```
//!
//! This module does no I/O and reads no clock; callers pass the time. The gRPC listener sends and
//! receives the messages.

mod bucket;
mod metrics;
mod registry;
pub mod share;

pub use bucket::{Assignment, StreamId, Usage};
pub use registry::{BucketAssignments, MAX_BUCKETS, MAX_STREAM_BUCKETS, QuotaCounts, Quotas};
