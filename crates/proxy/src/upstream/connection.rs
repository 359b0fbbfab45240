//! An upstream connection: sends a request and waits for the response head.

use std::{
    error::Error,
    fmt::Display,
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::{
    Request, Response,
    body::{Body as _, Frame, Incoming},
};
use tidegate_config::{Proxy, Timeouts};
use tidegate_net::LazyTimer;
use tokio::time::Instant;

use super::{
    connect::Protocol,
    connection_slot::ConnectionSlot,
    h1::{Http1Connection, RequestWriter},
    repeatable::is_repeatable,
};
use crate::{
    error::ProxyError,
    headers::forwarded::ForwardingHeaders,
    request_body::{Upload, UploadProgress},
    stream_slots::StreamSlot,
    write_stall::WatchedBody,
};

/// A connection to an upstream: an HTTP/1.1 connection or a handle to a shared HTTP/2 connection.
/// The connection is either in the pool, or in use by one request.
#[derive(Debug)]
pub(crate) struct UpstreamConnection {
    protocol: Protocol,
    /// The request's HTTP/2 stream; `None` if the connection uses HTTP/1.1 or is in the pool.
    stream: Option<Arc<StreamSlot>>,
    /// The timer for the response head timeout. An HTTP/1.1 connection reuses the timer for each of
    /// its requests.
    timer: LazyTimer,
    slot: Arc<ConnectionSlot>,
}

/// A request to send, and what was already tried with it.
pub(crate) enum OutgoingRequest {
    /// A request of which nothing has been sent yet.
    New(Box<Request<Upload>>),
    /// An idempotent request whose first HTTP/2 connection closed before the response arrived. The
    /// request is sent a second time, but not a third time.
    Resent(Box<Request<Upload>>),
    /// A request that was already serialised for an HTTP/1.1 connection, but the connection turned
    /// out to be closed.
    Serialised(Box<RequestWriter>),
}

/// The source of a response body.
#[derive(Debug)]
pub(crate) enum ResponseSource {
    /// The HTTP/1.1 connection. An HTTP/1.1 connection serves only one request at a time.
    Http1,
    /// An HTTP/2 stream.
    Http2(Incoming),
}

/// The reason why a request received no response.
pub(crate) enum SendError<R = OutgoingRequest> {
    /// The connection was closed or was about to close. The request may be sent on another
    /// connection: either the upstream did not process it, or it is repeatable.
    Retryable(R),
    /// A reused connection was closed while the request was in flight. The upstream may have
    /// processed the request, and the request is not repeatable.
    Lost,
    /// The request has failed with this error.
    Failed(ProxyError),
}

impl From<ProxyError> for SendError {
    fn from(error: ProxyError) -> Self {
        Self::Failed(error)
    }
}

impl UpstreamConnection {
    /// Creates a connection that uses `protocol`. The connection counts towards the endpoint's
    /// connection limit until `slot` is dropped.
    pub(crate) fn new(protocol: Protocol, slot: ConnectionSlot, settings: &Proxy) -> Self {
        Self {
            protocol,
            stream: None,
            timer: LazyTimer::new(settings.timeouts.head),
            slot: Arc::new(slot),
        }
    }

    /// Returns whether the connection accepts no more requests, because the upstream has closed it
    /// or no longer responds.
    pub(crate) fn probe_unusable(&mut self) -> bool {
        match &mut self.protocol {
            Protocol::Http1(connection) => connection.probe_closed(),
            Protocol::Http2(connection) => connection.is_unusable(),
        }
    }

    /// Returns whether the connection can accept a request.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.protocol {
            Protocol::Http1(connection) => connection.is_ready(),
            Protocol::Http2(connection) => !connection.is_unusable(),
        }
    }

    /// Returns whether requests are in flight on the connection. A pooled HTTP/2 connection may
    /// also have requests in flight.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(&self.protocol, Protocol::Http2(connection) if connection.is_busy())
    }

    /// Opens a stream for another request on this HTTP/2 connection. Returns `None` if all streams
    /// are in use.
    pub(crate) fn open_stream(&self, timeouts: &Timeouts) -> Option<Self> {
        let Protocol::Http2(connection) = &self.protocol else {
            return None;
        };
        Some(Self {
            stream: Some(connection.reserve_stream()?),
            protocol: Protocol::Http2(connection.clone()),
            timer: LazyTimer::new(timeouts.head),
            slot: Arc::clone(&self.slot),
        })
    }

    /// Applies `settings` to later requests. An HTTP/2 connection keeps the settings with which it
    /// was opened.
    pub(crate) fn update_settings(&mut self, settings: &Proxy) {
        if let Some(connection) = self.http1() {
            connection.update_settings(settings);
        }
    }

    /// Starts sending `request` on an HTTP/1.1 connection. The timeout for the response head starts
    /// at `now`. Call [`Self::response_head`] to wait for the response. If the connection uses
    /// HTTP/2, returns the request without sending it.
    pub(crate) fn start(
        &mut self,
        request: Request<Upload>,
        forwarding: &ForwardingHeaders,
        timeouts: &Timeouts,
        now: Instant,
    ) -> Result<(), Box<Request<Upload>>> {
        let Protocol::Http1(connection) = &mut self.protocol else {
            return Err(Box::new(request));
        };
        self.timer.set_from(now, timeouts.head);
        connection.start(request, Some(forwarding));
        Ok(())
    }

    /// Waits for the response head of the request that [`Self::start`] is sending.
    pub(crate) async fn response_head(
        &mut self,
        progress: &UploadProgress,
        timeouts: &Timeouts,
    ) -> Result<Response<ResponseSource>, SendError> {
        let Protocol::Http1(connection) = &mut self.protocol else {
            return Err(ProxyError::BadResponse.into());
        };
        let head_future = poll_fn(|cx| connection.poll_head(cx));
        let sender = BodySender::SameTask;
        let response =
            with_head_timeout(head_future, &mut self.timer, progress, sender, timeouts).await?;
        match response {
            Ok(response) => Ok(response.map(|()| ResponseSource::Http1)),
            Err(error) if connection.is_stale() && is_disconnect_kind(error.kind()) => {
                Err(match connection.take_for_retry() {
                    Some(again) => {
                        SendError::Retryable(OutgoingRequest::Serialised(Box::new(again)))
                    }
                    None => SendError::Lost,
                })
            }
            Err(error) => Err(bad_response(error).into()),
        }
    }

    /// Sends `outgoing` and waits for the response head. Over HTTP/2, `forwarding` is not used,
    /// because the request already contains the forwarding headers.
    pub(crate) async fn send(
        &mut self,
        outgoing: OutgoingRequest,
        forwarding: &ForwardingHeaders,
        progress: &UploadProgress,
        timeouts: &Timeouts,
    ) -> Result<Response<ResponseSource>, SendError> {
        match (&mut self.protocol, outgoing) {
            (Protocol::Http1(connection), OutgoingRequest::New(request)) => {
                connection.start(*request, Some(forwarding));
            }
            (Protocol::Http1(connection), OutgoingRequest::Serialised(request)) => {
                connection.resend(*request)
            }
            (Protocol::Http2(connection), OutgoingRequest::New(request)) => {
                let again = connection
                    .has_responded()
                    .then(|| copy_for_retry(&request))
                    .flatten();
                let result = self.send_on_stream(*request, progress, timeouts).await;
                return result.map_err(|error| match (error, again) {
                    (SendError::Lost, Some(again)) => {
                        SendError::Retryable(OutgoingRequest::Resent(again))
                    }
                    (error, _) => error,
                });
            }
            (Protocol::Http2(_), OutgoingRequest::Resent(request)) => {
                return self.send_on_stream(*request, progress, timeouts).await;
            }
            // The request was prepared for a different HTTP version than the connection uses. All
            // endpoints of an upstream use the same version, so the versions cannot differ.
            (_, outgoing) => return Err(SendError::Retryable(outgoing)),
        }
        self.timer.set(timeouts.head);
        self.response_head(progress, timeouts).await
    }

    /// Sends `request` on a stream of an HTTP/2 connection.
    async fn send_on_stream(
        &mut self,
        mut request: Request<Upload>,
        progress: &UploadProgress,
        timeouts: &Timeouts,
    ) -> Result<Response<ResponseSource>, SendError> {
        let Protocol::Http2(connection) = &mut self.protocol else {
            return Err(SendError::Retryable(OutgoingRequest::New(Box::new(
                request,
            ))));
        };
        // After its first response on a connection, the upstream may close the connection at any
        // time.
        let was_used = connection.has_responded();
        request.body_mut().set_stream(self.stream.clone());
        self.timer.set(timeouts.head);
        let sender = BodySender::OtherTask;
        let result = with_head_timeout(
            connection.send(request),
            &mut self.timer,
            progress,
            sender,
            timeouts,
        )
        .await;
        let result = result.inspect_err(|_| connection.mark_suspect())?;
        let response = result.map_err(|mut error| match error.take_message() {
            Some(request) => SendError::Retryable(OutgoingRequest::New(Box::new(
                request.map(WatchedBody::into_inner),
            ))),
            None if was_used && is_disconnect(error.error()) => SendError::Lost,
            None => bad_response(error.into_error()).into(),
        })?;
        connection.mark_alive();
        if !connection.accepts(&response) {
            return Err(bad_response(
                "the response has too many header lines, or several content lengths",
            )
            .into());
        }
        Ok(response.map(ResponseSource::Http2))
    }

    /// Records that more of a response has arrived from [`ResponseSource::Http2`], which shows that
    /// the connection is alive.
    pub(crate) fn mark_alive(&self) {
        if let Protocol::Http2(connection) = &self.protocol {
            connection.mark_alive();
        }
    }

    /// Polls the next frame of a response body from [`ResponseSource::Http1`].
    pub(crate) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.http1()
            .map_or(Poll::Ready(None), |connection| connection.poll_body(cx))
    }

    /// Takes the response body from [`ResponseSource::Http1`], if the whole body has arrived and is
    /// not chunked.
    pub(crate) fn take_complete_body(&mut self) -> Option<Bytes> {
        self.http1()?.take_complete_body()
    }

    /// Takes the next part of the response body, if it has already arrived.
    pub(crate) fn take_buffered_frame(&mut self) -> Option<Frame<Bytes>> {
        self.http1()?.take_buffered_frame()
    }

    /// Returns the number of remaining bytes of the response body, if known.
    pub(crate) fn remaining(&self) -> Option<u64> {
        match &self.protocol {
            Protocol::Http1(connection) => connection.remaining(),
            Protocol::Http2(_) => None,
        }
    }

    /// Returns the HTTP/1.1 client of the connection; `None` for HTTP/2.
    pub(crate) fn http1(&mut self) -> Option<&mut Http1Connection> {
        match &mut self.protocol {
            Protocol::Http1(connection) => Some(connection),
            Protocol::Http2(_) => None,
        }
    }
}

