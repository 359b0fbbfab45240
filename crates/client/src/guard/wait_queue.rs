//! A queue per host, in which requests wait in order. The number of waiting requests and their wait
//! times are bounded.

use std::{future::Future, sync::Mutex};

use tidegate_core::Span;
use tokio::{
    sync::{Notify, Semaphore},
    time::{sleep, timeout},
};

use crate::{Error, TokioClock, clock::to_duration, pacer::Pacer, sync::lock};

/// The bounds of the queue for one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// The maximum number of waiting requests. The default is 256. A further request fails with
    /// [`Error::QueueFull`].
    pub max_waiting: u32,
    /// The longest wait. The default is 60 s. A request that would wait longer fails with
    /// [`Error::WaitTooLong`]. If the wait time is already known, the request fails immediately.
    pub max_wait: Span,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            max_waiting: 256,
            max_wait: Span::from_secs(60),
        }
    }
}

/// The queue for one host.
#[derive(Debug)]
pub(crate) struct WaitQueue {
    settings: QueueSettings,
    clock: TokioClock,
    positions: Semaphore,
    /// The lock that the first request in the queue holds. tokio's mutex is fair. If a waiting
    /// request is cancelled, the next request takes its position.
    head: tokio::sync::Mutex<()>,
    pacer: Mutex<Pacer>,
    /// Notified when the pacer has changed, or when a concurrency slot may be free.
    changed: Notify,
}

impl WaitQueue {
    pub(crate) fn new(settings: QueueSettings, clock: TokioClock) -> Self {
        let positions = usize::try_from(settings.max_waiting).unwrap_or(usize::MAX);
        Self {
            settings,
            clock,
            positions: Semaphore::new(positions.min(Semaphore::MAX_PERMITS)),
            head: tokio::sync::Mutex::new(()),
            pacer: Mutex::new(Pacer::default()),
            changed: Notify::new(),
        }
    }

    /// Waits until the request is the first in the queue. Then waits for the pacer and for
    /// `admission`. The total wait is at most [`QueueSettings::max_wait`]. If the future is
    /// dropped, the request leaves the queue.
    pub(crate) async fn wait<T>(
        &self,
        admission: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let most = self.settings.max_wait;
        let wait = self.next_wait();
        if wait > most {
            return Err(Error::WaitTooLong { wait, most });
        }
        let _position = self.positions.try_acquire().map_err(|_| Error::QueueFull {
            most: self.settings.max_waiting,
        })?;
        let in_order = async {
            let _head = self.head.lock().await;
            self.wait_for_pacer().await;
            admission.await
        };
        let admitted = timeout(to_duration(most), in_order).await;
        admitted.unwrap_or_else(|_| Err(self.timed_out()))
    }

    /// Changes the pacer with `change`, and wakes the first request in the queue.
    pub(crate) fn update_pacer(&self, change: impl FnOnce(&mut Pacer)) {
        self.with_pacer(change);
        self.wake_head();
    }

    /// Wakes the first request in the queue, which then checks the pacer and the limits again.
    pub(crate) fn wake_head(&self) {
        // If no request is waiting now, the notification is stored. The stored notification wakes
        // the next waiting request once, which is unnecessary but harmless.
        self.changed.notify_one();
    }

    /// Waits until the pacer changes or a slot may be free.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changed.notified()
    }

    /// If an earlier response said that the server accepts no requests for some time, waits until
    /// that time has passed.
    pub(crate) async fn wait_while_closed(&self) {
        loop {
            let wait = self.with_pacer(|pacer| pacer.closed_for(self.clock.now()));
            if wait == Span::ZERO {
                return;
            }
            sleep(to_duration(wait)).await;
        }
    }

    /// Waits until the pacer admits the request.
    async fn wait_for_pacer(&self) {
        // Only the first request in the queue may wait for the pacer. A notification wakes a single
        // task, so with two waiting requests, one of them could miss it.
        debug_assert!(self.head.try_lock().is_err());
        loop {
            let now = self.clock.now();
            let Err(wait) = self.with_pacer(|pacer| pacer.try_admit(now)) else {
                return;
            };
            debug_assert!(
                wait > Span::ZERO,
                "with a wait of zero, the loop would spin"
            );
            // Check again after the wait, or after a change of the pacer.
            let _ = timeout(to_duration(wait), self.changed()).await;
        }
    }

    /// Returns how long the next request has to wait for the pacer. A later response may shorten or
    /// lengthen the wait.
    fn next_wait(&self) -> Span {
        let now = self.clock.now();
        self.with_pacer(|pacer| pacer.next_at(now).since(now))
    }

    /// Returns the error for a request that has waited for the maximum time without being admitted.
    fn timed_out(&self) -> Error {
        let most = self.settings.max_wait;
        let waited = most.as_micros();
        let wait = waited.saturating_add(self.next_wait().as_micros());
        Error::WaitTooLong {
            wait: Span::from_micros(wait),
            most,
        }
    }

    fn with_pacer<T>(&self, use_it: impl FnOnce(&mut Pacer) -> T) -> T {
        use_it(&mut lock(&self.pacer))
    }
}
