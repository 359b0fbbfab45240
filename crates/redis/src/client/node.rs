//! The state of one server. The server is up and has connections, or it is down for a known reason.
//!
//! ```text
//!            too many failures, or the connection is lost
//!        ┌────────────────────────────────────────────────┐
//!        │                                                ▼
//!   up (in use)                                    down (not used)
//!        ▲                                                │
//!        └─────── connected, recognised, and fast ◀─ probe┘ after a wait with jitter
//! ```
//!
//! While the server is down, requests fail immediately instead of waiting. These requests are never
//! sent, so they change nothing. A probe opens a new connection and sends a command that has no
//! effect on the data; a decision never serves as a probe.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use redis::aio::MultiplexedConnection;
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, oneshot, watch},
    task::{AbortHandle, JoinSet},
    time::Instant,
};

use super::{
    breaker::{Breaker, ReconnectBackoff},
    error::ConnectError,
    handshake::{self, ServerKind},
    pipeline::{
        self, BatchOutcome, NoReply, PipelinedCommand, QueuedCommand, ReplyResult, RequestQueue,
    },
    sentinel::Sentinels,
    settings::{Address, RedisSettings},
};

/// How long a server must be up before the reconnect backoff is reset to zero.
const STEADY: Duration = Duration::from_secs(1);

/// The source from which a node gets its address.
#[derive(Debug)]
pub(super) enum AddressSource {
    /// A fixed address.
    Fixed(Address, ServerKind),
    /// The address that the Sentinels report.
    Sentinels(Box<Sentinels>),
}

impl AddressSource {
    /// Completes when another server has replaced the server at `address` as the primary.
    async fn wait_until_replaced(&self, address: &Address) {
        match self {
            Self::Fixed(..) => std::future::pending().await,
            Self::Sentinels(sentinels) => sentinels.wait_until_replaced(address).await,
        }
    }
}

/// A server, and the task that maintains the connections to it.
#[derive(Debug)]
pub(super) struct Node {
    state: Arc<NodeState>,
    address: Option<Address>,
    /// Whether the first connection attempt has completed, successfully or not.
    was_attempted: watch::Receiver<bool>,
    task: AbortHandle,
    timeout: Duration,
}

/// The connections to a server, while it is up.
#[derive(Debug)]
struct NodeConnections {
    queues: Vec<RequestQueue>,
    /// One of the connections, for commands that are not decisions and therefore bypass the queue.
    unqueued: Option<MultiplexedConnection>,
}

/// State shared by a node, its connections, and the task that opens these connections.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    connections: ArcSwapOption<NodeConnections>,
    breaker: Breaker,
    error: Mutex<Option<ConnectError>>,
    /// A warning about a Redis setting that will eventually cause counts to be lost.
    warning: Mutex<Option<String>>,
    marked_down: Notify,
    circuit_opens: AtomicU64,
    batches: AtomicU64,
}

impl Node {
    /// Starts a node at `source`, and a task on `runtime` that keeps it connected until the node is
    /// dropped.
    pub(super) fn start(
        source: AddressSource,
        settings: &Arc<RedisSettings>,
        runtime: &Handle,
    ) -> Self {
        let (attempted, was_attempted) = watch::channel(false);
        let state = Arc::new(NodeState::default());
        let address = match &source {
            AddressSource::Fixed(address, _) => Some(address.clone()),
            AddressSource::Sentinels(_) => None,
        };
        let task = keep_connected(Arc::clone(&state), source, Arc::clone(settings), attempted);
        Self {
            state,
            address,
            was_attempted,
            task: runtime.spawn(task).abort_handle(),
            timeout: settings.timeout,
        }
    }

