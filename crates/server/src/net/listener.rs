//! A listener: accepts, counts, refuses what is over its bound, and deals the rest to the workers.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::net::{TcpListener, TcpStream};

use super::{
    Bounds, Connection,
    shutdown::{Open, Shutdown, Tally},
    worker::Jobs,
};

/// How long accepting rests after the system refused a socket (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener's address and counts. The listener itself runs until the server shuts down.
#[derive(Clone, Debug)]
pub struct Listener(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    local_addr: SocketAddr,
    open: Arc<Tally>,
    accepted: AtomicU64,
    refused: AtomicU64,
}

impl Listener {
    /// Where it listens: the real port if it was bound to port 0.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr
    }

    /// How many connections are open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.open.open()
    }

    /// How many connections were accepted so far and served.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.0.accepted.load(Ordering::Relaxed)
    }

    /// How many connections were closed at once because too many were open.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    pub(super) fn new(socket: &std::net::TcpListener) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(Arc::new(Inner {
            local_addr: socket.local_addr()?,
            open: Arc::default(),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })))
    }

    fn admit(&self, most: usize) -> Option<Open> {
        // One task accepts for a listener, so nobody enters between the look and the step.
        if self.open() >= most {
            self.0.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.0.accepted.fetch_add(1, Ordering::Relaxed);
        Some(self.0.open.enter())
    }
}

/// What a listener needs to deal its connections.
pub(super) struct Dealer<H> {
    pub(super) listener: Listener,
    pub(super) workers: Vec<Jobs>,
    pub(super) server: Arc<Tally>,
    pub(super) bounds: Bounds,
    pub(super) shutdown: Shutdown,
    pub(super) handler: Arc<H>,
}

impl<H, F> Dealer<H>
where
    H: Fn(TcpStream, Connection) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + 'static,
{
    /// Accepts until the shutdown begins.
    pub(super) async fn run(self, socket: std::net::TcpListener) {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.begun() => {}
            error = self.accept_all(socket) => tracing::error!(%error, "a listener ended"),
        }
    }

    async fn accept_all(self, socket: std::net::TcpListener) -> io::Error {
        let socket = match TcpListener::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => return error,
        };
        let mut turns = (0..self.workers.len()).cycle();
        loop {
            match socket.accept().await {
                Ok((stream, peer)) => self.deal(stream, peer, turns.next().unwrap_or(0)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, address = %self.listener.local_addr(), "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn deal(&self, stream: TcpStream, peer: SocketAddr, worker: usize) {
        let Some(open) = self.listener.admit(self.bounds.connections) else {
            return;
        };
        // Out of the accepting worker's poller; the worker that serves it puts it into its own.
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => {
                return tracing::debug!(%error, %peer, "a connection was lost before it was served");
            }
        };
        let open = (open, self.server.enter());
        let connection = Connection {
            peer,
            worker,
            bounds: self.bounds,
            shutdown: self.shutdown.clone(),
        };
        let handler = Arc::clone(&self.handler);
        self.workers[worker].spawn(move || async move {
            match adopt(stream) {
                Ok(stream) => handler(stream, connection).await,
                Err(error) => {
                    tracing::debug!(%error, %peer, "a connection was lost before it was served")
                }
            }
            drop(open);
        });
    }
}

/// Registers `stream` with this worker's poller. Answers are small and wanted now, so Nagle's algorithm,
/// which holds a second small write back until the first is acknowledged (40 ms), is always off.
fn adopt(stream: std::net::TcpStream) -> io::Result<TcpStream> {
    let stream = TcpStream::from_std(stream)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
