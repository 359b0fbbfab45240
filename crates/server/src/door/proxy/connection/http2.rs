//! HTTP/2: many requests at once, on a connection that is asked whether it is alive, and let go when it is idle.

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
use crate::net::{Activity, Bounds, Held, LiveStream};

/// The most requests at once on one connection.
const MAX_STREAMS: u32 = 128;

/// The most bytes of one answer that wait to be sent before its body is asked for more. A byte of room is enough to ask, so
/// two more pieces may wait, as they were read from an upstream (64 KiB): 18 MiB for all answers of a connection, beside what
/// was read ahead of them (`download`). A body that is not asked for `idle` is given up; its last piece stays until nothing
/// else has been asked for as long.
const MAX_SEND_BYTES: usize = 16 << 10;

/// The octets that a client may send before it waits: for one request, and for all of a connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;

/// How often a client must answer a ping, and in what time.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// How long a client may be silent, pings included.
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
        let stream = LiveStream::new(stream, bounds, self.connection.activity.clone());
        let asked = Rc::new(Asked::default());
        let answering = service_fn(|mut request: Request<Incoming>| {
            asked.count.set(asked.count.get() + 1);
            let underway = (
                Underway::new(&asked),
                self.count(&mut request),
                self.connection.activity.begin(),
            );
            let answered = |body| Taken::from_now(Held::new(body, underway));
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
        // Whoever has asked nothing so far may have begun to; but not for long.
        let longest = if asked.count.get() > 0 {
            times.idle
        } else {
            times.request_head
        };
        tokio::select! {
            biased;
            ended = serving => ended,
            // What is left of answers then is hyper's alone, which would wait forever for a client to take it.
            () = asked.rest(longest) => Ok(()),
            // At a shutdown a client that has had all of its answers is not waited for.
            () = asked.settled(&self.connection.activity), if is_shutdown => Ok(()),
        }
    }
}

/// How many requests have come on a connection, and are being answered, to the last piece of a body.
#[derive(Debug, Default)]
struct Asked {
    count: Cell<u64>,
    underway: Cell<usize>,
    /// When the last answer was handed to hyper, to its last piece.
    last_end: Cell<Option<Instant>>,
}

/// How long after its last piece an answer is taken to have arrived: hyper holds what waits for the client's window.
const ARRIVED_AFTER: Duration = Duration::from_secs(5);

impl Asked {
    /// Waits until nothing is underway, and the last answer has had time to arrive.
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

    /// Waits until nothing has been asked for `longest`, and nothing is underway; or nothing at all within `first`.
    async fn idle(&self, first: Duration, longest: Duration) {
        sleep(first).await;
        if self.count.get() > 0 {
            self.rest(longest).await;
        }
    }

    /// Waits until nothing has been asked and nothing was underway for `longest`, and less than twice that.
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

/// A request that is being answered, until all of its answer is on its way.
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
