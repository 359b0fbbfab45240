//! Quotas: limits that are divided among those who enforce them.
//!
//! Envoy's quota filter does not ask for every request. It reports every few seconds what it let pass of each of
//! its *buckets*, and is assigned ahead what it may let pass next. Several Envoys share one limit, so it is
//! divided among their streams, in proportion to what each of them was lately asked for.
//!
//! ```text
//! reports ──▶ Quotas ──▶ Bucket ──▶ share::divide ──▶ assignments, to one stream or to all of the bucket
//!             which rule, who is connected    whose is how much
//! ```
//!
//! Everything here is told the time and does no I/O; the gRPC door moves the messages.

mod bucket;
mod registry;
mod rule;
pub mod share;

pub use bucket::{Assignment, StreamId, Usage};
pub use registry::{Assigned, MAX_BUCKETS, MAX_STREAM_BUCKETS, QuotaCounts, Quotas};
pub use rule::{BucketId, MAX_PERIOD, QuotaLimit, QuotaRule};
