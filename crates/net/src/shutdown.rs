//! The shutdown signal and the count of open connections.
//!
//! ```text
//! serving ──▶ announced: reports not-ready, still serves ──▶ begun: finishes requests in flight
//!
//! waiting ──▶ serving ──▶ closing ──▶ handing over ──▶ handed over ──▶ begun      (an upgrade)
//!                ▲            │             │
//!                └────────────┴─────────────┘ the new process failed
//! ```

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use tokio::sync::Notify;

use super::moved::Sink;

/// A shutdown signal, shared by all clones. A shutdown is first announced and begins later. A
/// shutdown cannot be cancelled. An upgrade to another process goes through more stages
/// ([`Stage`]), and can be cancelled.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    announced: Event,
    /// The current stage in the lowest 8 bits, and the number of stage changes in the higher bits.
    stage: AtomicU64,
    changed: Notify,
    /// Where connections go that are handed over.
    sink: Sink,
}

/// The stage of a server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Stage {
    /// The server accepts connections and serves requests.
    Serving = 0,
    /// The server does not accept connections yet, because another process still serves.
    Waiting = 1,
    /// The server prepares to hand over its connections. The server accepts no new connections. The
    /// connections that cannot be handed over finish their requests and close. All other
    /// connections serve requests.
    Closing = 2,
    /// The server hands over each connection that is between two requests.
    HandingOver = 3,
    /// Another process serves. Connections are still handed over when their requests are finished.
    HandedOver = 4,
    /// The server shuts down: connections finish their requests and close.
    Ending = 5,
}

impl Stage {
    fn of(value: u64) -> Self {
        match value & 0xFF {
            0 => Self::Serving,
            1 => Self::Waiting,
            2 => Self::Closing,
            3 => Self::HandingOver,
            4 => Self::HandedOver,
            _ => Self::Ending,
        }
    }

    /// Returns whether connections that cannot be handed over must finish and close.
    #[must_use]
    pub const fn is_closing(self) -> bool {
        !matches!(self, Self::Serving | Self::Waiting)
    }

    /// Returns whether connections are handed over.
    #[must_use]
    pub const fn is_handing_over(self) -> bool {
        matches!(self, Self::HandingOver | Self::HandedOver)
    }

    /// Returns whether the server will not accept connections again.
    pub(crate) const fn is_final(self) -> bool {
        matches!(self, Self::HandedOver | Self::Ending)
    }
}

impl Shutdown {
    /// Returns whether the shutdown has been announced.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        self.0.announced.has_come()
    }

    /// Waits until the shutdown is announced. Returns immediately if the shutdown has already been
    /// announced.
    pub async fn announced(&self) {
        self.0.announced.come().await;
    }

    /// Returns whether connections must finish their requests and close, because the server shuts
    /// down or hands over its work to another process.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.stage().is_closing()
    }

    /// Waits until connections must finish their requests and close. Returns immediately if
    /// connections must already do so.
    pub async fn begun(&self) {
        self.reached(Stage::is_closing).await;
    }

    /// Returns the stage of the server.
    #[must_use]
    pub fn stage(&self) -> Stage {
        Stage::of(self.numbered_stage())
    }

    /// Returns the stage together with the number of its changes.
    fn numbered_stage(&self) -> u64 {
        self.0.stage.load(Ordering::Acquire)
    }

    /// Polls `poll` with the current stage until it is ready. The task is woken when the stage
    /// changes.
    ///
    /// The notification is polled only after a change, to register the waker. All other polls only
    /// load the stage, because polling the notification is expensive compared with the rest of a
    /// request. Therefore the returned future must run in its own task, so that its waker stays the
    /// same.
    pub async fn watch<T>(&self, mut poll: impl FnMut(&mut Context<'_>, Stage) -> Poll<T>) -> T {
        let mut changed = pin!(self.0.changed.notified());
        let mut seen = None;
        poll_fn(|cx| {
            let mut stage = self.numbered_stage();
            // If an upgrade has failed since the last poll, the stage may be the same as before.
            while seen != Some(stage) {
                seen = Some(stage);
                changed.set(self.0.changed.notified());
                // The result is not needed, because the stage is loaded again.
                let _ = changed.as_mut().poll(cx);
                stage = self.numbered_stage();
            }
            poll(cx, Stage::of(stage))
        })
        .await
    }

    /// Waits until `is_reached` returns true for the stage. Returns the stage.
    pub async fn reached(&self, is_reached: impl Fn(Stage) -> bool) -> Stage {
        loop {
            // Register the waker before reading the stage, so that a change between the two steps
            // is not missed.
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let stage = self.stage();
            if is_reached(stage) {
                return stage;
            }
            changed.await;
        }
    }

    /// Announces the shutdown: the server reports that it is not ready, but still serves requests.
    pub(crate) fn announce(&self) {
        self.0.announced.happen();
    }

    /// Begins the shutdown, even without an announcement.
    pub fn begin(&self) {
        self.announce();
        self.enter(Stage::Ending);
    }

    /// Enters `stage`, unless the server shuts down.
    pub(crate) fn enter(&self, stage: Stage) {
        let entered = |current: u64| {
            let changes = (current >> 8).wrapping_add(1);
            let is_ending = Stage::of(current) == Stage::Ending;
            (!is_ending).then_some(changes << 8 | stage as u64)
        };
        let stages = &self.0.stage;
        if stages
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, entered)
            .is_ok()
        {
            self.0.changed.notify_waiters();
        }
    }

    pub(crate) fn sink(&self) -> &Sink {
        &self.0.sink
    }
}

/// An event that happens at most once.
#[derive(Debug, Default)]
struct Event {
    happened: AtomicBool,
    happens: Notify,
}

impl Event {
    fn has_come(&self) -> bool {
        self.happened.load(Ordering::Acquire)
    }

    async fn come(&self) {
        // Register the waker before reading the flag, so that an event between the two steps is not
        // missed.
        let mut happens = pin!(self.happens.notified());
        happens.as_mut().enable();
        if !self.has_come() {
            happens.await;
        }
    }

    fn happen(&self) {
        self.happened.store(true, Ordering::Release);
        self.happens.notify_waiters();
    }
}

/// Counts open connections, and notifies waiters when no connection is open.
#[derive(Debug, Default)]
pub(super) struct ConnectionCount {
    open: AtomicUsize,
    emptied: Notify,
}

impl ConnectionCount {
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn increment(self: &Arc<Self>) -> OpenConnection {
        self.open.fetch_add(1, Ordering::AcqRel);
        OpenConnection(Arc::clone(self))
    }

    /// Waits until no connection is open.
    pub(super) async fn emptied(&self) {
        loop {
            let mut emptied = pin!(self.emptied.notified());
            emptied.as_mut().enable();
            if self.open() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

/// A guard that counts as one open connection.
#[derive(Debug)]
pub(super) struct OpenConnection(Arc<ConnectionCount>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.emptied.notify_waiters();
        }
    }
}