    /// Sends a request to the server. `hash` selects the connection, so that all requests for a key
    /// use the same connection.
    ///
    /// Waits for the first connection attempt to a new server, but not for a server known to be
    /// down.
    pub(super) async fn send(
        &self,
        hash: u64,
        command: PipelinedCommand,
        asking: bool,
    ) -> ReplyResult {
        // Every decision runs this code, and reading the watch channel takes a lock. Therefore,
        // check the connections first.
        if !self.is_up() && !*self.was_attempted.borrow() {
            // The code below checks the connections, so the result of the wait is ignored.
            let _ = tokio::time::timeout(self.timeout, self.wait_for_first_attempt()).await;
        }
        let (sender, reply) = oneshot::channel();
        {
            let connections = self.state.connections.load();
            let queues = &connections.as_ref().ok_or(NoReply::NotSent)?.queues;
            let count = u64::try_from(queues.len()).unwrap_or(1).max(1);
            let queue = usize::try_from(hash % count)
                .ok()
                .and_then(|at| queues.get(at));
            let request = QueuedCommand {
                command,
                asking,
                reply: sender,
            };
            // If the queue is full, a new request would time out before it is sent. Therefore a
            // full queue is treated like a server that is down.
            queue
                .ok_or(NoReply::NotSent)?
                .try_send(request)
                .map_err(|_| NoReply::NotSent)?;
        }
        match tokio::time::timeout(self.timeout, reply).await {
            Ok(Ok(reply)) => reply,
            // The queue was dropped before a reply arrived: the request may have been sent.
            Ok(Err(_)) | Err(_) => Err(NoReply::Unknown),
        }
    }

    /// Waits until the first connection attempt has completed.
    pub(super) async fn wait_for_first_attempt(&self) {
        // The connecting task owns the sender, and lives as long as the node.
        let _ = self.was_attempted.clone().wait_for(|was| *was).await;
    }

    /// Returns the timeout of a request.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the address; `None` if the Sentinels provide the address.
    pub(super) fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// Returns the reason why the server cannot be used; `None` while it can be used.
    pub(super) fn error(&self) -> Option<ConnectError> {
        lock(&self.state.error).clone()
    }

    /// Returns the warning about a server setting that will eventually cause counts to be lost.
    pub(super) fn warning(&self) -> Option<String> {
        lock(&self.state.warning).clone()
    }

    /// Returns a connection for commands that are not decisions; `None` while the server is down.
    pub(super) fn unqueued_connection(&self) -> Option<MultiplexedConnection> {
        self.state.connections.load().as_ref()?.unqueued.clone()
    }

    /// Returns whether the server is in use.
    pub(super) fn is_up(&self) -> bool {
        self.state.connections.load().is_some()
    }

    /// Returns whether the server is known to be down.
    pub(super) fn is_down(&self) -> bool {
        !self.is_up() && *self.was_attempted.borrow()
    }

    /// Stops using the server for now, because a reply showed that the server has lost its role.
    pub(super) fn mark_down(&self) {
        self.state.mark_down();
    }

    /// Returns how many times the server has changed from up to down.
    pub(super) fn circuit_opens(&self) -> u64 {
        self.state.circuit_opens.load(Ordering::Relaxed)
    }

