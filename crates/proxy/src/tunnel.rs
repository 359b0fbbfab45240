//! An upgraded connection: the proxy copies bytes in both directions until both sides have closed,
//! or until the idle timeout.

use std::{
    cell::Cell,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tidegate_net::LazyTimer;
use tidegate_tower::LongLivedPermit;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes};

use super::{
    access_log::UpgradedSession, client_limit::ClientRequest, upstream::checkout::Checkout,
};

/// The buffer size for each direction, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// The tunnel to start once the `101` response is sent; `None` unless the last request was an
/// upgrade.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingTunnel(Arc<Mutex<Option<Tunnel>>>);

impl PendingTunnel {
    pub(crate) fn set(&self, tunnel: Tunnel) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    pub(crate) fn take(&self) -> Option<Tunnel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A client connection and an upstream connection between which the proxy copies bytes.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) client: OnUpgrade,
    /// The upstream HTTP/1.1 connection that was upgraded. The connection counts as in use until
    /// the tunnel ends.
    pub(crate) checkout: Checkout,
    /// The byte counts for the tunnel's line in the access log.
    pub(crate) session: UpgradedSession,
    /// The request's rate limit permit. The permit renews the leases of the request's concurrency
    /// slots until the tunnel ends.
    pub(crate) rate_limit_permit: LongLivedPermit,
    /// Counts this tunnel as one of the client's requests in flight, if the client's requests are
    /// limited.
    pub(crate) in_flight: Option<ClientRequest>,
}

impl Tunnel {
    /// Copies bytes in both directions. Returns a `TimedOut` error if no data is transferred for
    /// `idle_timeout`.
    pub(crate) async fn run(self, idle_timeout: Duration) -> io::Result<()> {
        let Self {
            client,
            mut checkout,
            session,
            rate_limit_permit: _held,
            in_flight: _in_flight,
        } = self;
        let client = client.await.map_err(io::Error::other)?;
        let upstream = checkout
            .connection
            .http1()
            .ok_or(io::ErrorKind::Unsupported)?;
        let moved = Rc::new(Cell::new(false));
        let mut client = MeteredStream::new(TokioIo::new(client), &moved, session.received());
        let mut upstream = MeteredStream::new(upstream, &moved, session.sent());
        let copying =
            copy_bidirectional_with_sizes(&mut client, &mut upstream, BUFFER_BYTES, BUFFER_BYTES);
        let mut copying = pin!(copying);
        let mut timer = LazyTimer::new(idle_timeout);
        let ended = poll_fn(|cx| {
            if let Poll::Ready(ended) = copying.as_mut().poll(cx) {
                return Poll::Ready(ended.map(drop));
            }
            if moved.take() {
                timer.set(idle_timeout);
            }
            ready!(timer.poll_due(cx));
            Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)))
        })
        .await;
        if ended.is_ok() {
            session.complete();
        }
        ended
    }
}

/// One side of a tunnel, which counts the bytes read from it and records that data was transferred.
struct MeteredStream<S> {
    stream: S,
    moved: Rc<Cell<bool>>,
    bytes: Arc<AtomicU64>,
}

impl<S> MeteredStream<S> {
    fn new(stream: S, moved: &Rc<Cell<bool>>, bytes: &Arc<AtomicU64>) -> Self {
        Self {
            stream,
            moved: Rc::clone(moved),
            bytes: Arc::clone(bytes),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MeteredStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.moved.set(true);
            let count = u64::try_from(buffer.filled().len() - before).unwrap_or(u64::MAX);
            self.bytes.fetch_add(count, Ordering::Relaxed);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MeteredStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
