//! One server: up, with its links, or down, with the reason.
//!
//! ```text
//!            too many failures, or the connection is lost
//!        ┌────────────────────────────────────────────────┐
//!        │                                                ▼
//!   up (in use)                                    down (not used)
//!        ▲                                                │
//!        └─────── connected, recognized, and fast ◀─ probe┘ after a wait with jitter
//! ```
//!
//! While the server is down, requests fail immediately instead of waiting, and change nothing
//! because they are never sent. The probe is a new connection and a command that changes nothing; a
//! decision is never used as a probe.

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
    breaker::{Breaker, ReconnectWait},
    error::ConnectError,
    handshake::{self, Kind},
    link::{self, Answer, Ended, Fate, Link, Order, Question},
    sentinel::Sentinels,
    settings::{Address, Settings},
};

/// Minimum uptime of a server after which the reconnect backoff restarts at zero.
const STEADY: Duration = Duration::from_secs(1);

/// The source of the address of a node.
#[derive(Debug)]
pub(super) enum Place {
    /// A fixed address.
    At(Address, Kind),
    /// The address that the Sentinels report.
    Sentinels(Box<Sentinels>),
}

impl Place {
    /// Completes when another server has replaced the server at `address` as the primary.
    async fn replaced(&self, address: &Address) {
        match self {
            Self::At(..) => std::future::pending().await,
            Self::Sentinels(sentinels) => sentinels.replaced(address).await,
        }
    }
}

/// A server, and the task that keeps its connections open.
#[derive(Debug)]
pub(super) struct Node {
    shared: Arc<Shared>,
    address: Option<Address>,
    /// Whether the first attempt to connect has ended, with or without success.
    tried: watch::Receiver<bool>,
    keeper: AbortHandle,
    timeout: Duration,
}

/// The connections to a server that is up.
#[derive(Debug)]
struct Links {
    links: Vec<Link>,
    /// One of the connections, for commands that are not decisions and skip the queue.
    side: Option<MultiplexedConnection>,
}

/// State shared by a node, its links and its keeper task.
#[derive(Debug, Default)]
pub(super) struct Shared {
    links: ArcSwapOption<Links>,
    breaker: Breaker,
    trouble: Mutex<Option<ConnectError>>,
    /// A server setting that will lose counts sooner or later.
    warning: Mutex<Option<String>>,
    tripped: Notify,
    trips: AtomicU64,
    batches: AtomicU64,
}

impl Node {
    /// Starts a node at `place`, and a task on `runtime` that keeps it connected until the node is
    /// dropped.
    pub(super) fn start(place: Place, settings: &Arc<Settings>, runtime: &Handle) -> Self {
        let (has_tried, tried) = watch::channel(false);
        let shared = Arc::new(Shared::default());
        let address = match &place {
            Place::At(address, _) => Some(address.clone()),
            Place::Sentinels(_) => None,
        };
        let keeper = keep(Arc::clone(&shared), place, Arc::clone(settings), has_tried);
        Self {
            shared,
            address,
            tried,
            keeper: runtime.spawn(keeper).abort_handle(),
            timeout: settings.timeout,
        }
    }

    /// Sends a request to the server. `hash` selects the link, so that a key always uses the same
    /// one.
    ///
    /// Waits for the first attempt to connect to a new server, but not for a server that is known
    /// to be down.
    pub(super) async fn ask(&self, hash: u64, order: Order, asking: bool) -> Answer {
        // Checks the links first, because every decision runs this code and reading the watch
        // channel takes a lock.
        if !self.is_up() && !*self.tried.borrow() {
            // The links show the result of the attempt.
            let _ = tokio::time::timeout(self.timeout, self.tried()).await;
        }
        let (sender, answer) = oneshot::channel();
        {
            let links = self.shared.links.load();
            let links = &links.as_ref().ok_or(Fate::NotSent)?.links;
            let count = u64::try_from(links.len()).unwrap_or(1).max(1);
            let link = usize::try_from(hash % count)
                .ok()
                .and_then(|at| links.get(at));
            let question = Question {
                order,
                asking,
                answer: sender,
            };
            // A full queue is treated as down: a request that waits longer than this queue would
            // time out.
            link.ok_or(Fate::NotSent)?
                .try_send(question)
                .map_err(|_| Fate::NotSent)?;
        }
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(answer)) => answer,
            // The link was dropped before a reply arrived: the request may have been sent.
            Ok(Err(_)) | Err(_) => Err(Fate::Unknown),
        }
    }

    /// Waits until the first attempt to connect has ended.
    pub(super) async fn tried(&self) {
        // The keeper task owns the sender, and lives as long as the node.
        let _ = self.tried.clone().wait_for(|tried| *tried).await;
    }

    /// Returns the timeout of a request.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the address; `None` if it comes from the Sentinels.
    pub(super) fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// Returns why the server cannot be used; `None` while it can.
    pub(super) fn trouble(&self) -> Option<ConnectError> {
        lock(&self.shared.trouble).clone()
    }

    /// Returns the warning about a server setting that will lose counts sooner or later.
    pub(super) fn warning(&self) -> Option<String> {
        lock(&self.shared.warning).clone()
    }

    /// Returns a connection for commands that are not decisions; `None` while the server is down.
    pub(super) fn connection(&self) -> Option<MultiplexedConnection> {
        self.shared.links.load().as_ref()?.side.clone()
    }

    /// Returns whether the server is in use.
    pub(super) fn is_up(&self) -> bool {
        self.shared.links.load().is_some()
    }

    /// Returns whether the server is known to be down.
    pub(super) fn is_down(&self) -> bool {
        !self.is_up() && *self.tried.borrow()
    }

    /// Stops using the server for now, because a reply showed that it has lost its role.
    pub(super) fn give_up(&self) {
        self.shared.trip();
    }

    /// Returns how often the server went from up to down.
    pub(super) fn trips(&self) -> u64 {
        self.shared.trips.load(Ordering::Relaxed)
    }

    /// Returns the number of batches that were answered or lost.
    pub(super) fn batches(&self) -> u64 {
        self.shared.batches.load(Ordering::Relaxed)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Shared {
    /// Records how a batch ended.
    pub(super) fn record(&self, ended: Ended) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        let opens = self.breaker.record(ended != Ended::Answered);
        if ended == Ended::Lost || opens {
            self.trip();
        }
    }

    fn trip(&self) {
        if self.links.swap(None).is_some() {
            self.trips.fetch_add(1, Ordering::Relaxed);
            self.tripped.notify_one();
        }
    }
}