/// Returns whether an I/O error of this kind means that the connection is closed.
const fn is_disconnect_kind(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::NotConnected
    )
}

/// Returns whether `error` means that the whole connection is closed, and not only one of its
/// streams.
fn is_disconnect(error: &hyper::Error) -> bool {
    let cause = error
        .source()
        .and_then(<dyn Error>::downcast_ref::<io::Error>);
    cause.is_some_and(|cause| is_disconnect_kind(cause.kind()))
}

/// Copies `request` for a retry, if the request is idempotent and has no body.
fn copy_for_retry(request: &Request<Upload>) -> Option<Box<Request<Upload>>> {
    if !is_repeatable(request.method(), !request.body().is_end_stream()) {
        return None;
    }
    let mut again = Request::new(Upload::empty());
    again.method_mut().clone_from(request.method());
    again.uri_mut().clone_from(request.uri());
    *again.version_mut() = request.version();
    again.headers_mut().clone_from(request.headers());
    Some(Box::new(again))
}

fn bad_response(error: impl Display) -> ProxyError {
    tracing::debug!("no valid response: {error}");
    ProxyError::BadResponse
}

/// The task that sends the request body.
#[derive(Clone, Copy, Debug)]
enum BodySender {
    /// The task that waits for the response also sends the body.
    SameTask,
    /// Another task sends the body. That task must wake the task that waits for the response.
    OtherTask,
}

