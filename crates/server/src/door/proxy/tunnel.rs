//! A connection that was upgraded: octets in both directions, until both sides have closed or nothing moves any more.

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
use tidegate_http::Lasting;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes};

use super::{access_log::Session, clients::Begun, lease::Lease};
use crate::net::LazyTimer;

/// How many octets wait in each direction.
const BUFFER_BYTES: usize = 16 << 10;

/// The tunnel that the last request of a connection has led to, if it has; it is dug when the answer is out.
#[derive(Clone, Debug, Default)]
pub(super) struct Planned(Arc<Mutex<Option<Tunnel>>>);

impl Planned {
    pub(super) fn plan(&self, tunnel: Tunnel) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    pub(super) fn take(&self) -> Option<Tunnel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Two connections that become one.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    /// The upstream's connection, which takes one request at a time, and counts as in use to the end.
    pub(super) lease: Lease,
    /// Its line in the access log.
    pub(super) session: Session,
    /// The request has not ended before this has: it holds its place.
    pub(super) lasting: Lasting,
    /// Counts it among the requests of its client, where these are counted.
    pub(super) in_flight: Option<Begun>,
}

impl Tunnel {
    /// Carries octets both ways, until nothing has moved for `longest`.
    pub(super) async fn carry(self, longest: Duration) -> io::Result<()> {
        let Self {
            client,
            mut lease,
            session,
            lasting: _held,
            in_flight: _in_flight,
        } = self;
        let client = client.await.map_err(io::Error::other)?;
        let upstream = lease.link.exchange().ok_or(io::ErrorKind::Unsupported)?;
        let moved = Rc::new(Cell::new(false));
        let mut client = Watched::new(TokioIo::new(client), (&moved, session.received()));
        let mut upstream = Watched::new(upstream, (&moved, session.sent()));
        let carrying =
            copy_bidirectional_with_sizes(&mut client, &mut upstream, BUFFER_BYTES, BUFFER_BYTES);
        let mut carrying = pin!(carrying);
        let mut silence = LazyTimer::new(longest);
        let ended = poll_fn(|cx| {
            if let Poll::Ready(ended) = carrying.as_mut().poll(cx) {
                return Poll::Ready(ended.map(drop));
            }
            if moved.take() {
                silence.set(longest);
            }
            ready!(silence.poll_due(cx));
            Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)))
        })
        .await;
        if ended.is_ok() {
            session.complete();
        }
        ended
    }
}

/// A side of a tunnel that tells when something has come from it, and how much.
struct Watched<S> {
    stream: S,
    moved: Rc<Cell<bool>>,
    octets: Arc<AtomicU64>,
}

impl<S> Watched<S> {
    fn new(stream: S, (moved, octets): (&Rc<Cell<bool>>, &Arc<AtomicU64>)) -> Self {
        Self {
            stream,
            moved: Rc::clone(moved),
            octets: Arc::clone(octets),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.moved.set(true);
            let came = u64::try_from(buffer.filled().len() - before).unwrap_or(u64::MAX);
            self.octets.fetch_add(came, Ordering::Relaxed);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, octets)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
