//! `RateLimitQuotaService`: each stream receives usage reports from an Envoy, and sends quota
//! assignments to that Envoy.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use tidegate::Clock;
use tidegate_config::quota::BucketId;
use tidegate_core::{Span, Timestamp};
use tidegate_net::Shutdown;
use tokio::{sync::mpsc, time::sleep};
use tonic::{Request, Response, Status, Streaming};

use super::proto::envoy::{
    service::rate_limit_quota::v3::{
        BucketId as WireId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
        rate_limit_quota_response::{
            BucketAction,
            bucket_action::{AbandonAction, BucketAction as Action, QuotaAssignmentAction},
        },
        rate_limit_quota_service_server::RateLimitQuotaService,
        rate_limit_quota_usage_reports::BucketQuotaUsage,
    },
    r#type::v3::{
        RateLimitStrategy, TokenBucket,
        rate_limit_strategy::{BlanketRule, Strategy},
    },
};
use crate::quota::{Assignment, BucketAssignments, Quotas, StreamId, Usage};

/// The time to live of an assignment, in seconds. Envoy reports every 5 seconds, so an assignment
/// stays valid if a few reports are lost, but expires if this server is unreachable.
const ASSIGNMENT_LIFE_SECONDS: i64 = 30;

/// The refill interval of a budget, in seconds. In practice, a budget is never refilled, because
/// the assignment for the next window arrives long before the interval ends.
const NEVER_SECONDS: i64 = 366 * 86_400;

/// The maximum number of entries in a bucket ID.
const MAX_ID_ENTRIES: usize = 32;
/// The maximum total size of the entries in a bucket ID, in bytes.
const MAX_ID_BYTES: usize = 4 << 10;

/// The maximum length of a domain name, in bytes.
const MAX_DOMAIN_BYTES: usize = 4 << 10;

/// The maximum number of unsent messages on one stream.
const MAX_UNSENT: usize = 16;

/// The quota service. Each Envoy sends usage reports on a stream. On the same stream, the service
/// replies with the part of each quota that is assigned to the stream.
#[derive(Debug)]
pub(super) struct StreamedQuotas {
    quotas: Arc<Quotas>,
    clock: Clock,
    shutdown: Shutdown,
}

impl StreamedQuotas {
    pub(super) fn new(quotas: Arc<Quotas>, clock: Clock, shutdown: Shutdown) -> Self {
        Self {
            quotas,
            clock,
            shutdown,
        }
    }
}

type Outbox = mpsc::Sender<Result<RateLimitQuotaResponse, Status>>;

#[tonic::async_trait]
impl RateLimitQuotaService for StreamedQuotas {
    type StreamRateLimitQuotasStream =
        Pin<Box<dyn Stream<Item = Result<RateLimitQuotaResponse, Status>> + Send>>;

    async fn stream_rate_limit_quotas(
        &self,
        request: Request<Streaming<RateLimitQuotaUsageReports>>,
    ) -> Result<Response<Self::StreamRateLimitQuotasStream>, Status> {
        let (outbox, mut unsent) = mpsc::channel(MAX_UNSENT);
        let (session, inbox) = QuotaSession::new(Arc::clone(&self.quotas), self.clock.clone());
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = shutdown.begun() => {}
                () = outbox.closed() => {}
                ended = session.hold(request.into_inner(), inbox, &outbox) => {
                    if let Err(status) = ended {
                        // Sending fails if the client has disconnected. Ignore this failure.
                        let _ = outbox.send(Err(status)).await;
                    }
                }
            }
        });
        let sent = stream::poll_fn(move |cx| unsent.poll_recv(cx));
        Ok(Response::new(Box::pin(sent)))
    }
}

/// A stream registered with the quotas. Dropping the session unregisters the stream.
#[derive(Debug)]
pub(super) struct QuotaSession {
    quotas: Arc<Quotas>,
    clock: Clock,
    pub(super) stream: StreamId,
    domain: String,
}

impl QuotaSession {
    /// Registers a new stream. Returns the session and the receiver of its assignments.
    pub(super) fn new(
        quotas: Arc<Quotas>,
        clock: Clock,
    ) -> (Self, mpsc::Receiver<BucketAssignments>) {
        let (stream, inbox) = quotas.add_stream();
        let session = Self {
            quotas,
            clock,
            stream,
            domain: String::new(),
        };
        (session, inbox)
    }

    /// Handles the reports of the stream, until the client ends the stream or sends an invalid
    /// report.
    async fn hold(
        mut self,
        mut reports: Streaming<RateLimitQuotaUsageReports>,
        mut inbox: mpsc::Receiver<BucketAssignments>,
        outbox: &Outbox,
    ) -> Result<(), Status> {
        loop {
            tokio::select! {
                report = reports.next() => match report {
                    Some(report) => self.record_reports(report?)?,
                    None => return Ok(()),
                },
                Some(assigned) = inbox.recv() => {
                    if outbox.send(Ok(written(assigned))).await.is_err() {
                        return Ok(());
                    }
                }
                () = sleep(self.until_next_window()) => {
                    self.quotas.roll(self.stream, self.clock.now());
                }
            }
        }
    }

