//! HTTP/2 with clients: concurrent requests, pings, and an idle timeout.

use std::{cell::Cell, convert::Infallible, pin::pin, rc::Rc, time::Duration};

use futures_util::TryFutureExt as _;
use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep, sleep_until},
};
use tower_service::Service;

use super::{
    super::taken::{Streams, Taken},
    Client,
};
use crate::net::{Activity, Bounds, GuardedBody, ReadTimeoutStream};

/// The maximum number of concurrent streams per connection.
const MAX_STREAMS: u32 = 128;

/// The send buffer per stream, in bytes.
///
/// hyper polls a body again when one byte of it is free. Up to two more frames, each as read from
/// an upstream (64 KiB), may then be buffered. That is 18 MiB for all streams of a connection,
/// besides what `download` reads ahead. A body that hyper has not polled for the `idle` timeout is
/// dropped. Its last frame stays buffered until the connection has had no requests for as long.
const MAX_SEND_BYTES: usize = 16 << 10;

/// The flow-control windows in bytes, per stream and per connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;

/// How often to ping the client, and how long to wait for the reply.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// How long a client may send nothing at all, ping replies included.
const SILENCE: Duration = Duration::from_secs(60);

impl Client {
    pub(super) async fn serve_http2<T, S, B>(self, stream: T, service: S) -> hyper::Result<()>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let times = self.settings.timeouts;
        let bounds = Bounds {
            request: times.request_head,
            idle: SILENCE,
            write: times.idle,
            ..self.connection.bounds
        };
        let stream = ReadTimeoutStream::new(stream, bounds, self.connection.activity.clone());
        let asked = Rc::new(Asked::default());
        let answering = service_fn(|mut request: Request<Incoming>| {
            asked.count.set(asked.count.get() + 1);
            let underway = (
                Underway::new(&asked),
                self.count(&mut request),
                self.connection.activity.begin(),
            );
            let answered = |body| Taken::from_now(GuardedBody::new(body, underway));
            let answering = service.clone().call(request);
            answering.map_ok(|answer| answer.map(answered))
        });
        let max_head = u32::try_from(self.settings.max_head).unwrap_or(u32::MAX);
        let serving = http2::Builder::new(Streams(times.idle))
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(max_head)
            .max_send_buf_size(MAX_SEND_BYTES)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_WITHIN)
            .serve_connection(TokioIo::new(stream), answering);
        let mut serving = pin!(serving);
        let mut is_shutdown = false;
        tokio::select! {
            biased;
            ended = serving.as_mut() => return ended,
            () = self.connection.shutdown.begun() => is_shutdown = true,
            () = asked.idle(times.request_head, times.keep_alive) => {}
        }
        serving.as_mut().graceful_shutdown();
        // A client without a request so far may be sending its first; it gets the head timeout.
        let longest = if asked.count.get() > 0 {
            times.idle
        } else {
            times.request_head
        };
        tokio::select! {
            biased;
            ended = serving => ended,
            // The remaining response bytes are in hyper's buffers. hyper would wait forever for a
            // client that does not read them.
            () = asked.rest(longest) => Ok(()),
            // At shutdown, clients that have received all responses are not waited for.
            () = asked.settled(&self.connection.activity), if is_shutdown => Ok(()),
        }
    }
}

/// The requests of a connection: how many have come, and how many are in flight. A request is in
/// flight until the last frame of its response is handed to hyper.
#[derive(Debug, Default)]
struct Asked {
    count: Cell<u64>,
    underway: Cell<usize>,
    /// When the last frame of the last response was handed to hyper.
    last_end: Cell<Option<Instant>>,
}

/// How long to wait after the last frame until the response counts as delivered. hyper may hold
/// bytes back until the client's flow-control window opens, and does not say so.
const ARRIVED_AFTER: Duration = Duration::from_secs(5);

impl Asked {
    /// Waits until no request is in flight and the last response has had time to arrive.
    async fn settled(&self, activity: &Activity) {
        loop {
            activity.drained().await;
            if let Some(end) = self.last_end.get() {
                sleep_until(end + ARRIVED_AFTER).await;
            }
            if self.underway.get() == 0
                && self
                    .last_end
                    .get()
                    .is_none_or(|end| end.elapsed() >= ARRIVED_AFTER)
            {
                return;
            }
        }
    }

    /// Waits until the connection has been idle for `longest`, or until it had no request within
    /// `first`.
    async fn idle(&self, first: Duration, longest: Duration) {
        sleep(first).await;
        if self.count.get() > 0 {
            self.rest(longest).await;
        }
    }

    /// Waits until no request has come or been in flight for at least `longest`, and less than
    /// twice that.
    async fn rest(&self, longest: Duration) {
        let mut before = None;
        loop {
            let now = (self.underway.get() == 0).then_some(self.count.get());
            if now.is_some() && now == before {
                return;
            }
            before = now;
            sleep(longest).await;
        }
    }
}

/// A request in flight, until the last frame of its response is handed to hyper.
struct Underway(Rc<Asked>);

impl Underway {
    fn new(asked: &Rc<Asked>) -> Self {
        asked.underway.set(asked.underway.get() + 1);
        Self(Rc::clone(asked))
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.underway.set(self.0.underway.get() - 1);
        self.0.last_end.set(Some(Instant::now()));
    }
}
