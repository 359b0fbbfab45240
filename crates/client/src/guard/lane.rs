//! A queue per host, in which requests wait in order, bounded in number and in time.

use std::{
    future::Future,
    sync::{Mutex, PoisonError},
};

use tidegate_core::Span;
use tokio::{
    sync::{Notify, Semaphore},
    time::{sleep, timeout},
};

use crate::{Clock, Error, clock::duration, pace::Pace};

/// Bounds of the queue of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSettings {
    /// The most requests that wait at the same time; 256. A further one fails with
    /// [`Error::QueueFull`].
    pub max_waiting: u32,
    /// The longest wait; 60 s. A request that would wait longer fails with [`Error::WaitTooLong`],
    /// at once if the wait is known.
    pub max_wait: Span,
}

impl Default for LaneSettings {
    fn default() -> Self {
        Self {
            max_waiting: 256,
            max_wait: Span::from_secs(60),
        }
    }
}

/// The queue of one host.
#[derive(Debug)]
pub(crate) struct Lane {
    settings: LaneSettings,
    places: Semaphore,
    /// Held by the first request in the queue. tokio's mutex is fair, and a request that is
    /// cancelled leaves no gap.
    turn: tokio::sync::Mutex<()>,
    pace: Mutex<Pace>,
    /// Notified when the pace has changed, or a concurrency slot may be free.
    changed: Notify,
}

impl Lane {
    pub(crate) fn new(settings: LaneSettings) -> Self {
        let places = usize::try_from(settings.max_waiting).unwrap_or(usize::MAX);
        Self {
            settings,
            places: Semaphore::new(places.min(Semaphore::MAX_PERMITS)),
            turn: tokio::sync::Mutex::new(()),
            pace: Mutex::new(Pace::default()),
            changed: Notify::new(),
        }
    }

    /// Waits for the request's turn, then for the pace and for `admitted`, within the longest wait.
    /// If the future is dropped, the request leaves the queue.
    pub(crate) async fn pass<T>(
        &self,
        clock: &Clock,
        admitted: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let most = self.settings.max_wait;
        let known = self.with_pace(|pace| pace.next(clock.now()).since(clock.now()));
        if known > most {
            return Err(Error::WaitTooLong { wait: known, most });
        }
        let _place = self.places.try_acquire().map_err(|_| Error::QueueFull {
            most: self.settings.max_waiting,
        })?;
        let in_turn = async {
            let _turn = self.turn.lock().await;
            self.open(clock).await;
            admitted.await
        };
        let waited = timeout(duration(most), in_turn).await;
        waited.unwrap_or_else(|_| {
            let wait = self.with_pace(|pace| pace.next(clock.now()).since(clock.now()));
            let wait = Span::from_micros(most.as_micros().saturating_add(wait.as_micros()));
            Err(Error::WaitTooLong { wait, most })
        })
    }

    /// Changes the pace, and wakes the first request in the queue.
    pub(crate) fn learn(&self, change: impl FnOnce(&mut Pace)) {
        self.with_pace(change);
        self.look_again();
    }

    /// Wakes the first request in the queue, so that it checks again.
    pub(crate) fn look_again(&self) {
        self.changed.notify_one();
    }

    /// Waits until the queue is notified of a change.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changed.notified()
    }

    /// Waits until the pace admits the next request.
    async fn open(&self, clock: &Clock) {
        loop {
            let now = clock.now();
            let Err(wait) = self.with_pace(|pace| pace.take(now)) else {
                return;
            };
            // Whether the time has passed or the pace has changed, check again.
            let _ = timeout(duration(wait), self.changed()).await;
        }
    }

    /// Waits while the server wants no requests, whichever response asked for that.
    pub(crate) async fn left_alone(&self, clock: &Clock) {
        loop {
            let now = clock.now();
            let wait = self.with_pace(|pace| pace.closed_for(now));
            if wait == Span::ZERO {
                return;
            }
            sleep(duration(wait)).await;
        }
    }

    fn with_pace<T>(&self, use_it: impl FnOnce(&mut Pace) -> T) -> T {
        // No panic leaves the pace inconsistent, so a poisoned lock is safe to use.
        use_it(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
