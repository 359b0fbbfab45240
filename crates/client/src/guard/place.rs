//! A place among the requests in flight, which is given back whatever becomes of the request.

use std::{fmt, sync::Arc};

use tidegate_core::{Charge, Cost, Limits, Settlement, Store, Timestamp};
use tokio::runtime::Handle;

use super::lane::Lane;
use crate::Clock;

/// A place that a request holds. Dropping it gives it back: at once where the store has nothing to wait for, else in a task of its own.
pub(super) struct Place<S: Store + 'static> {
    held: Option<Held<S>>,
    lane: Arc<Lane>,
    clock: Clock,
}

struct Held<S: Store> {
    store: Arc<S>,
    limits: Arc<Limits>,
    key: Vec<u8>,
    cost: Cost,
    receipt: S::Receipt,
}

impl<S: Store + 'static> Place<S> {
    /// What `receipt` says that `store` has charged to `key`. Whoever waits in the `lane` is told when it is given back.
    pub(super) fn new(
        (store, limits): (&Arc<S>, &Arc<Limits>),
        (key, cost): (Vec<u8>, Cost),
        receipt: S::Receipt,
        (lane, clock): (Arc<Lane>, Clock),
    ) -> Self {
        let held = Held {
            store: Arc::clone(store),
            limits: Arc::clone(limits),
            key,
            cost,
            receipt,
        };
        Self {
            held: Some(held),
            lane,
            clock,
        }
    }
}

impl<S: Store + 'static> fmt::Debug for Place<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

impl<S: Store + 'static> Drop for Place<S> {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let (lane, now) = (Arc::clone(&self.lane), self.clock.now());
        let Some(held) = held.give_back_now(now) else {
            lane.look_again();
            return;
        };
        // Where there is no runtime any more nobody is left who could wait, and the lease ends by itself.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                held.give_back(now).await;
                lane.look_again();
            });
        }
    }
}

impl<S: Store> Held<S> {
    /// Itself, if the store has to be waited for.
    fn give_back_now(self, now: Timestamp) -> Option<Self> {
        let charge = [Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
        }];
        let settlement = [Settlement::default()];
        let left = self
            .store
            .settle_now(&charge, self.receipt, &settlement, now);
        let receipt = left.err()?;
        Some(Self { receipt, ..self })
    }

    async fn give_back(self, now: Timestamp) {
        let charge = [Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
        }];
        let settlement = [Settlement::default()];
        let settled = self.store.settle(&charge, self.receipt, &settlement, now);
        settled.await;
    }
}
