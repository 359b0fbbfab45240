//! The signal to finish, and the count of those who have not.
//!
//! ```text
//! serving ──▶ announced: told to be elsewhere, and served as ever ──▶ begun: what has begun is finished
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

/// Tells everyone who holds a clone that the server shuts down. It is announced, begins once and never ends.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    announced: Event,
    begun: Event,
}

impl Shutdown {
    /// Whether it is known that the shutdown is going to begin.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        self.0.announced.has_come()
    }

    /// Waits until the shutdown is announced; returns at once if it is.
    pub async fn announced(&self) {
        self.0.announced.come().await;
    }

    /// Whether the shutdown has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.begun.has_come()
    }

    /// Waits until the shutdown begins; returns at once if it has.
    pub async fn begun(&self) {
        self.0.begun.come().await;
    }

    /// Waits for `serving`, which `finish` tells to come to its end once the shutdown begins.
    ///
    /// The signal is registered once and then only looked at, because to poll it costs more than much of a request. So this
    /// must be in a task of its own, whose waker stays the same.
    pub(crate) async fn serve<F: Future>(
        &self,
        mut serving: Pin<&mut F>,
        finish: impl FnOnce(Pin<&mut F>),
    ) -> F::Output {
        let mut begun = pin!(self.begun());
        let (mut is_registered, mut finish) = (false, Some(finish));
        poll_fn(|cx| {
            if !is_registered {
                is_registered = true;
                // Whether it has begun is looked up below.
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

    pub(crate) fn announce(&self) {
        self.0.announced.happen();
    }

    /// Begins it, unannounced or not.
    pub(crate) fn begin(&self) {
        self.announce();
        self.0.begun.happen();
    }
}

/// What happens once.
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
        // Registered before the flag is read, so that what happens in between is not missed.
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