    /// Returns the number of completed batches, including the batches that were lost.
    pub(super) fn batches(&self) -> u64 {
        self.state.batches.load(Ordering::Relaxed)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl NodeState {
    /// Records the outcome of a batch.
    fn record(&self, outcome: BatchOutcome) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        let opens = self.breaker.record(outcome != BatchOutcome::Answered);
        if outcome == BatchOutcome::ConnectionLost || opens {
            self.mark_down();
        }
    }

    /// Takes the connections out of service.
    fn mark_down(&self) {
        if self.connections.swap(None).is_some() {
            self.circuit_opens.fetch_add(1, Ordering::Relaxed);
            self.marked_down.notify_one();
        }
    }
}

/// Keeps the node connected: connects, waits until the connections are closed, and reconnects.
async fn keep_connected(
    state: Arc<NodeState>,
    source: AddressSource,
    settings: Arc<RedisSettings>,
    attempted: watch::Sender<bool>,
) {
    let mut reconnect = ReconnectBackoff::default();
    loop {
        tokio::time::sleep(reconnect.next_wait()).await;
        match connect(&state, &source, &settings).await {
            Ok((address, connections)) => {
                tracing::info!(%address, "connected to Redis");
                *lock(&state.error) = None;
                let since = Instant::now();
                let on_up = || {
                    // The send fails only if the node, which owns the receiver, was dropped.
                    let _ = attempted.send(true);
                };
                serve(&state, &source, &address, connections, &settings, on_up).await;
                if since.elapsed() >= STEADY {
                    reconnect.reset();
                }
                tracing::warn!(%address, "connection to Redis lost, or too many requests failed; reconnecting");
                *lock(&state.error) = Some(ConnectError::Lost(address));
            }
            Err(error) => {
                report(&state, error);
                let _ = attempted.send(true);
            }
        }
    }
}

/// Logs an error, unless it is the same error as the last one.
fn report(state: &NodeState, error: ConnectError) {
    let mut last = lock(&state.error);
    if last.as_ref() != Some(&error) {
        tracing::error!("{error}");
        *last = Some(error);
    }
}

async fn connect(
    state: &Arc<NodeState>,
    source: &AddressSource,
    settings: &RedisSettings,
) -> Result<(Address, Vec<MultiplexedConnection>), ConnectError> {
    let (address, kind) = match source {
        AddressSource::Fixed(address, kind) => (address.clone(), *kind),
        AddressSource::Sentinels(sentinels) => {
            (sentinels.find_primary().await?, ServerKind::Primary)
        }
    };
    let mut connections = Vec::new();
    for _ in 0..settings.connections.max(1) {
        let state = Arc::clone(state);
        let on_disconnect = move || state.mark_down();
        connections.push(handshake::connect(settings, &address, kind, on_disconnect).await?);
    }
    if let Some(connection) = connections.first_mut() {
        warn_of_eviction(
            state,
            &address,
            handshake::eviction_policy(connection).await,
        );
    }
    Ok((address, connections))
}

/// Logs once that the server evicts keys when its memory is full.
fn warn_of_eviction(state: &NodeState, address: &Address, policy: Option<String>) {
    let warning = policy.map(|policy| {
        format!(
            "Redis at {address} evicts keys when its memory is full (maxmemory-policy {policy}), so counters would be lost; set `maxmemory-policy noeviction`"
        )
    });
    let mut last = lock(&state.warning);
    if *last != warning {
        if let Some(warning) = &warning {
            tracing::warn!("{warning}");
        }
        *last = warning;
    }
}

/// Starts to use the connections, and waits until they are closed. Calls `on_up` once the
/// connections are in use.
async fn serve(
    state: &Arc<NodeState>,
    source: &AddressSource,
    address: &Address,
    connections: Vec<MultiplexedConnection>,
    settings: &RedisSettings,
    on_up: impl FnOnce(),
) {
    state.breaker.reset();
    let mut tasks = JoinSet::new();
    let mut queues = Vec::with_capacity(connections.len());
    let unqueued = connections.first().cloned();
    for connection in connections {
        let (queue, requests) = mpsc::channel(settings.queue.max(1));
        let node = Arc::clone(state);
        let record = move |outcome| node.record(outcome);
        tasks.spawn(pipeline::run(requests, connection, record));
        queues.push(queue);
    }
    let open = NodeConnections { queues, unqueued };
    state.connections.store(Some(Arc::new(open)));
    on_up();
    tokio::select! {
        () = state.marked_down.notified() => {}
        () = source.wait_until_replaced(address) => {
            tracing::warn!(%address, "Sentinels report a new primary; connecting to the new primary");
            state.connections.store(None);
        }
    }
    // Dropping the senders makes the pipelines fail the queued requests and stop. Replies to
    // requests that were already sent may still arrive.
    let _ = tokio::time::timeout(settings.timeout, async {
        while tasks.join_next().await.is_some() {}
    })
    .await;
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
