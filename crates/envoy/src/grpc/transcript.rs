//! Runs the gRPC services without sockets, for fuzzing.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use prost::Message as _;
use tidegate::Clock;
use tokio::sync::mpsc;

use super::{
    GrpcContext, authorization,
    proto::envoy::service::rate_limit_quota::v3::RateLimitQuotaUsageReports,
    quota::{self, QuotaSession},
    rate_limit,
};
use crate::{
    RateLimitService,
    quota::{BucketAssignments, Quotas},
};

/// Returns the encoded `ShouldRateLimit` response to `message`. The limiter must not use Redis.
///
/// # Errors
///
/// Returns the gRPC status code and its message.
pub fn rate_limit_transcript(
    service: &RateLimitService,
    message: &[u8],
) -> Result<Vec<u8>, (i32, String)> {
    // With the memory store, the future is ready at the first poll.
    let decided = rate_limit::decide(Some(service), message, Duration::MAX).now_or_never();
    let Some(decided) = decided else {
        let alone = "a decision by Redis must be awaited";
        return Err((tonic::Code::Internal.into(), alone.to_owned()));
    };
    let encoded = decided.map(|answer| answer.encode_to_vec());
    encoded.map_err(|status| (status.code().into(), status.message().to_owned()))
}

/// Returns the encoded `Check` response to `message`, as if the Envoy at `sender` had sent
/// `message`. The limiter must not use Redis.
///
/// # Errors
///
/// Returns the gRPC status code and its message.
pub fn check_transcript(
    context: &GrpcContext,
    sender: IpAddr,
    message: &[u8],
) -> Result<Vec<u8>, (i32, String)> {
    // With the memory store, the future is ready at the first poll.
    let checked = authorization::check(context, sender, message).now_or_never();
    let Some(checked) = checked else {
        let alone = "a decision by Redis must be awaited";
        return Err((tonic::Code::Internal.into(), alone.to_owned()));
    };
    let encoded = checked.map(|answer| answer.encode_to_vec());
    encoded.map_err(|status| (status.code().into(), status.message().to_owned()))
}

/// A quota stream without a connection. Dropping the value unregisters the stream.
#[derive(Debug)]
pub struct QuotaStream {
    quotas: Arc<Quotas>,
    clock: Clock,
    session: QuotaSession,
    inbox: mpsc::Receiver<BucketAssignments>,
}

impl QuotaStream {
    /// Opens a new stream, which gets a share of `quotas`.
    #[must_use]
    pub fn open(quotas: &Arc<Quotas>, clock: &Clock) -> Self {
        let (session, inbox) = QuotaSession::new(Arc::clone(quotas), clock.clone());
        Self {
            quotas: Arc::clone(quotas),
            clock: clock.clone(),
            session,
            inbox,
        }
    }

    /// Handles the usage report in `message`.
    ///
    /// # Errors
    ///
    /// Returns the message of the gRPC status with which the stream would end.
    pub fn report(&mut self, message: &[u8]) -> Result<(), String> {
        let reports = RateLimitQuotaUsageReports::decode(message);
        let reports = reports.map_err(|error| error.to_string())?;
        let recorded = self.session.record_reports(reports);
        recorded.map_err(|status| status.message().to_owned())
    }

    /// Starts a new window if the current window has ended.
    pub fn roll(&self) {
        let (quotas, now) = (&self.quotas, self.clock.now());
        let stream = self.session.stream;
        if quotas.next_window(stream).is_some_and(|end| end <= now) {
            quotas.roll(stream, now);
        }
    }

    /// Returns the messages that were sent since the previous call of this function.
    pub fn take_responses(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.inbox.try_recv().ok())
            .map(|assigned| quota::written(assigned).encode_to_vec())
            .collect()
    }
}
