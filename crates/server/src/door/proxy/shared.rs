//! HTTP/2 with an upstream: a connection that takes many requests at once, but no more than the upstream says.
//!
//! hyper would take any number, and have those wait for which there is no room. Nobody could tell them from those that
//! the upstream does not answer. So requests are counted here, and where there is no room there is another connection.

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
use crate::{config::Proxy, net::Stalling};

/// The most requests at once on a connection, even if its upstream would take more.
const MOST_STREAMS: usize = 100;

/// The octets that an upstream may send before it waits: for one answer, and for all of a connection. Answers that nobody
/// takes keep theirs, and shall never stop the others. So slow readers may have [`MOST_STREAMS`] times the first, 25 MiB, wait here on each
/// connection that the upstream may have: of 1,024, 25 GiB.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 128 * STREAM_WINDOW;

/// How often an upstream must answer a ping, and in what time.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// A connection that takes many requests at once.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    sender: http2::SendRequest<Taken<Upload>>,
    room: Arc<Room>,
    max_headers: usize,
}

/// How many requests a connection takes, and has.
#[derive(Debug)]
struct Room {
    /// What the upstream takes, by what it said last.
    most: watch::Receiver<usize>,
    streams: AtomicUsize,
    /// Whether a request was not answered in time, and nothing has come since.
    is_doubtful: AtomicBool,
    /// Whether anything was ever answered.
    has_answered: AtomicBool,
}

/// Why there is no answer, with the request if nobody has begun to send it.
pub(super) type Refused = TrySendError<Request<Taken<Upload>>>;

/// One request's part of a connection.
#[derive(Debug)]
pub(super) struct Stream(Arc<Room>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    /// HTTP/2 on `stream`, as soon as the upstream has said how much it takes.
    ///
    /// # Errors
    ///
    /// Who does not speak HTTP/2.
    pub(super) async fn begin<S>(stream: S, settings: &Proxy) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let stream = TokioIo::new(Stalling::new(stream, settings.timeouts.idle));
        let max_head = u32::try_from(settings.max_head).unwrap_or(u32::MAX);
        let wake = Wake::new(settings.timeouts.idle);
        let (sender, connection) = http2::Builder::new(wake.clone())
            .timer(TokioTimer::new())
            .max_header_list_size(max_head)
            // None before the upstream says how many.
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
        said.map_err(|_| io::Error::other("it does not speak HTTP/2"))?;
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

    /// Whether it takes no more requests: it is closed, or did not answer one, and there is nobody left to whom it could.
    pub(super) fn is_over(&self) -> bool {
        self.sender.is_closed() || self.is_doubtful() && !self.is_busy()
    }

    fn is_doubtful(&self) -> bool {
        self.room.is_doubtful.load(Ordering::Relaxed)
    }

    /// Whether it has requests.
    pub(super) fn is_busy(&self) -> bool {
        self.room.streams.load(Ordering::Relaxed) > 0
    }

    /// A request's part of it, if there is room for one more, and no doubt.
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

    /// Has it take no more requests for now: it may be dead, and only those that it has already will tell.
    pub(super) fn doubt(&self) {
        self.room.is_doubtful.store(true, Ordering::Relaxed);
    }

    /// Something of an answer has come, so it is not dead.
    pub(super) fn heard(&self) {
        if self.is_doubtful() {
            self.room.is_doubtful.store(false, Ordering::Relaxed);
        }
        if !self.has_answered() {
            self.room.has_answered.store(true, Ordering::Relaxed);
        }
    }

    /// Whether anything was ever answered: who has may close when it likes.
    pub(super) fn has_answered(&self) -> bool {
        self.room.has_answered.load(Ordering::Relaxed)
    }

    /// Whether an answer has no more header lines than it may, which HTTP/2 does not count, and no more than one length.
    pub(super) fn takes(&self, answer: &Response<Incoming>) -> bool {
        let headers = answer.headers();
        headers.len() <= self.max_headers && !lines::is_repeated(headers, &CONTENT_LENGTH)
    }

    /// Sends a request that has entered.
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

/// Moves requests onto a connection until it ends, and says how many it takes.
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
        tracing::debug!("a connection to an upstream ended: {error}");
    }
}

/// Runs what a connection does beside its requests on this thread, and wakes who waits to hear how many it takes. The number
/// is read anew with each request; only the first has to be waited for. A body of which the upstream takes nothing for too long is given up.
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
