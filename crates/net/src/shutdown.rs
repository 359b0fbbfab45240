//! The shutdown signal and the count of open connections.
//!
//! ```text
//! serving ──▶ announced: reports not-ready, still serves ──▶ begun: finishes requests in flight
//! ```

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

/// A shutdown signal, shared by all clones. A shutdown is first announced and begins later. It
/// cannot be cancelled.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    announced: Event,
    begun: Event,
}

impl Shutdown {
    /// Returns whether the shutdown has been announced.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        self.0.announced.has_come()
    }

    /// Waits until the shutdown is announced. Returns immediately if it has already been announced.
    pub async fn announced(&self) {
        self.0.announced.come().await;
    }

    /// Returns whether the shutdown has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.begun.has_come()
    }

    /// Waits until the shutdown begins. Returns immediately if it has already begun.
    pub async fn begun(&self) {
        self.0.begun.come().await;
    }

    /// Polls `serving` to completion. When the shutdown begins, calls `finish` on `serving`.
    ///
    /// The shutdown notification is polled only once, to register the waker. Later polls only check
    /// a flag, because polling the notification is expensive compared with the rest of a request.
    /// Therefore the returned future must run in its own task, so that its waker stays the same.
    pub async fn serve<F: Future>(
        &self,
        mut serving: Pin<&mut F>,
        finish: impl FnOnce(Pin<&mut F>),
    ) -> F::Output {
        let mut begun = pin!(self.begun());
        let (mut is_registered, mut finish) = (false, Some(finish));
        poll_fn(|cx| {
            if !is_registered {
                is_registered = true;
                // The result is not needed, because the flag is checked below.
                let _ = begun.as_mut().poll(cx);
            }
            if self.has_begun()
                && let Some(finish) = finish.take()
            {
                finish(serving.as_mut());
            }
            serving.as_mut().poll(cx)
        })
        .await
    }

    /// Announces the shutdown: the server reports that it is not ready, but still serves requests.
    pub(crate) fn announce(&self) {
        self.0.announced.happen();
    }

    /// Begins the shutdown, even if it has not been announced.
    pub fn begin(&self) {
        self.announce();
        self.0.begun.happen();
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
        let mut happens = std::pin::pin!(self.happens.notified());
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
            let mut emptied = std::pin::pin!(self.emptied.notified());
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
