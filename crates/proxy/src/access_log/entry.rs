//! The access log entry of a request. An entry covers the time from the arrival of the request head
//! to the end of the response.

use std::{
    convert::Infallible,
    error::Error,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use http::{Extensions, HeaderMap, HeaderName, Request, Response, header};
use hyper::body::{Body, Buf, Frame, Incoming, SizeHint};
use serde::Serialize;
use tidegate_config::Identity;
use tidegate_core::Timestamp;
use tidegate_limiter::ServerLimiter;
use tidegate_tower::DenialInfo;
use tower_service::Service;

use super::AccessLog;
use crate::{
    body_error::{BodyError, EarlyEnd},
    error::ErrorReason,
    upstream::{balancer::Upstream, endpoint::Endpoint},
};

/// The maximum length of a logged string from the client, in bytes.
const MAX_TEXT_BYTES: usize = 1_024;

/// The upstream and the endpoint of a request, stored as a response extension.
#[derive(Clone, Debug)]
pub(crate) struct LoggedUpstream {
    pub(crate) upstream: Box<str>,
    /// The endpoint to which the request was sent. After retries, the value is the last endpoint.
    pub(crate) endpoint: Option<Box<str>>,
}

impl LoggedUpstream {
    /// Returns the names of `upstream` and of the endpoint to which the request was sent.
    pub(crate) fn new(upstream: &Upstream, endpoint: Option<&Arc<Endpoint>>) -> Self {
        Self {
            upstream: upstream.name.clone(),
            endpoint: endpoint.map(|endpoint| endpoint.address.url.to_string().into()),
        }
    }
}

/// An upgraded connection (for example a WebSocket), stored as a response extension. The log entry
/// of the connection is written when the connection closes, for any reason.
#[derive(Clone, Debug, Default)]
pub(crate) struct UpgradedSession(Arc<SessionState>);

#[derive(Debug, Default)]
struct SessionState {
    entry: Mutex<Option<AccessLogEntry>>,
    received: Arc<AtomicU64>,
    sent: Arc<AtomicU64>,
    is_complete: AtomicBool,
}

impl UpgradedSession {
    /// Returns the counter of the bytes received from the client.
    pub(crate) fn received(&self) -> &Arc<AtomicU64> {
        &self.0.received
    }

    /// Returns the counter of the bytes sent to the client.
    pub(crate) fn sent(&self) -> &Arc<AtomicU64> {
        &self.0.sent
    }

    /// Records that both sides have closed normally.
    pub(crate) fn complete(&self) {
        self.0.is_complete.store(true, Ordering::Relaxed);
    }

    fn log(&self, entry: AccessLogEntry) {
        *self.0.entry.lock().unwrap_or_else(PoisonError::into_inner) = Some(entry);
    }
}

impl Drop for SessionState {
    fn drop(&mut self) {
        let entry = self.entry.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut entry) = entry.take() {
            entry.line.received = Some(self.received.load(Ordering::Relaxed));
            entry.line.bytes = self.sent.load(Ordering::Relaxed);
            entry.line.complete = self.is_complete.load(Ordering::Relaxed);
        }
    }
}

/// The logging context that all requests of a connection share.
#[derive(Debug)]
pub(crate) struct LogContext {
    pub(crate) log: AccessLog,
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) peer: IpAddr,
}

/// A service whose requests are logged.
#[derive(Clone, Debug)]
pub(crate) struct AccessLogService<S> {
    inner: S,
    context: Arc<LogContext>,
}

impl<S> AccessLogService<S> {
    pub(crate) fn new(inner: S, context: LogContext) -> Self {
        Self {
            inner,
            context: Arc::new(context),
        }
    }
}

impl<S, B> Service<Request<Incoming>> for AccessLogService<S>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    S::Future: 'static,
    B: Body,
{
    type Response = Response<LoggedBody<B>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let mut entry = AccessLogEntry::new(&self.context, &request);
        let response_future = self.inner.call(request);
        Box::pin(async move {
            let mut response = response_future.await?;
            entry.line.status = Some(response.status().as_u16());
            entry.line.grpc_status = grpc_status(response.headers());
            // hyper does not poll an empty body, so `poll_frame` would not set this field.
            entry.line.complete = response.body().is_end_stream();
            entry.take_extensions(response.extensions_mut());
            let entry = match response.extensions_mut().remove::<UpgradedSession>() {
                Some(session) => {
                    session.log(entry);
                    None
                }
                None => Some(entry),
            };
            Ok(response.map(|body| LoggedBody { body, entry }))
        })
    }
}

/// A response body that writes the log entry when the body ends. If the connection is upgraded, the
/// [`UpgradedSession`] has the entry and writes it.
#[derive(Debug)]
pub(crate) struct LoggedBody<B> {
    body: B,
    entry: Option<AccessLogEntry>,
}

