//! The server: workers, listeners and graceful shutdown.

use std::{
    future::Future,
    io,
    net::TcpListener,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    time::Duration,
};

use tokio::{net::TcpStream, time::timeout};

use super::{
    AdoptError, Bounds, Connection, Exempt, Listener, MoveConnection, MovedConnection,
    listener::{Acceptor, Adopt},
    shutdown::{ConnectionCount, Shutdown, Stage},
    worker::{Jobs, Tasks, Worker},
};

/// How long relayed connections may take to end in a shutdown. The process to which they are
/// relayed closes idle connections immediately.
const RELAY_END_TIMEOUT: Duration = Duration::from_secs(1);

/// Worker threads and their listeners. Dropping the server aborts all connections;
/// [`Server::shutdown`] lets requests in flight complete.
pub struct Server {
    workers: Vec<Worker>,
    shutdown: Shutdown,
    open: Arc<ConnectionCount>,
    /// The TLS connections that are relayed to another process. The field `open` does not include
    /// these connections.
    relays: Arc<ConnectionCount>,
    listeners: Mutex<Vec<Arc<dyn Adopt>>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("workers", &self.workers.len())
            .field("stage", &self.shutdown.stage())
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Returns the number of cores that this process may use.
    #[must_use]
    pub fn default_workers() -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
    }

    /// Starts `workers` threads, at least one.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if a thread or a poller cannot be created.
    pub fn start(workers: usize) -> io::Result<Self> {
        let workers = (0..workers.max(1))
            .map(Worker::start)
            .collect::<io::Result<_>>()?;
        Ok(Self {
            workers,
            shutdown: Shutdown::default(),
            open: Arc::default(),
            relays: Arc::default(),
            listeners: Mutex::default(),
        })
    }

    /// Starts `workers` threads like [`Self::start`], for a server that takes over from another
    /// process. The listeners of the server accept no connections until [`Self::begin_serving`].
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if a thread or a poller cannot be created.
    pub fn start_waiting(workers: usize) -> io::Result<Self> {
        let server = Self::start(workers)?;
        server.shutdown.enter(Stage::Waiting);
        Ok(server)
    }

    /// Accepts connections after [`Self::start_waiting`].
    pub fn begin_serving(&self) {
        self.shutdown.enter(Stage::Serving);
    }

    /// Accepts connections again after [`Self::stop_accepting`], because no other process serves.
    pub fn resume_serving(&self) {
        let adopter = self.adopter();
        // A connection may be about to be handed over.
        let take_back = move |moved| {
            if let Err(error) = adopter.adopt(moved) {
                tracing::debug!(%error, "connection lost");
            }
        };
        self.shutdown.sink().set(Some(Box::new(take_back)));
        self.shutdown.enter(Stage::Serving);
    }

    /// Returns the number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Returns the shutdown signal that all connections share.
    #[must_use]
    pub fn shutdown_signal(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Serves each connection to `socket` with `handler`. Connections are distributed to the
    /// workers round-robin, and have `TCP_NODELAY` set. A connection is closed when the handler's
    /// future completes.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if `socket` is not a listening socket.
    pub fn listen<H, F>(
        &self,
        socket: TcpListener,
        bounds: Bounds,
        handler: H,
    ) -> io::Result<Listener>
    where
        H: Fn(TcpStream, Connection) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + 'static,
    {
        self.listen_exempting(socket, bounds, Arc::new(|_| false), handler)
    }

    /// Works like [`Self::listen`], but does not apply the per-client limit to `exempt` addresses.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if `socket` is not a listening socket.
    pub fn listen_exempting<H, F>(
        &self,
        socket: TcpListener,
        bounds: Bounds,
        exempt: Exempt,
        handler: H,
    ) -> io::Result<Listener>
    where
        H: Fn(TcpStream, Connection) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + 'static,
    {
        let listener = Listener::new(&socket)?;
        let acceptor = Arc::new(Acceptor {
            listener: listener.clone(),
            workers: self
                .workers
                .iter()
                .map(|worker| worker.jobs.clone())
                .collect(),
            server: Arc::clone(&self.open),
            relays: Arc::clone(&self.relays),
            bounds,
            exempt,
            shutdown: self.shutdown.clone(),
            handler: Arc::new(handler),
            turn: AtomicUsize::new(0),
        });
        self.listeners()
            .push(Arc::clone(&acceptor) as Arc<dyn Adopt>);
        self.first().spawn(move || acceptor.run(socket));
        Ok(listener)
    }

    /// Spawns a background future on the first worker. The future is dropped when the server stops.
    pub fn spawn<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        self.first().spawn(make);
    }

    /// Returns a handle for spawning futures on the first worker later.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        Tasks(self.first().clone())
    }

    /// Announces the shutdown: health checks report not-ready, but requests are still served.
    pub fn announce_shutdown(&self) {
        self.shutdown.announce();
    }

    /// Stops listening, waits up to `drain` for requests in flight, and drops the remaining
    /// connections. Returns the number of dropped connections.
    ///
    /// Do not call this function from a handler, because the function would wait for the handler's
    /// own connection.
    pub async fn shutdown(self, drain: Duration) -> usize {
        self.shutdown.begin();
        // After the deadline, the remaining connections are closed when `self` is dropped.
        let _ = timeout(drain, self.open.emptied()).await;
        let _ = timeout(RELAY_END_TIMEOUT, self.relays.emptied()).await;
        self.open.open()
    }

    /// Stops accepting connections; new connections wait in the accept queues of the sockets.
    /// Connections that cannot be handed over (HTTP/2) finish their requests and close. All other
    /// connections serve further requests.
    pub async fn stop_accepting(&self) {
        self.shutdown.enter(Stage::Closing);
        // All listeners accept connections on the first worker, so after this call no listener is
        // in the middle of accepting a connection.
        self.first().yielded().await;
    }

    /// Passes each connection that can be handed over to `take`, as soon as it is between two
    /// requests. A connection that was passed to `take` reads no further request.
    pub async fn hand_over(&self, take: MoveConnection) {
        self.shutdown.sink().set(Some(take));
        self.shutdown.enter(Stage::HandingOver);
        // A task that is running may have read the earlier stage, and may still begin a request.
        for worker in &self.workers {
            worker.jobs.yielded().await;
        }
    }

    /// Closes the listening sockets, because another process serves now. Waits up to `drain` until
    /// all connections are closed or handed over, and no connection is relayed any more.
    pub async fn finish_handover(&self, drain: Duration) {
        self.shutdown.enter(Stage::HandedOver);
        let closed = async {
            self.open.emptied().await;
            // A connection that is handed over begins its relay before it counts as closed.
            self.relays.emptied().await;
        };
        let _ = timeout(drain, closed).await;
    }

    /// Returns a handle that serves connections of another process.
    #[must_use]
    pub fn adopter(&self) -> Adopter {
        Adopter(self.listeners().clone())
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Arc<dyn Adopt>>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn first(&self) -> &Jobs {
        // `start` creates at least one worker.
        &self.workers[0].jobs
    }
}

