//! A concurrency slot, or a position in a queue, that is released when the request ends for any
//! reason.

use std::{fmt, sync::Arc};

use tidegate_core::{Charge, Cost, Limits, Settlement, Store};
use tokio::runtime::Handle;

use super::lane::Lane;
use crate::Clock;

/// The charge of a request, and its store.
pub(super) struct Charged<S> {
    pub(super) store: Arc<S>,
    pub(super) limits: Arc<Limits>,
    pub(super) key: Vec<u8>,
    pub(super) cost: Cost,
}

/// A concurrency slot that a request holds, or its position in a queue. Dropping it releases it: at
/// once if the store can do that without waiting, or else in a task of its own.
pub(super) struct Place<S: Store + 'static> {
    held: Option<(Charged<S>, S::Receipt)>,
    /// The refund on release: all units, until the request is sent.
    settlement: Settlement,
    lane: Arc<Lane>,
    clock: Clock,
}

impl<S: Store + 'static> Place<S> {
    /// Creates the guard of `receipt`. When it is released, the queue `lane` is notified.
    pub(super) fn new(
        charged: Charged<S>,
        receipt: S::Receipt,
        (lane, clock): (Arc<Lane>, Clock),
    ) -> Self {
        let unused = charged.cost.units();
        Self {
            held: Some((charged, receipt)),
            settlement: Settlement { unused },
            lane,
            clock,
        }
    }

    /// Records that the request is sent: its units are spent, and only a concurrency slot is still
    /// to be released. Returns `None` if it holds none.
    pub(super) fn begun(mut self) -> Option<Self> {
        self.settlement = Settlement::default();
        self.held = self
            .held
            .take()
            .filter(|(charged, _)| charged.limits.has_slots());
        self.held.is_some().then_some(self)
    }
}

impl<S: Store + 'static> fmt::Debug for Place<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

impl<S: Store + 'static> Drop for Place<S> {
    fn drop(&mut self) {
        let Some((charged, receipt)) = self.held.take() else {
            return;
        };
        let (lane, now) = (Arc::clone(&self.lane), self.clock.now());
        let settlement = [self.settlement];
        let charge = [charged.charge()];
        let left = charged.store.settle_now(&charge, receipt, &settlement, now);
        let Err(receipt) = left else {
            lane.look_again();
            return;
        };
        // Without a runtime no request can wait for the slot, and its lease expires by itself.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                let charge = [charged.charge()];
                let settled = charged.store.settle(&charge, receipt, &settlement, now);
                settled.await;
                lane.look_again();
            });
        }
    }
}

impl<S> Charged<S> {
    fn charge(&self) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
            longest_wait: None,
        }
    }
}