/// Keeps the node connected: connects, waits until the links are closed, and reconnects.
async fn keep(
    shared: Arc<Shared>,
    place: Place,
    settings: Arc<Settings>,
    tried: watch::Sender<bool>,
) {
    let mut reconnect = ReconnectWait::default();
    loop {
        tokio::time::sleep(reconnect.next()).await;
        match connect(&shared, &place, &settings).await {
            Ok((address, connections)) => {
                tracing::info!(%address, "connected to Redis");
                *lock(&shared.trouble) = None;
                let since = Instant::now();
                let up = || {
                    // The receiver is gone once the node is dropped.
                    let _ = tried.send(true);
                };
                serve(&shared, (&place, &address), connections, &settings, up).await;
                if since.elapsed() >= STEADY {
                    reconnect.reset();
                }
                tracing::warn!(%address, "connection to Redis lost, or too many requests failed; reconnecting");
                *lock(&shared.trouble) = Some(ConnectError::Lost(address));
            }
            Err(error) => {
                report(&shared, error);
                let _ = tried.send(true);
            }
        }
    }
}

/// Logs an error, unless it is the same as the last one.
fn report(shared: &Shared, error: ConnectError) {
    let mut trouble = lock(&shared.trouble);
    if trouble.as_ref() != Some(&error) {
        tracing::error!("{error}");
        *trouble = Some(error);
    }
}

async fn connect(
    shared: &Arc<Shared>,
    place: &Place,
    settings: &Settings,
) -> Result<(Address, Vec<MultiplexedConnection>), ConnectError> {
    let (address, kind) = match place {
        Place::At(address, kind) => (address.clone(), *kind),
        Place::Sentinels(sentinels) => (sentinels.find().await?, Kind::Primary),
    };
    let mut connections = Vec::new();
    for _ in 0..settings.connections.max(1) {
        let shared = Arc::clone(shared);
        let lost = move || shared.trip();
        connections.push(handshake::connect(settings, (&address, kind), lost).await?);
    }
    if let Some(connection) = connections.first_mut() {
        warn_of_eviction(
            shared,
            &address,
            handshake::eviction_policy(connection).await,
        );
    }
    Ok((address, connections))
}

/// Logs once that the server evicts keys when its memory is full.
fn warn_of_eviction(shared: &Shared, address: &Address, policy: Option<String>) {
    let warning = policy.map(|policy| {
        format!(
            "Redis at {address} evicts keys when its memory is full (maxmemory-policy {policy}), which loses counts; set `maxmemory-policy noeviction`"
        )
    });
    let mut known = lock(&shared.warning);
    if *known != warning {
        if let Some(warning) = &warning {
            tracing::warn!("{warning}");
        }
        *known = warning;
    }
}

/// Opens the links, and waits until they are closed.
async fn serve(
    shared: &Arc<Shared>,
    (place, address): (&Place, &Address),
    connections: Vec<MultiplexedConnection>,
    settings: &Settings,
    up: impl FnOnce(),
) {
    shared.breaker.reset();
    let mut tasks = JoinSet::new();
    let mut links = Vec::with_capacity(connections.len());
    let side = connections.first().cloned();
    for connection in connections {
        let (link, questions) = mpsc::channel(settings.queue.max(1));
        tasks.spawn(link::serve(questions, connection, Arc::clone(shared)));
        links.push(link);
    }
    shared.links.store(Some(Arc::new(Links { links, side })));
    up();
    tokio::select! {
        () = shared.tripped.notified() => {}
        () = place.replaced(address) => {
            tracing::warn!(%address, "Sentinels report a new primary; connecting to it");
            shared.links.store(None);
        }
    }
    // Without senders, the links answer the queued requests and end. Replies to requests already
    // sent may still arrive.
    let _ = tokio::time::timeout(settings.timeout, async {
        while tasks.join_next().await.is_some() {}
    })
    .await;
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