/// Serves connections that another process has handed over.
#[derive(Clone)]
pub struct Adopter(Vec<Arc<dyn Adopt>>);

impl std::fmt::Debug for Adopter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Adopter").field(&self.0.len()).finish()
    }
}

impl Adopter {
    /// Serves the connection on the listener with the same address.
    ///
    /// # Errors
    ///
    /// [`AdoptError`] if no listener has this address, or if the socket is not connected.
    pub fn adopt(&self, moved: MovedConnection) -> Result<(), AdoptError> {
        let listener = self
            .0
            .iter()
            .find(|listener| listener.listener().local_addr() == moved.listener)
            .ok_or(AdoptError::NoListener(moved.listener))?;
        listener.adopt(moved)?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.begin();
        // The function may own the listeners, which own the signal.
        self.shutdown.sink().set(None);
        for worker in &self.workers {
            worker.stop();
        }
        for worker in &mut self.workers {
            worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    /// A task that was running when the handover began may have seen that the server still serves,
    /// so the handover waits until every running task has yielded.
    #[tokio::test]
    async fn a_handover_waits_for_the_running_task_of_every_worker() {
        let server = Server::start(2).unwrap();
        for busy in 0..2 {
            let (release, released) = std::sync::mpsc::channel::<()>();
            server.workers[busy].jobs.spawn(move || async move {
                let _ = released.recv();
            });
            let mut handed_over = pin!(server.hand_over(Box::new(drop)));
            assert!(handed_over.as_mut().now_or_never().is_none());
            // The worker runs its jobs in order, so it has also run the handover job.
            server.workers[1 - busy].jobs.yielded().await;
            assert!(handed_over.as_mut().now_or_never().is_none());
            drop(release);
            handed_over.await;
        }
    }
}
