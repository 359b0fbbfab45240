//! The server: its workers, its listeners, and its end.

use std::{future::Future, io, net::TcpListener, sync::Arc, time::Duration};

use tokio::net::TcpStream;

use super::{
    Bounds, Connection, Exempt, Listener,
    listener::Dealer,
    shutdown::{Shutdown, Tally},
    worker::{Jobs, Tasks, Worker},
};

/// Worker threads and what listens on them. Dropping it drops every connection where it stands;
/// [`Server::shutdown`] is the polite end.
#[derive(Debug)]
pub struct Server {
    workers: Vec<Worker>,
    shutdown: Shutdown,
    open: Arc<Tally>,
}

impl Server {
    /// One worker per core that this process may use.
    #[must_use]
    pub fn default_workers() -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
    }

    /// Starts `workers` threads, at least one.
    ///
    /// # Errors
    ///
    /// What the system says if it gives no thread or no poller.
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

    /// How many workers there are.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The signal that every connection holds too.
    #[must_use]
    pub fn shutdown_signal(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Serves every connection to `socket` with `handler`, on the worker whose turn it is, and with
    /// `TCP_NODELAY` set. The connection closes when the handler's future ends.
    ///
    /// # Errors
    ///
    /// What the system says if `socket` is not a listening socket.
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

    /// As [`Self::listen`], but for the clients that are `exempt` the bound per client does not hold.
    ///
    /// # Errors
    ///
    /// What the system says if `socket` is not a listening socket.
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
        let dealer = Dealer {
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

    /// Runs a future that serves no connection on the first worker: a snapshot each minute, say. It
    /// is dropped where it stands when the server ends.
    pub fn spawn<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        self.first().spawn(make);
    }

    /// What runs on the first worker, for whoever has more to run there later.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        Tasks(self.first().clone())
    }

    /// Lets it be known that the server is going to shut down: whoever asks for its health is sent elsewhere, and
    /// everything is served as before.
    pub fn announce_shutdown(&self) {
        self.shutdown.announce();
    }

    /// Stops listening at once, lets connections finish the requests that they have begun for up to
    /// `drain`, drops the others, and answers how many were dropped.
    ///
    /// Not to be called from a handler, which it would wait for.
    pub async fn shutdown(self, drain: Duration) -> usize {
        self.shutdown.begin();
        // Past the deadline nobody is waited for: the drop of `self` ends them.
        let _ = tokio::time::timeout(drain, self.open.emptied()).await;
        self.open.open()
    }

    fn first(&self) -> &Jobs {
        // `start` makes at least one worker.
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
