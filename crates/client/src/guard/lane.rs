//! Where requests for one host wait for their turn: one after another, so many at most, and no longer than they may.

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

/// How many requests may wait for one host, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSettings {
    /// How many may wait at the same time; 256. The next one fails with [`Error::QueueFull`].
    pub max_waiting: u32,
    /// How long one may wait; 60 s. One that would have to wait for longer fails with [`Error::WaitTooLong`], at once where that is
    /// known.
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

/// The lane of one host.
#[derive(Debug)]
pub(crate) struct Lane {
    settings: LaneSettings,
    places: Semaphore,
    /// Whose turn it is; tokio's mutex lets in those who wait in their order, and who stops waiting leaves no gap.
    turn: tokio::sync::Mutex<()>,
    pace: Mutex<Pace>,
    /// The pace has changed.
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

    /// Waits for the turn, and then for the pace and for `admitted`, as long as that may take. Whoever drops the future is gone from
    /// the lane.
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

    /// Changes the pace, and lets the first in line know.
    pub(crate) fn learn(&self, change: impl FnOnce(&mut Pace)) {
        self.with_pace(change);
        self.look_again();
    }

    /// Lets the first in line know that he may look again.
    pub(crate) fn look_again(&self) {
        self.changed.notify_one();
    }

    /// Waits until something was learnt.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changed.notified()
    }

    /// Waits until the pace lets the next one go.
    async fn open(&self, clock: &Clock) {
        loop {
            let now = clock.now();
            let Err(wait) = self.with_pace(|pace| pace.take(now)) else {
                return;
            };
            // Either is a reason to look again.
            let _ = timeout(duration(wait), self.changed()).await;
        }
    }

    /// Waits while the server wants to be left alone, whoever was told so.
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
        // What is behind the lock is whole at any moment.
        use_it(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