impl<B> Body for LoggedBody<B>
where
    B: Body<Error: Error + 'static> + Unpin,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let is_end = self.body.is_end_stream();
        let Some(entry) = &mut self.entry else {
            return Poll::Ready(frame);
        };
        match &frame {
            Some(Ok(frame)) => {
                let bytes = frame.data_ref().map_or(0, Buf::remaining);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                entry.line.bytes = entry.line.bytes.saturating_add(bytes);
                if let Some(trailers) = frame.trailers_ref() {
                    entry.line.grpc_status = grpc_status(trailers).or(entry.line.grpc_status);
                }
            }
            Some(Err(error)) => {
                let error: &dyn Error = error;
                let error = error.downcast_ref::<BodyError>();
                entry.line.reason =
                    Some(error.map_or(EarlyEnd::BrokenOff.as_str(), BodyError::reason));
                entry.is_aborted = true;
            }
            None => {}
        }
        entry.line.complete = !entry.is_aborted && is_end;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A log entry. The entry is written when it is dropped, which happens at the end of the response
/// or when the client disconnects.
#[derive(Debug)]
struct AccessLogEntry {
    context: Arc<LogContext>,
    start: Timestamp,
    line: LogLine,
    is_aborted: bool,
}

/// The fields of a log line, in the order in which they are written.
#[derive(Debug, Serialize)]
struct LogLine {
    time: String,
    client: IpAddr,
    method: Box<str>,
    host: Option<Box<str>>,
    path: Box<str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<Box<str>>,
    version: &'static str,
    /// The response status; `None` if the client disconnected before the response.
    status: Option<u16>,
    /// The status of a gRPC call; `None` if the call was aborted before the status arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc_status: Option<u32>,
    bytes: u64,
    /// The number of bytes that the client sent over an upgraded connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    received: Option<u64>,
    /// Whether the whole response was forwarded.
    complete: bool,
    duration_us: u64,
    /// The name of the upstream; `None` if no upstream matched the request.
    upstream: Option<Box<str>>,
    /// The address of the endpoint; `None` if the request was not sent to an endpoint.
    address: Option<Box<str>>,
    /// The reason for a local reply or for an incomplete response; otherwise `None`.
    reason: Option<&'static str>,
    /// The rule that denied the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<Box<str>>,
    /// The values of the rule's key, hashed if `privacy` requires hashing.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Vec<Box<str>>>,
    user_agent: Option<Box<str>>,
}

impl AccessLogEntry {
    fn new(context: &Arc<LogContext>, request: &Request<Incoming>) -> Self {
        let (uri, headers) = (request.uri(), request.headers());
        let host = uri.host().map(cut);
        let query = uri.query().filter(|_| context.log.query);
        Self {
            start: context.limiter.now(),
            is_aborted: false,
            line: LogLine {
                time: String::new(),
                client: context.identity.trust.client_ip(context.peer, headers),
                method: cut(request.method().as_str()),
                host: host.or_else(|| text(headers, &header::HOST)),
                path: cut(uri.path()),
                query: query.map(cut),
                version: match request.version() {
                    http::Version::HTTP_2 => "HTTP/2",
                    http::Version::HTTP_10 => "HTTP/1.0",
                    _ => "HTTP/1.1",
                },
                status: None,
                grpc_status: None,
                bytes: 0,
                received: None,
                complete: false,
                duration_us: 0,
                upstream: None,
                address: None,
                reason: None,
                rule: None,
                key: None,
                user_agent: text(headers, &header::USER_AGENT),
            },
            context: Arc::clone(context),
        }
    }
}

impl AccessLogEntry {
    /// Moves the fields that the proxy stored in the response's `extensions` into the entry.
    fn take_extensions(&mut self, extensions: &mut Extensions) {
        if let Some(LoggedUpstream { upstream, endpoint }) = extensions.remove() {
            (self.line.upstream, self.line.address) = (Some(upstream), endpoint);
        }
        self.line.reason = extensions.remove().map(|ErrorReason(reason)| reason);
        if let Some(denied) = extensions.remove::<DenialInfo>() {
            self.line.reason = Some(denied.reason.as_str());
            if self.context.log.key {
                let mask = self.context.limiter.key_mask();
                let values = denied.key.iter();
                self.line.key = Some(values.map(|value| mask.value(value).into()).collect());
            }
            self.line.rule = denied.rule;
        }
    }
}

impl Drop for AccessLogEntry {
    fn drop(&mut self) {
        let now = self.context.limiter.now();
        self.line.duration_us = now.as_micros().saturating_sub(self.start.as_micros());
        let start = i64::try_from(self.start.as_micros()).ok();
        let start = start.and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
        self.line.time = start.map_or_else(String::new, |start| format!("{start:.6}"));
        // Serialising numbers and strings cannot fail.
        if let Ok(mut line) = serde_json::to_string(&self.line) {
            line.push('\n');
            self.context.log.write(line);
        }
    }
}

/// Returns the gRPC status from the headers or trailers of a response.
fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<Box<str>> {
    let value = headers.get(name)?;
    Some(cut(&String::from_utf8_lossy(value.as_bytes())))
}

/// Returns `text`, truncated to at most [`MAX_TEXT_BYTES`] bytes.
fn cut(text: &str) -> Box<str> {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].into()
}
