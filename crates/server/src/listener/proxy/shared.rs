//! An HTTP/2 connection to an upstream, shared by as many requests as the upstream allows.
//!
//! hyper would accept any number of requests and queue those above the upstream's
//! `SETTINGS_MAX_CONCURRENT_STREAMS`. A queued request would look like one that the upstream does
//! not answer. So the streams are counted here, and when all are in use, another connection is
//! opened.

use std::{
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::task::AtomicWaker;
use http::header::CONTENT_LENGTH;
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{
        TrySendError,
        http2::{self, Connection},
    },
    rt::Executor,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};

use super::{
    body::Upload,
    lines,
    taken::{Taken, watched},
};
use crate::{config::Proxy, net::WriteTimeoutStream};

/// The maximum number of concurrent streams per connection, even if the upstream allows more.
const MOST_STREAMS: usize = 100;

/// The flow-control windows in bytes, per stream and per connection. The connection window exceeds
/// [`MOST_STREAMS`] stream windows, so that unread responses never block the others. Slow readers
/// may therefore keep 25 MiB buffered per connection: 25 GiB for 1,024 connections to an upstream.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 128 * STREAM_WINDOW;

/// How often to ping the upstream, and how long to wait for the reply.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// A handle to a shared HTTP/2 connection.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    sender: http2::SendRequest<Taken<Upload>>,
    room: Arc<Room>,
    max_headers: usize,
}

/// The concurrent streams of a connection: used and allowed.
#[derive(Debug)]
struct Room {
    /// The upstream's most recent `SETTINGS_MAX_CONCURRENT_STREAMS`.
    most: watch::Receiver<usize>,
    streams: AtomicUsize,
    /// Whether the connection is suspect: a response timed out, and nothing has arrived since.
    is_doubtful: AtomicBool,
    /// Whether any response has ever arrived.
    has_answered: AtomicBool,
}

/// Why there is no response. Contains the request if sending has not begun.
pub(super) type Refused = TrySendError<Request<Taken<Upload>>>;

/// The reservation of one stream; released on drop.
#[derive(Debug)]
pub(super) struct Stream(Arc<Room>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    /// Opens an HTTP/2 connection on `stream`, and waits for the upstream's `SETTINGS`.
    ///
    /// # Errors
    ///
    /// The peer does not speak HTTP/2.
    pub(super) async fn begin<S>(stream: S, settings: &Proxy) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let stream = TokioIo::new(WriteTimeoutStream::new(stream, settings.timeouts.idle));
        let max_head = u32::try_from(settings.max_head).unwrap_or(u32::MAX);
        let wake = Wake::new(settings.timeouts.idle);
        let (sender, connection) = http2::Builder::new(wake.clone())
            .timer(TokioTimer::new())
            .max_header_list_size(max_head)
            // Send nothing before the upstream's `SETTINGS` have arrived.
            .initial_max_send_streams(0)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_WITHIN)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        let (say, mut most) = watch::channel(0);
        tokio::task::spawn_local(drive(connection, say, wake));
        let said = most.wait_for(|most| *most > 0).await.map(drop);
        said.map_err(|_| io::Error::other("the upstream does not support HTTP/2"))?;
        let room = Room {
            most,
            streams: AtomicUsize::new(0),
            is_doubtful: AtomicBool::new(false),
            has_answered: AtomicBool::new(false),
        };
        Ok(Self {
            sender,
            room: Arc::new(room),
            max_headers: settings.max_headers,
        })
    }

    /// Returns whether the connection takes no more requests: it is closed, or it is suspect and
    /// has no request left whose response could clear it.
    pub(super) fn is_over(&self) -> bool {
        self.sender.is_closed() || self.is_doubtful() && !self.is_busy()
    }

    fn is_doubtful(&self) -> bool {
        self.room.is_doubtful.load(Ordering::Relaxed)
    }

    /// Returns whether requests are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.room.streams.load(Ordering::Relaxed) > 0
    }

    /// Reserves a stream; `None` if all are in use or the connection is suspect.
    pub(super) fn enter(&self) -> Option<Arc<Stream>> {
        if self.is_doubtful() {
            return None;
        }
        let most = MOST_STREAMS.min(*self.room.most.borrow());
        let below = |count: usize| (count < most).then_some(count + 1);
        let streams = &self.room.streams;
        streams
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, below)
            .ok()?;
        Some(Arc::new(Stream(Arc::clone(&self.room))))
    }

    /// Marks the connection as suspect: it may be dead. It takes no more requests until something
    /// arrives for those in flight.
    pub(super) fn doubt(&self) {
        self.room.is_doubtful.store(true, Ordering::Relaxed);
    }

    /// Marks the connection as alive: part of a response has arrived.
    pub(super) fn heard(&self) {
        if self.is_doubtful() {
            self.room.is_doubtful.store(false, Ordering::Relaxed);
        }
        if !self.has_answered() {
            self.room.has_answered.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether any response has ever arrived. After that, the upstream may close the
    /// connection at any time.
    pub(super) fn has_answered(&self) -> bool {
        self.room.has_answered.load(Ordering::Relaxed)
    }

    /// Returns whether the response has at most `max_headers` header lines and at most one
    /// `Content-Length`. hyper does not limit the number of header lines in HTTP/2.
    pub(super) fn takes(&self, answer: &Response<Incoming>) -> bool {
        let headers = answer.headers();
        headers.len() <= self.max_headers && !lines::is_repeated(headers, &CONTENT_LENGTH)
    }

    /// Sends a request for which a stream is reserved.
    pub(super) fn send(
        &mut self,
        request: Request<Upload>,
    ) -> impl Future<Output = Result<Response<Incoming>, Refused>> + use<> {
        let request = request.map(Taken::new);
        let stop = request.body().stop();
        request.body().inner().ended_by(stop);
        self.sender.try_send_request(request)
    }
}

/// Drives a connection until it ends, and publishes how many streams the upstream allows.
async fn drive<S>(
    connection: Connection<S, Taken<Upload>, Wake>,
    say: watch::Sender<usize>,
    wake: Wake,
) where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + 'static,
{
    let mut connection = pin!(connection);
    let ended = poll_fn(|cx| {
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(ended);
        }
        let most = connection.current_max_send_streams();
        say.send_if_modified(|known| std::mem::replace(known, most) != most);
        if most == 0 {
            wake.waker.register(cx.waker());
        }
        Poll::Pending
    });
    if let Err(error) = ended.await {
        tracing::debug!("upstream connection closed: {error}");
    }
}

/// An executor that runs hyper's tasks of a connection on this thread.
///
/// After each poll it wakes [`drive`] if that waits for the upstream's `SETTINGS`. Later changes
/// need no wake: each request polls the connection. It also drops the task of a body of which the
/// upstream accepts nothing for `longest`.
#[derive(Clone, Debug)]
struct Wake {
    waker: Arc<AtomicWaker>,
    longest: Duration,
}

impl Wake {
    fn new(longest: Duration) -> Self {
        Self {
            waker: Arc::default(),
            longest,
        }
    }
}

impl<F> Executor<F> for Wake
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        let waker = Arc::clone(&self.waker);
        let future = watched(future, self.longest);
        drop(tokio::task::spawn_local(async move {
            let mut future = pin!(future);
            poll_fn(|cx| {
                let polled = future.as_mut().poll(cx);
                waker.wake();
                polled
            })
            .await;
        }));
    }
}