    pub(super) fn record_reports(
        &mut self,
        reports: RateLimitQuotaUsageReports,
    ) -> Result<(), Status> {
        if reports.domain.len() > MAX_DOMAIN_BYTES {
            return Err(Status::invalid_argument(format!(
                "domain: {} bytes exceed the maximum of {MAX_DOMAIN_BYTES}",
                reports.domain.len()
            )));
        }
        if self.domain.is_empty() {
            self.domain = reports.domain;
        } else if !reports.domain.is_empty() && reports.domain != self.domain {
            return Err(Status::invalid_argument(
                "domain: must be the domain of the stream's first message",
            ));
        }
        if self.domain.is_empty() {
            return Err(Status::invalid_argument(
                "domain: must not be empty in the first message",
            ));
        }
        let usages = reports.bucket_quota_usages.into_iter().map(read);
        let usages = usages.collect::<Result<Vec<_>, _>>()?;
        let now = self.clock.now();
        self.quotas.report(self.stream, &self.domain, usages, now);
        Ok(())
    }

    /// Returns the time until the earliest end of the stream's windows. Returns an hour if the
    /// stream has no windows.
    fn until_next_window(&self) -> Duration {
        let end = self.quotas.next_window(self.stream);
        let wait = end.map(|end: Timestamp| end.since(self.clock.now()));
        wait.map_or(Duration::from_secs(3_600), |wait| {
            Duration::from_micros(wait.as_micros())
        })
    }
}

impl Drop for QuotaSession {
    fn drop(&mut self) {
        self.quotas.remove_stream(self.stream, self.clock.now());
    }
}

fn read(usage: BucketQuotaUsage) -> Result<(BucketId, Usage), Status> {
    let id: BucketId = usage
        .bucket_id
        .unwrap_or_default()
        .bucket
        .into_iter()
        .collect();
    let bytes: usize = id
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if id.is_empty() || id.len() > MAX_ID_ENTRIES || bytes > MAX_ID_BYTES {
        let message = format!(
            "bucket_quota_usages.bucket_id: must have 1 to {MAX_ID_ENTRIES} entries with at most {MAX_ID_BYTES} bytes in total"
        );
        return Err(Status::invalid_argument(message));
    }
    let usage = Usage {
        allowed: usage.num_requests_allowed,
        denied: usage.num_requests_denied,
        elapsed: usage.time_elapsed.map_or(Span::ZERO, elapsed),
    };
    Ok((id, usage))
}

/// Converts a duration from a client. A negative duration counts as zero.
fn elapsed(duration: prost_types::Duration) -> Span {
    let nanos = i128::from(duration.seconds) * 1_000_000_000 + i128::from(duration.nanos);
    Span::from_micros(u64::try_from(nanos.max(0) / 1_000).unwrap_or(u64::MAX))
}

pub(super) fn written(assigned: BucketAssignments) -> RateLimitQuotaResponse {
    let action = |(id, assignment): (BucketId, Option<Assignment>)| BucketAction {
        bucket_id: Some(WireId {
            bucket: id.into_iter().collect(),
        }),
        bucket_action: Some(assignment.map_or(
            Action::AbandonAction(AbandonAction {}),
            |assignment| {
                Action::QuotaAssignmentAction(QuotaAssignmentAction {
                    assignment_time_to_live: Some(seconds(ASSIGNMENT_LIFE_SECONDS)),
                    rate_limit_strategy: Some(RateLimitStrategy {
                        strategy: Some(strategy(assignment)),
                    }),
                })
            },
        )),
    };
    RateLimitQuotaResponse {
        bucket_action: assigned.into_iter().map(action).collect(),
    }
}

fn strategy(assignment: Assignment) -> Strategy {
    let blanket = |rule: BlanketRule| Strategy::BlanketRule(rule.into());
    match assignment {
        Assignment::AllowAll => blanket(BlanketRule::AllowAll),
        Assignment::DenyAll => blanket(BlanketRule::DenyAll),
        Assignment::Rate { requests, period } => Strategy::TokenBucket(TokenBucket {
            max_tokens: requests,
            tokens_per_fill: Some(requests),
            // A quota's period is an integer number of seconds, and at most a year.
            fill_interval: Some(seconds(
                i64::try_from(period.as_secs_ceil()).unwrap_or(NEVER_SECONDS),
            )),
        }),
        // If a new assignment is identical to the current assignment, Envoy keeps the current token
        // bucket, which may be empty. Therefore, add the grant number to the refill interval, so
        // that consecutive grants differ. The addition has no other effect, because the refill
        // interval never elapses.
        Assignment::Budget { requests, number } => Strategy::TokenBucket(TokenBucket {
            max_tokens: requests,
            tokens_per_fill: Some(1),
            fill_interval: Some(seconds(NEVER_SECONDS + i64::from(number % 1_000))),
        }),
    }
}

fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}
