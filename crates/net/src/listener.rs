//! A listener: accepts connections, enforces the connection limits and distributes connections to
//! the workers.

use std::{
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::net::{TcpListener, TcpStream};

use super::{
    Bounds, Connection, Handover, RelayedClient,
    handover::ListenerPart,
    moved::MovedConnection,
    registry::{ConnectionLimits, ConnectionRegistry, Eviction, Registration, RegistrationResult},
    shutdown::{ConnectionCount, Shutdown, Stage},
    worker::Jobs,
};

/// The pause after a failed `accept`. The usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A handle to a listener's address and counters. Dropping the handle does not stop the listener,
/// which runs until the server shuts down.
#[derive(Clone, Debug)]
pub struct Listener(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    local_addr: SocketAddr,
    open: Arc<ConnectionCount>,
    /// The open connections that can be handed over to another process.
    movable: Arc<ConnectionCount>,
    /// The open connections whose TLS handshake is in progress.
    handshaking: Arc<ConnectionCount>,
    registry: Arc<ConnectionRegistry>,
    accepted: AtomicU64,
    refused: AtomicU64,
    refused_to_client: AtomicU64,
    evicted: AtomicU64,
}

/// A predicate that returns true for the addresses of proxies that serve many clients. The
/// per-client limit does not apply to connections from a proxy that serves many clients.
pub type Exempt = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

impl Listener {
    /// Returns the bound address, with the actual port if port 0 was requested.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.open.open()
    }

    /// Returns the number of open connections that can be handed over to another process.
    #[must_use]
    pub fn movable(&self) -> usize {
        self.0.movable.open()
    }

    /// Returns the number of open connections whose TLS handshake is in progress.
    #[must_use]
    pub fn handshaking(&self) -> usize {
        self.0.handshaking.open()
    }

    /// Returns the number of connections accepted and served so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.0.accepted.load(Ordering::Relaxed)
    }

    /// Returns the number of connections closed immediately because the listener was full and no
    /// connection was idle.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of connections closed immediately because their client had reached its
    /// limit.
    #[must_use]
    pub fn refused_to_client(&self) -> u64 {
        self.0.refused_to_client.load(Ordering::Relaxed)
    }

    /// Returns the number of idle connections closed to make room for new ones.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.0.evicted.load(Ordering::Relaxed)
    }

    /// Returns the number of HTTP/2 connections closed because of control-frame floods.
    #[must_use]
    pub fn floods(&self) -> u64 {
        self.0.registry.floods()
    }

    pub(super) fn new(socket: &std::net::TcpListener) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(Arc::new(Inner {
            local_addr: socket.local_addr()?,
            open: Arc::default(),
            movable: Arc::default(),
            handshaking: Arc::default(),
            registry: Arc::default(),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            refused_to_client: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        })))
    }

    fn admit(&self, peer: IpAddr, limits: ConnectionLimits) -> Option<Registration> {
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        match self.0.registry.register(peer, limits) {
            RegistrationResult::Admitted(registration, evicted) => {
                count(&self.0.accepted);
                if evicted == Eviction::One {
                    count(&self.0.evicted);
                }
                return Some(registration);
            }
            // Throttle the log message, so that a flood of connections cannot fill the log.
            RegistrationResult::ClientFull => {
                count(&self.0.refused_to_client);
                tracing::warn!(
                    %peer, listener = %self.local_addr(), connections = limits.per_client,
                    "connection refused: the client has reached `max_connections_per_client`; raise it if this client is a proxy"
                );
            }
            RegistrationResult::Full => {
                count(&self.0.refused);
                tracing::warn!(
                    %peer, listener = %self.local_addr(), connections = limits.connections,
                    "connection refused: the listener has reached `max_connections`; raise it if the machine has memory for more"
                );
            }
        }
        None
    }

    /// Closes the longest-idle connection to free its file descriptor.
    fn evict(&self) {
        if self.0.registry.evict() {
            self.0.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The accept loop of a listener, which distributes connections to the workers.
pub(super) struct Acceptor<H> {
    pub(super) listener: Listener,
    pub(super) workers: Vec<Jobs>,
    pub(super) server: Arc<ConnectionCount>,
    pub(super) relays: Arc<ConnectionCount>,
    pub(super) bounds: Bounds,
    pub(super) exempt: Exempt,
    pub(super) shutdown: Shutdown,
    pub(super) handler: Arc<H>,
    /// Counts the connections that another process has handed over, to distribute them.
    pub(super) turn: AtomicUsize,
}

impl<H, F> Acceptor<H>
where
    H: Fn(TcpStream, Connection) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + 'static,
{
    /// Accepts connections while the server serves. Returns when the server shuts down, or when
    /// another process has taken over.
    pub(super) async fn run(self: Arc<Self>, socket: std::net::TcpListener) {
        let socket = match TcpListener::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => return tracing::error!(%error, "listener stopped"),
        };
        let can_change = |stage: Stage| stage == Stage::Serving || stage.is_final();
        while !self.shutdown.reached(can_change).await.is_final() {
            tokio::select! {
                biased;
                _ = self.shutdown.reached(|stage| stage != Stage::Serving) => {}
                () = self.accept_all(&socket) => {}
            }
        }
    }

    async fn accept_all(&self, socket: &TcpListener) {
        let mut turns = (0..self.workers.len()).cycle();
        loop {
            match socket.accept().await {
                Ok((stream, peer)) => self.dispatch(stream, peer, turns.next().unwrap_or(0)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, address = %self.listener.local_addr(), "cannot accept a connection; closing the connection that has been idle longest");
                    self.listener.evict();
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn dispatch(&self, stream: TcpStream, peer: SocketAddr, worker: usize) {
        // Deregister the socket from the accepting worker's poller, so that the serving worker can
        // register it.
        match stream.into_std() {
            Ok(stream) => self.assign(NewConnection::of_client(stream, peer), worker),
            Err(error) => tracing::debug!(%error, %peer, "connection lost before it was served"),
        }
    }

    fn assign(&self, new: NewConnection, worker: usize) {
        let NewConnection {
            stream,
            peer,
            resumed,
            relayed,
        } = new;
        let per_client = self.bounds.connections_per_client;
        let limits = ConnectionLimits {
            connections: self.bounds.connections,
            per_client: (!(self.exempt)(peer.ip())).then_some(per_client),
        };
        let Some(registration) = self.listener.admit(peer.ip(), limits) else {
            return;
        };
        let open = (self.listener.0.open.increment(), self.server.increment());
        let connection = Connection {
            peer,
            worker,
            bounds: self.bounds,
            activity: registration.activity(),
            shutdown: self.shutdown.clone(),
            handover: Handover {
                listener: Some(ListenerPart {
                    address: self.listener.local_addr(),
                    movable: Arc::clone(&self.listener.0.movable),
                    handshaking: Arc::clone(&self.listener.0.handshaking),
                    relays: Arc::clone(&self.relays),
                    write_timeout: self.bounds.write,
                }),
                resumed,
                relayed,
            },
        };
        let handler = Arc::clone(&self.handler);
        self.workers[worker].spawn(move || async move {
            match register(stream, connection.handover.relayed.as_ref()) {
                Ok(stream) => registration.serve(handler(stream, connection)).await,
                Err(error) => {
                    tracing::debug!(%error, %peer, "connection lost before it was served")
                }
            }
            drop((registration, open));
        });
    }
}

/// A connection that is not served yet.
struct NewConnection {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    /// The state with which another process has handed over the connection; `None` for a new
    /// connection.
    resumed: Option<Vec<u8>>,
    relayed: Option<RelayedClient>,
}

impl NewConnection {
    const fn of_client(stream: std::net::TcpStream, peer: SocketAddr) -> Self {
        Self {
            stream,
            peer,
            resumed: None,
            relayed: None,
        }
    }

    /// Returns the connection that another process has handed over.
    fn of_process(moved: MovedConnection) -> io::Result<Self> {
        let peer = match &moved.relayed {
            Some(client) => client.address,
            None => moved.socket.peer_addr()?,
        };
        moved.socket.set_nonblocking(true)?;
        Ok(Self {
            stream: moved.socket,
            peer,
            resumed: (!moved.state.is_empty()).then_some(moved.state),
            relayed: moved.relayed,
        })
    }
}

/// A listener that can take connections from another process.
pub(super) trait Adopt: Send + Sync {
    fn listener(&self) -> &Listener;

    /// Serves a connection that another process has handed over.
    fn adopt(&self, moved: MovedConnection) -> io::Result<()>;
}

impl<H, F> Adopt for Acceptor<H>
where
    H: Fn(TcpStream, Connection) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + 'static,
{
    fn listener(&self) -> &Listener {
        &self.listener
    }

    fn adopt(&self, moved: MovedConnection) -> io::Result<()> {
        let new = NewConnection::of_process(moved)?;
        let worker = self.turn.fetch_add(1, Ordering::Relaxed) % self.workers.len().max(1);
        self.assign(new, worker);
        Ok(())
    }
}

/// Registers `stream` with this worker's poller, and disables Nagle's algorithm. Responses are
/// small, and Nagle's algorithm would delay a second small write until the client has acknowledged
/// the first one, which can take 40 ms. The socket of a relayed connection is a Unix socket, which
/// sends small writes immediately.
fn register(stream: std::net::TcpStream, relayed: Option<&RelayedClient>) -> io::Result<TcpStream> {
    let stream = TcpStream::from_std(stream)?;
    if relayed.is_none() {
        stream.set_nodelay(true)?;
    }
    Ok(stream)
}
