//! Load balancing and retries: sends a request to the endpoint with the fewest requests in flight,
//! and to another endpoint if the first endpoint does not accept it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hyper::{Request, Response};
use tokio::time::{Duration, Instant, timeout_at};

use super::{
    balancer::Upstream,
    checkout::Checkout,
    config::RuntimeConfig,
    connection::{OutgoingRequest, ResponseSource, SendError, UpstreamConnection},
    endpoint::{ActiveRequest, Endpoint},
    retry::{self, FailedAttempt, Resend},
};
use crate::{
    error::ProxyError,
    headers::forwarded::ForwardingHeaders,
    request_body::{Upload, UploadProgress},
};

/// The load balancing state of one request. The dispatcher holds the settings that were active when
/// the request arrived.
pub(crate) struct Dispatcher {
    pub(crate) current: Arc<RuntimeConfig>,
    worker: usize,
    /// The index of the endpoint that was tried last; `usize::MAX` if no endpoint has been tried.
    last: AtomicUsize,
}

/// The result of the synchronous attempt to send a request. The `usize` is the request's round
/// robin position.
pub(crate) enum PendingRequest {
    /// The request is being sent on a pooled HTTP/1.1 connection.
    Sent(Checkout, usize),
    /// The request was not sent, because no pooled connection was idle or because the upstream uses
    /// HTTP/2. The asynchronous path must send the request.
    Unsent(OutgoingRequest, usize),
}

impl Dispatcher {
    pub(crate) const fn new(current: Arc<RuntimeConfig>, worker: usize) -> Self {
        Self {
            current,
            worker,
            last: AtomicUsize::new(usize::MAX),
        }
    }