/// Waits for `future`. Fails with [`ProxyError::HeadTimeout`] if it takes too long after the end of
/// the request body.
async fn with_head_timeout<A>(
    future: impl Future<Output = A>,
    timer: &mut LazyTimer,
    progress: &UploadProgress,
    sender: BodySender,
    timeouts: &Timeouts,
) -> Result<A, ProxyError> {
    let mut future = pin!(future);
    let mut is_sending = progress.is_sending();
    poll_fn(|cx| {
        if let Poll::Ready(response) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(response));
        }
        // While the upstream is still receiving the body, the timeout does not run.
        if is_sending {
            is_sending = match sender {
                BodySender::SameTask => progress.is_sending(),
                BodySender::OtherTask => progress.poll_is_sending(cx),
            };
            timer.set(timeouts.head);
        }
        ready!(timer.poll_due(cx));
        Poll::Ready(Err(ProxyError::HeadTimeout))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use tidegate_config::Config;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_response_timeout_starts_at_the_end_of_the_request() {
        let text = "proxy: {listen: '127.0.0.1:0', timeouts: {head: 3s}, upstreams: [{name: app, urls: 'http://h'}]}";
        let timeouts = Config::parse(text).unwrap().proxy.unwrap().timeouts;
        for sends_for in [0, 1, 2, 7] {
            let progress = UploadProgress::started();
            let sent = progress.clone();
            // As with an HTTP/2 body, another task sends this body.
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(sends_for)).await;
                sent.end();
            });
            let start = Instant::now();
            let mut timer = LazyTimer::new(timeouts.head);
            let sender = BodySender::OtherTask;
            let result =
                with_head_timeout(pending::<()>(), &mut timer, &progress, sender, &timeouts).await;
            assert!(matches!(result, Err(ProxyError::HeadTimeout)));
            assert_eq!(start.elapsed().as_secs(), sends_for + 3);
        }
    }
}
