//! HTTP/2 connections from clients: concurrent requests, pings, and an idle timeout.

use std::{cell::Cell, convert::Infallible, pin::pin, rc::Rc, time::Duration};

use futures_util::TryFutureExt as _;
use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tidegate_net::{Activity, GuardedBody, Http2Stream, StreamTimeouts, WriteTimeout};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep, sleep_until},
};
use tower_service::Service;

use super::ClientConnection;
use crate::write_stall::{StreamExecutor, WatchedBody};

/// The maximum number of concurrent streams per connection.
const MAX_STREAMS: u32 = 128;

/// The send buffer per stream, in bytes.
///
/// hyper polls a body again as soon as one byte of the buffer is free. When hyper polls again, two
/// more frames may be buffered. A frame has up to 64 KiB, which is the maximum size of a read from
/// an upstream. In total, the buffers of all streams of a connection hold at most 18 MiB, in
/// addition to the bytes that `response_body` reads ahead.
///
/// If hyper does not poll a body for the `idle` timeout, the body is dropped. If the client does
/// not read the last frame of a body, the frame stays in the buffer until the connection has had no
/// requests for the `idle` timeout.
const MAX_SEND_BYTES: usize = 16 << 10;

/// The size of the flow-control window of a stream, in bytes.
const STREAM_WINDOW: u32 = 256 << 10;
/// The size of the flow-control window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 1 << 20;

/// The interval between pings to the client.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The timeout for the client's reply to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum time without any bytes from the client. Even an idle client sends ping replies.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

impl ClientConnection {
    pub(super) async fn serve_http2<T, S, B>(self, stream: T, service: S) -> hyper::Result<()>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let timeouts = self.settings.timeouts;
        let stream_timeouts = StreamTimeouts {
            idle: READ_TIMEOUT,
            request: timeouts.request_head,
            write: WriteTimeout::Stall(timeouts.idle),
        };
        let activity = self.connection.activity.clone();
        let stream = Http2Stream::new(stream, stream_timeouts, activity);
        let requests = Rc::new(ConnectionRequests::default());
        let handler = service_fn(|mut request: Request<Incoming>| {
            requests.count.set(requests.count.get() + 1);
            let in_flight = (
                StreamRequest::new(&requests),
                self.count_request(&mut request),
                self.connection.activity.begin(),
            );
            let watched = |body| WatchedBody::waiting_from_now(GuardedBody::new(body, in_flight));
            let response = service.clone().call(request);
            response.map_ok(|response| response.map(watched))
        });
        let max_head = u32::try_from(self.settings.max_head).unwrap_or(u32::MAX);
        let serving = http2::Builder::new(StreamExecutor(timeouts.idle))
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(max_head)
            .max_send_buf_size(MAX_SEND_BYTES)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .serve_connection(TokioIo::new(stream), handler);
        let mut serving = pin!(serving);
        let mut is_shutdown = false;
        tokio::select! {
            biased;
            ended = serving.as_mut() => return ended,
            () = self.connection.shutdown_begun() => is_shutdown = true,
            () = requests.wait_idle(timeouts.request_head, timeouts.keep_alive) => {}
        }
        serving.as_mut().graceful_shutdown();
        // A client without any request so far may still be sending its first one, so the head
        // timeout applies.
        let timeout = if requests.count.get() > 0 {
            timeouts.idle
        } else {
            timeouts.request_head
        };
        tokio::select! {
            biased;
            ended = serving => ended,
            // The remaining response bytes are in hyper's buffers. Without this timeout, hyper
            // would wait forever for a client that does not read these bytes.
            () = requests.wait_quiet(timeout) => Ok(()),
            // On shutdown, the connection closes as soon as the client has received all responses.
            () = requests.wait_delivered(&self.connection.activity), if is_shutdown => Ok(()),
        }
    }
}

/// The requests of a connection: the total number, and the number in flight. A request is in flight
/// until the last frame of its response is handed to hyper.
#[derive(Debug, Default)]
struct ConnectionRequests {
    count: Cell<u64>,
    in_flight: Cell<usize>,
    /// The time when the last frame of the most recent response was handed to hyper.
    last_end: Cell<Option<Instant>>,
}

/// A response counts as delivered when this time has passed since hyper received its last frame.
/// hyper may hold bytes back until the client's flow-control window opens, and does not report when
/// it has sent them.
const DELIVERY_DELAY: Duration = Duration::from_secs(5);

impl ConnectionRequests {
    /// Waits until no request is in flight and [`DELIVERY_DELAY`] has passed since the last
    /// response.
    async fn wait_delivered(&self, activity: &Activity) {
        loop {
            activity.drained().await;
            if let Some(end) = self.last_end.get() {
                sleep_until(end + DELIVERY_DELAY).await;
            }
            if self.in_flight.get() == 0
                && self
                    .last_end
                    .get()
                    .is_none_or(|end| end.elapsed() >= DELIVERY_DELAY)
            {
                return;
            }
        }
    }

    /// Waits until the connection has been idle for `timeout`. If no request has arrived within
    /// `first`, returns after `first`.
    async fn wait_idle(&self, first: Duration, timeout: Duration) {
        sleep(first).await;
        if self.count.get() > 0 {
            self.wait_quiet(timeout).await;
        }
    }

    /// Waits until the connection has had no requests for `timeout`. May wait for up to one more
    /// `timeout`.
    async fn wait_quiet(&self, timeout: Duration) {
        let mut before = None;
        loop {
            let now = (self.in_flight.get() == 0).then_some(self.count.get());
            if now.is_some() && now == before {
                return;
            }
            before = now;
            sleep(timeout).await;
        }
    }
}

/// A request on an HTTP/2 stream. The request counts as in flight until the last frame of its
/// response is handed to hyper.
struct StreamRequest(Rc<ConnectionRequests>);

impl StreamRequest {
    fn new(requests: &Rc<ConnectionRequests>) -> Self {
        requests.in_flight.set(requests.in_flight.get() + 1);
        Self(Rc::clone(requests))
    }
}

impl Drop for StreamRequest {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        self.0.last_end.set(Some(Instant::now()));
    }
}
