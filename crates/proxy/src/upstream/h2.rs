//! A shared HTTP/2 connection to an upstream, for as many concurrent requests as the upstream
//! allows.
//!
//! hyper would accept any number of requests and queue the requests above the upstream's
//! `SETTINGS_MAX_CONCURRENT_STREAMS`. The proxy could then not distinguish a queued request from a
//! request to which the upstream does not respond. Therefore, this module counts the streams, and
//! the proxy opens another connection when all streams are in use.

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
use tidegate_config::Proxy;
use tidegate_net::{TimedStream, WriteTimeout};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};

use super::interim::{InterimLimitStream, MAX_STREAMS};
use crate::{
    headers::lookup,
    request_body::Upload,
    stream_slots::{StreamSlot, StreamSlots},
    write_stall::{WatchedBody, with_write_timeout},
};

/// The size of the flow-control window of a stream, in bytes. The connection window exceeds
/// [`MAX_STREAMS`] stream windows, so that unread responses never block other responses.
///
/// As a result, slow clients can cause up to 25 MiB of buffered response data per connection, which
/// is 25 GiB for 1,024 connections to an upstream.
const STREAM_WINDOW: u32 = 256 << 10;
/// The size of the flow-control window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 128 * STREAM_WINDOW;

/// The interval between pings to the upstream.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The timeout for the upstream's reply to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A handle to a shared HTTP/2 connection.
#[derive(Clone, Debug)]
pub(crate) struct Http2Connection {
    sender: http2::SendRequest<WatchedBody<Upload>>,
    slots: Arc<StreamSlots>,
    max_headers: usize,
}

/// The reason why a request has no response. Contains the request if it was not sent.
pub(crate) type Http2SendError = TrySendError<Request<WatchedBody<Upload>>>;

impl Http2Connection {
    /// Opens an HTTP/2 connection on `stream`, and waits for the upstream's `SETTINGS`.
    ///
    /// # Errors
    ///
    /// Returns an error if the peer does not support HTTP/2.
    pub(crate) async fn open<S>(stream: S, settings: &Proxy) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let write_timeout = WriteTimeout::Stall(settings.timeouts.idle);
        let stream = TimedStream::without_read_timeout(stream, write_timeout);
        let stream = TokioIo::new(InterimLimitStream::new(stream));
        let max_head = u32::try_from(settings.max_head).unwrap_or(u32::MAX);
        let executor = SettingsWaker::new(settings.timeouts.idle);
        let (sender, connection) = http2::Builder::new(executor.clone())
            .timer(TokioTimer::new())
            .max_header_list_size(max_head)
            // Do not send requests before the upstream's `SETTINGS` have arrived.
            .initial_max_send_streams(0)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        let (publisher, mut max_streams) = watch::channel(0);
        tokio::task::spawn_local(drive(connection, publisher, executor));
        let settings_received = max_streams
            .wait_for(|max_streams| *max_streams > 0)
            .await
            .map(drop);
        settings_received.map_err(|_| io::Error::other("the upstream does not support HTTP/2"))?;
        let slots = StreamSlots {
            max_streams,
            streams: AtomicUsize::new(0),
            is_suspect: AtomicBool::new(false),
            has_responded: AtomicBool::new(false),
        };
        Ok(Self {
            sender,
            slots: Arc::new(slots),
            max_headers: settings.max_headers,
        })
    }

    /// Returns whether the connection is closed. Also returns true for a suspect connection without
    /// requests in flight, because no response can then show that the connection works.
    pub(crate) fn is_unusable(&self) -> bool {
        self.sender.is_closed() || self.is_suspect() && !self.is_busy()
    }

    fn is_suspect(&self) -> bool {
        self.slots.is_suspect.load(Ordering::Relaxed)
    }

    /// Returns whether requests are in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.slots.streams.load(Ordering::Relaxed) > 0
    }

    /// Reserves a stream. Returns `None` if all streams are in use or the connection is suspect.
    pub(crate) fn reserve_stream(&self) -> Option<Arc<StreamSlot>> {
        if self.is_suspect() {
            return None;
        }
        let max_streams = MAX_STREAMS.min(*self.slots.max_streams.borrow());
        let below = |count: usize| (count < max_streams).then_some(count + 1);
        let streams = &self.slots.streams;
        streams
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, below)
            .ok()?;
        Some(Arc::new(StreamSlot(Arc::clone(&self.slots))))
    }

    /// Marks the connection as suspect, because it may be dead. A suspect connection accepts no
    /// more requests until part of any response arrives.
    pub(crate) fn mark_suspect(&self) {
        self.slots.is_suspect.store(true, Ordering::Relaxed);
    }

    /// Marks the connection as alive: part of a response has arrived.
    pub(crate) fn mark_alive(&self) {
        if self.is_suspect() {
            self.slots.is_suspect.store(false, Ordering::Relaxed);
        }
        if !self.has_responded() {
            self.slots.has_responded.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether any response has ever arrived. After the first response, the upstream may
    /// close the connection at any time.
    pub(crate) fn has_responded(&self) -> bool {
        self.slots.has_responded.load(Ordering::Relaxed)
    }

    /// Returns whether the response has at most `max_headers` header lines and at most one
    /// `Content-Length`. hyper does not limit the number of header lines in HTTP/2.
    pub(crate) fn accepts(&self, response: &Response<Incoming>) -> bool {
        let headers = response.headers();
        headers.len() <= self.max_headers && !lookup::is_repeated(headers, &CONTENT_LENGTH)
    }

    /// Sends a request for which a stream was reserved.
    pub(crate) fn send(
        &mut self,
        request: Request<Upload>,
    ) -> impl Future<Output = Result<Response<Incoming>, Http2SendError>> + use<> {
        let request = request.map(WatchedBody::new);
        let reset = request.body().reset_handle();
        request.body().inner().set_reset(reset);
        self.sender.try_send_request(request)
    }
}

/// Drives a connection until it closes, and publishes the number of streams that the upstream
/// allows.
async fn drive<S>(
    connection: Connection<S, WatchedBody<Upload>, SettingsWaker>,
    publisher: watch::Sender<usize>,
    executor: SettingsWaker,
) where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + 'static,
{
    let mut connection = pin!(connection);
    let ended = poll_fn(|cx| {
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(ended);
        }
        let max_streams = connection.current_max_send_streams();
        publisher
            .send_if_modified(|previous| std::mem::replace(previous, max_streams) != max_streams);
        if max_streams == 0 {
            executor.waker.register(cx.waker());
        }
        Poll::Pending
    });
    if let Err(error) = ended.await {
        tracing::debug!("upstream connection closed: {error}");
    }
}

/// An executor that runs hyper's tasks for a connection on this thread.
///
/// After each poll of a task, the executor wakes [`drive`] if [`drive`] is waiting for the
/// upstream's first `SETTINGS`. Later changes to the `SETTINGS` need no wake-up, because each
/// request polls the connection.
///
/// If the upstream accepts no bytes of a body for `write_timeout`, the executor drops the task that
/// sends the body.
#[derive(Clone, Debug)]
struct SettingsWaker {
    waker: Arc<AtomicWaker>,
    write_timeout: Duration,
}

impl SettingsWaker {
    fn new(write_timeout: Duration) -> Self {
        Self {
            waker: Arc::default(),
            write_timeout,
        }
    }
}

impl<F> Executor<F> for SettingsWaker
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        let waker = Arc::clone(&self.waker);
        let future = with_write_timeout(future, self.write_timeout);
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