    /// Returns the endpoint of `upstream` that was tried last.
    pub(crate) fn last_endpoint<'u>(&self, upstream: &'u Upstream) -> Option<&'u Arc<Endpoint>> {
        upstream.endpoints.get(self.last.load(Ordering::Relaxed))
    }

    /// Sends `request` to the least loaded endpoint, if the pool has an idle HTTP/1.1 connection to
    /// it.
    pub(crate) fn try_send_idle(
        &self,
        upstream: &Upstream,
        request: Request<Upload>,
        forwarding: &ForwardingHeaders,
    ) -> PendingRequest {
        let timeouts = &self.current.settings.timeouts;
        let position = upstream.next_position();
        // An HTTP/2 connection may be out of streams or may need to be opened first.
        if upstream.http2.is_some() {
            return PendingRequest::Unsent(OutgoingRequest::New(Box::new(request)), position);
        }
        let now = Instant::now();
        let pooled = upstream
            .least_loaded(position, 0)
            .and_then(|(at, endpoint)| {
                let active = endpoint.begin_request();
                let connection = endpoint.pool.take(self.worker, timeouts, now)?;
                Some((at, self.checkout(connection, active)))
            });
        let Some((at, mut checkout)) = pooled else {
            return PendingRequest::Unsent(OutgoingRequest::New(Box::new(request)), position);
        };
        match checkout
            .connection
            .start(request, forwarding, timeouts, now)
        {
            Ok(()) => {
                self.last.store(at, Ordering::Relaxed);
                PendingRequest::Sent(checkout, position)
            }
            Err(request) => PendingRequest::Unsent(OutgoingRequest::New(request), position),
        }
    }

    /// Waits for the response head of `pending`, and returns the head and the connection on which
    /// it arrived. Retries the request if a retry is safe.
    pub(crate) async fn response_head(
        &self,
        upstream: &Upstream,
        pending: PendingRequest,
        forwarding: &ForwardingHeaders,
        progress: &UploadProgress,
    ) -> Result<(Response<ResponseSource>, Checkout), ProxyError> {
        let (outgoing, position) = match pending {
            PendingRequest::Sent(mut checkout, position) => {
                let timeouts = &self.current.settings.timeouts;
                match checkout.connection.response_head(progress, timeouts).await {
                    Ok(response) => {
                        checkout.active.endpoint().record_success();
                        return Ok((response, checkout));
                    }
                    Err(send_error) => {
                        let attempt = self.failed_attempt(true, 1, progress);
                        let endpoint = checkout.active.endpoint();
                        let (Resend::AnyEndpoint(outgoing) | Resend::OtherEndpoint(outgoing)) =
                            after_failure(endpoint, send_error, attempt)?;
                        upstream.metrics.count_retry(self.worker);
                        (outgoing, position)
                    }
                }
            }
            PendingRequest::Unsent(outgoing, position) => (outgoing, position),
        };
        // Rare path with a large future; box it to keep the common future small.
        Box::pin(self.send_with_retries(upstream, position, outgoing, forwarding, progress)).await
    }

    /// Tries the endpoints of `upstream` in order of load, the least loaded first. Stops when an
    /// endpoint responds or when the request must not be sent again.
    async fn send_with_retries(
        &self,
        upstream: &Upstream,
        position: usize,
        mut outgoing: OutgoingRequest,
        forwarding: &ForwardingHeaders,
        progress: &UploadProgress,
    ) -> Result<(Response<ResponseSource>, Checkout), ProxyError> {
        let timeouts = &self.current.settings.timeouts;
        let mut budget = ConnectBudget::new(timeouts.connect);
        let (mut tried, mut error) = (0_u64, ProxyError::Unreachable);
        let (mut attempts, mut stale) = (0_u32, 0);
        while let Some((at, endpoint)) = upstream.least_loaded(position, tried) {
            if attempts > 0 {
                upstream.metrics.count_retry(self.worker);
            }
            attempts += 1;
            let active = endpoint.begin_request();
            let is_last = upstream.least_loaded(position, tried | 1 << at).is_none();
            let connected = budget.spend(is_last, |until| {
                self.connection_to(endpoint, &outgoing, until)
            });
            let connected = connected.await;
            // If no connection attempt was made, the endpoint does not count as tried.
            if !matches!(
                connected,
                None | Some(Err(ProxyError::Full | ProxyError::Local))
            ) {
                self.last.store(at, Ordering::Relaxed);
            }
            let (connection, is_pooled) = match connected {
                Some(Ok(connected)) => connected,
                Some(Err(problem)) => {
                    (tried, error) = (tried | 1 << at, problem);
                    continue;
                }
                None => return Err(error),
            };
            let mut checkout = self.checkout(connection, active);
            let sent = checkout
                .connection
                .send(outgoing, forwarding, progress, timeouts)
                .await;
            let send_error = match sent {
                Ok(response) => {
                    endpoint.record_success();
                    return Ok((response, checkout));
                }
                Err(send_error) => send_error,
            };
            stale += u32::from(is_pooled);
            let attempt = self.failed_attempt(is_pooled, stale, progress);
            outgoing = match after_failure(endpoint, send_error, attempt)? {
                Resend::AnyEndpoint(outgoing) => outgoing,
                Resend::OtherEndpoint(outgoing) => {
                    (tried, error) = (tried | 1 << at, ProxyError::BadResponse);
                    outgoing
                }
            };
        }
        Err(error)
    }

    /// Returns a connection to `endpoint`, and whether it came from the pool. Opens a new
    /// connection if `outgoing` has already failed on a pooled HTTP/1.1 connection that was closed.
    async fn connection_to(
        &self,
        endpoint: &Arc<Endpoint>,
        outgoing: &OutgoingRequest,
        until: Instant,
    ) -> Result<(Box<UpstreamConnection>, bool), ProxyError> {
        let timeouts = &self.current.settings.timeouts;
        let take = || endpoint.pool.take(self.worker, timeouts, Instant::now());
        if !matches!(outgoing, OutgoingRequest::Serialised(_))
            && let Some(pooled) = take()
        {
            return Ok((pooled, true));
        }
        if !endpoint.address.http2 {
            return Ok((self.open(endpoint, until).await?, false));
        }
        let permission = timeout_at(until, endpoint.pool.wait_to_open(self.worker)).await;
        // Do not record the failure: the task that opens the connection records it for outlier
        // detection.
        let _permission = permission.map_err(|_| ProxyError::ConnectTimeout)?;
        if let Some(pooled) = take() {
            return Ok((pooled, true));
        }
        let connection = self.open(endpoint, until).await?;
        let shared = connection.open_stream(timeouts).ok_or(ProxyError::Full)?;
        endpoint.put_back(self.worker, connection);
        Ok((Box::new(shared), false))
    }

    async fn open(
        &self,
        endpoint: &Arc<Endpoint>,
        until: Instant,
    ) -> Result<Box<UpstreamConnection>, ProxyError> {
        let opened = endpoint.connect(&self.current.settings, until).await;
        opened
            .map(Box::new)
            .inspect_err(|error| endpoint.record_failure(*error))
    }

    /// Describes a failed attempt for the retry policy.
    fn failed_attempt(
        &self,
        is_pooled: bool,
        stale: u32,
        progress: &UploadProgress,
    ) -> FailedAttempt {
        let max_bytes = self.current.settings.max_body.unwrap_or(u64::MAX);
        FailedAttempt {
            is_pooled,
            stale,
            upload_error: progress.error(max_bytes),
        }
    }

    /// Takes `connection` for the request, and applies the current settings to the connection.
    fn checkout(&self, mut connection: Box<UpstreamConnection>, active: ActiveRequest) -> Checkout {
        connection.update_settings(&self.current.settings);
        Checkout {
            connection,
            active,
            worker: self.worker,
        }
    }
}

