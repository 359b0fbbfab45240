//! The signal to finish, and the count of those who have not.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// Tells everyone who holds a clone that the server shuts down. It begins once and never ends.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    begun: AtomicBool,
    begins: Notify,
}

impl Shutdown {
    /// Whether the shutdown has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.begun.load(Ordering::Acquire)
    }

    /// Waits until the shutdown begins; returns at once if it has.
    pub async fn begun(&self) {
        // Registered before the flag is read, so that a beginning in between is not missed.
        let mut begins = std::pin::pin!(self.0.begins.notified());
        begins.as_mut().enable();
        if !self.has_begun() {
            begins.await;
        }
    }

    pub(crate) fn begin(&self) {
        self.0.begun.store(true, Ordering::Release);
        self.0.begins.notify_waiters();
    }
}

/// Counts what is open, and tells when nothing is.
#[derive(Debug, Default)]
pub(super) struct Tally {
    open: AtomicUsize,
    emptied: Notify,
}

impl Tally {
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn enter(self: &Arc<Self>) -> Open {
        self.open.fetch_add(1, Ordering::AcqRel);
        Open(Arc::clone(self))
    }

    /// Waits until nothing is open.
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

/// Counts as open for as long as it lives.
#[derive(Debug)]
pub(super) struct Open(Arc<Tally>);

impl Drop for Open {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.emptied.notify_waiters();
        }
    }
}
