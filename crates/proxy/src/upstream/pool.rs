//! The connection pool of an endpoint.
//!
//! Every worker has its own shard of the pool, because a connection stays on the worker that opened
//! it. Therefore, a shard's lock is uncontended, with one exception: a worker that has reached the
//! connection limit may close another worker's idle connection.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tidegate_config::Timeouts;
use tokio::time::{Instant, sleep};

use super::connection::UpstreamConnection;

/// The maximum interval between two runs of the idle reaper. The interval is short because a reload
/// may shorten the idle timeout, and the reaper must apply the new timeout soon.
const MAX_REAP_INTERVAL: Duration = Duration::from_secs(1);

/// The connection pool of an endpoint, with a shard for each worker.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    /// Whether the connections use HTTP/2. Several requests share an HTTP/2 connection.
    http2: bool,
    /// Whether a reload has removed the endpoint. A retired pool keeps no connections.
    is_retired: AtomicBool,
    /// The idle timeout of pooled connections, in microseconds.
    idle_timeout: AtomicU64,
    workers: Box<[WorkerPool]>,
}

/// One worker's shard of the pool.
#[derive(Debug, Default)]
struct WorkerPool {
    pooled: Mutex<PooledConnections>,
    /// A lock that a request holds while it opens an HTTP/2 connection. The worker's other requests
    /// wait for the connection while it opens.
    opening: tokio::sync::Mutex<()>,
}

/// For HTTP/1.1, the idle connections, with the most recently used connection last. For HTTP/2, all
/// connections.
#[derive(Debug, Default)]
struct PooledConnections {
    idle: Vec<(Instant, Box<UpstreamConnection>)>,
    /// Whether an idle reaper is running for this shard.
    has_reaper: bool,
}

impl ConnectionPool {
    pub(super) fn new(http2: bool, workers: usize) -> Self {
        Self {
            http2,
            is_retired: AtomicBool::new(false),
            idle_timeout: AtomicU64::new(0),
            workers: (0..workers).map(|_| WorkerPool::default()).collect(),
        }
    }

    pub(super) fn set_idle_timeout(&self, idle_timeout: Duration) {
        let micros = u64::try_from(idle_timeout.as_micros()).unwrap_or(u64::MAX);
        self.idle_timeout.store(micros, Ordering::Relaxed);
    }

    fn idle_timeout(&self) -> Duration {
        Duration::from_micros(self.idle_timeout.load(Ordering::Relaxed))
    }

    /// Closes the idle connections, and stops pooling connections.
    pub(super) fn retire(&self) {
        // Set the flag before emptying the pool, because `put_back` checks the flag while it holds
        // the lock.
        self.is_retired.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            drop(std::mem::take(&mut lock(worker).idle));
        }
    }

    /// Returns a pooled connection of `worker`. For HTTP/1.1, returns the most recently used
    /// connection that has not exceeded the idle timeout at `now`. For HTTP/2, returns a connection
    /// with a free stream.
    pub(super) fn take(
        &self,
        worker: usize,
        timeouts: &Timeouts,
        now: Instant,
    ) -> Option<Box<UpstreamConnection>> {
        let mut pooled = lock(self.workers.get(worker)?);
        if self.http2 {
            pooled
                .idle
                .retain_mut(|(_, connection)| !connection.probe_unusable());
            // Use the first connection with a free stream, so that connections at the end of the
            // list become idle and can be closed.
            return pooled.idle.iter_mut().find_map(|(idle_since, connection)| {
                let shared = connection.open_stream(timeouts)?;
                *idle_since = now;
                Some(Box::new(shared))
            });
        }
        // Skip connections that the upstream has closed or is about to close.
        std::iter::from_fn(|| pooled.idle.pop()).find_map(|(idle_since, mut connection)| {
            let is_fresh = now.duration_since(idle_since) < timeouts.pool;
            (is_fresh && !connection.probe_unusable()).then_some(connection)
        })
    }

    /// Waits for permission to open an HTTP/2 connection on `worker`. Only one request at a time
    /// gets permission. A request that arrives before the connection is open waits for this
    /// connection and then shares it, instead of opening another connection.
    pub(super) async fn wait_to_open(
        &self,
        worker: usize,
    ) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        Some(self.workers.get(worker)?.opening.lock().await)
    }

    /// Puts `connection` into the shard of `worker`. Returns true if the caller must start the
    /// shard's idle reaper.
    pub(super) fn put_back(&self, worker: usize, connection: Box<UpstreamConnection>) -> bool {
        let Some(worker) = self.workers.get(worker) else {
            return false;
        };
        let mut pooled = lock(worker);
        if self.is_retired.load(Ordering::SeqCst) {
            return false;
        }
        pooled.idle.push((Instant::now(), connection));
        !std::mem::replace(&mut pooled.has_reaper, true)
    }

    /// Removes an idle connection from the pool and returns it, so that the caller can close it.
    /// The evicted connection is the longest-idle connection of the first worker that has an idle
    /// connection.
    pub(super) fn evict_idle(&self) -> Option<Box<UpstreamConnection>> {
        self.workers.iter().find_map(|worker| {
            let mut pooled = lock(worker);
            // The first connection of a shard has been idle for the longest time.
            let mut connections = pooled.idle.iter();
            let at = connections.position(|(_, connection)| !connection.is_busy())?;
            Some(pooled.idle.remove(at).1)
        })
    }

    /// Closes connections that have exceeded the idle timeout. Returns true if no connection is
    /// left in the shard of `worker`.
    fn close_expired(&self, worker: usize) -> bool {
        let idle_timeout = self.idle_timeout();
        let Some(worker) = self.workers.get(worker) else {
            return true;
        };
        let mut pooled = lock(worker);
        let now = Instant::now();
        pooled.idle.retain_mut(|(idle_since, connection)| {
            !connection.probe_unusable()
                && (connection.is_busy() || now.duration_since(*idle_since) < idle_timeout)
        });
        pooled.has_reaper = !pooled.idle.is_empty();
        !pooled.has_reaper
    }
}

/// Runs the idle reaper for the shard of `worker`, until the shard is empty or the endpoint is
/// gone.
pub(super) async fn reap_idle(pool: Weak<ConnectionPool>, worker: usize) {
    let idle_timeout = |pool: &Weak<ConnectionPool>| Some(pool.upgrade()?.idle_timeout());
    while let Some(idle_timeout) = idle_timeout(&pool) {
        sleep(idle_timeout.min(MAX_REAP_INTERVAL)).await;
        let is_empty = |pool: std::sync::Arc<ConnectionPool>| pool.close_expired(worker);
        if pool.upgrade().is_none_or(is_empty) {
            return;
        }
    }
}

fn lock(worker: &WorkerPool) -> MutexGuard<'_, PooledConnections> {
    worker.pooled.lock().unwrap_or_else(PoisonError::into_inner)
}