/// Decides whether and where to resend a request that failed with `send_error` at `endpoint`. If
/// the endpoint caused the failure, records it for outlier detection.
fn after_failure(
    endpoint: &Arc<Endpoint>,
    send_error: SendError,
    attempt: FailedAttempt,
) -> Result<Resend<OutgoingRequest>, ProxyError> {
    let decision = retry::decide(send_error, attempt);
    if let Some(error) = decision.endpoint_error {
        endpoint.record_failure(error);
    }
    decision.action
}

/// The time in which a request must be connected to an endpoint, as set by the connect timeout. All
/// attempts of the request share this time, so several unresponsive endpoints do not delay the
/// request longer than one would.
struct ConnectBudget {
    total: Duration,
    remaining: Duration,
}

impl ConnectBudget {
    const fn new(total: Duration) -> Self {
        Self {
            total,
            remaining: total,
        }
    }

    /// Runs `attempt` with a deadline. An attempt at the last endpoint gets the whole remaining
    /// budget. Any other attempt gets half of it. Returns `None` if at most one eighth of the total
    /// budget is left.
    async fn spend<T>(
        &mut self,
        is_last: bool,
        attempt: impl AsyncFnOnce(Instant) -> T,
    ) -> Option<T> {
        if self.remaining <= self.total / 8 {
            return None;
        }
        let start = Instant::now();
        let tried = attempt(
            start
                + if is_last {
                    self.remaining
                } else {
                    self.remaining / 2
                },
        )
        .await;
        self.remaining = self.remaining.saturating_sub(start.elapsed());
        Some(tried)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep_until;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn several_unresponsive_endpoints_take_no_longer_than_one() {
        let start = Instant::now();
        let mut budget = ConnectBudget::new(Duration::from_secs(8));
        let mut tries = 0;
        while budget.spend(false, sleep_until).await.is_some() {
            tries += 1;
        }
        assert_eq!((tries, start.elapsed().as_secs()), (3, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_endpoint_gets_all_remaining_time() {
        for others in 0..=2 {
            let start = Instant::now();
            let mut budget = ConnectBudget::new(Duration::from_secs(8));
            for at in 0..=others {
                assert!(budget.spend(at == others, sleep_until).await.is_some());
            }
            assert!(budget.spend(true, sleep_until).await.is_none());
            assert_eq!(start.elapsed().as_secs(), 8);
        }
    }
}
