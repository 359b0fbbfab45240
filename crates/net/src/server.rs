//! The server: workers, listeners and graceful shutdown.

use std::{future::Future, io, net::TcpListener, sync::Arc, time::Duration};

use tokio::net::TcpStream;

use super::{
    Bounds, Connection, Exempt, Listener,
    listener::Acceptor,
    shutdown::{ConnectionCount, Shutdown},
    worker::{Jobs, Tasks, Worker},
};

/// Worker threads and their listeners. Dropping the server aborts all connections;
/// [`Server::shutdown`] lets requests in flight complete.
#[derive(Debug)]
pub struct Server {
    workers: Vec<Worker>,
    shutdown: Shutdown,
    open: Arc<ConnectionCount>,
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
        })
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
        let dealer = Acceptor {
            listener: listener.clone(),
            workers: self
                .workers
                .iter()
                .map(|worker| worker.jobs.clone())
                .collect(),
            server: Arc::clone(&self.open),
            bounds,
            exempt,
            shutdown: self.shutdown.clone(),
            handler: Arc::new(handler),
        };
        self.first().spawn(move || dealer.run(socket));
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
    /// Do not call this function from a handler, because it would wait for the handler's own
    /// connection.
    pub async fn shutdown(self, drain: Duration) -> usize {
        self.shutdown.begin();
        // After the deadline, the remaining connections are closed when `self` is dropped.
        let _ = tokio::time::timeout(drain, self.open.emptied()).await;
        self.open.open()
    }

    fn first(&self) -> &Jobs {
        // `start` creates at least one worker.
        &self.workers[0].jobs
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.begin();
        for worker in &self.workers {
            worker.stop();
        }
        for worker in &mut self.workers {
            worker.join();
        }
    }
}
