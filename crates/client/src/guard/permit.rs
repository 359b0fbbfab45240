//! The permit of a throttled request. The permit is released when the request ends for any reason.

use std::{fmt, sync::Arc};

use tidegate_core::{Charge, Cost, Limits, Settlement, Store};
use tokio::runtime::Handle;

use super::wait_queue::WaitQueue;
use crate::TokioClock;

/// A request's charge: the store, the limits, the key and the cost.
pub(super) struct ThrottleCharge<S> {
    pub(super) store: Arc<S>,
    pub(super) limits: Arc<Limits>,
    pub(super) key: Vec<u8>,
    pub(super) cost: Cost,
}

/// A concurrency slot that a request holds, or a position in the queue of a leaky bucket. Dropping
/// the permit releases the slot or position. The release happens immediately if the store does not
/// have to wait, and otherwise in a separate task.
pub struct ThrottlePermit<S: Store + 'static> {
    charge: Arc<ThrottleCharge<S>>,
    /// The receipt that the store issued for the charge. Releasing the slot or refunding the charge
    /// requires the receipt.
    receipt: Option<S::Receipt>,
    /// What to refund on release. Until the request is sent, releasing the permit refunds the whole
    /// cost. After the request is sent, releasing the permit refunds nothing.
    settlement: Settlement,
    queue: Arc<WaitQueue>,
    clock: TokioClock,
}

impl<S: Store + 'static> ThrottlePermit<S> {
    /// Creates the permit of an admitted request. When the permit is released, the first request in
    /// `queue` is woken.
    pub(super) fn new(
        charge: ThrottleCharge<S>,
        receipt: S::Receipt,
        queue: Arc<WaitQueue>,
        clock: TokioClock,
    ) -> Self {
        let unused = charge.cost.units();
        Self {
            charge: Arc::new(charge),
            receipt: Some(receipt),
            settlement: Settlement { unused },
            queue,
            clock,
        }
    }

    /// Records that the request is sent. From now on, dropping the permit releases only a
    /// concurrency slot and no longer refunds the cost. Returns `None` if the request holds no
    /// slot.
    pub(super) fn spend(mut self) -> Option<Self> {
        if !self.charge.limits.has_slots() {
            // Remove the receipt, so that dropping the permit has no effect on the store.
            self.receipt = None;
            return None;
        }
        self.settlement = Settlement::default();
        Some(self)
    }
}

impl<S: Store + 'static> fmt::Debug for ThrottlePermit<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottlePermit").finish_non_exhaustive()
    }
}

impl<S: Store + 'static> Drop for ThrottlePermit<S> {
    fn drop(&mut self) {
        if self.receipt.is_none() {
            return;
        }
        let (charge, queue) = (Arc::clone(&self.charge), Arc::clone(&self.queue));
        let (mut receipt, settlement) = (self.receipt.take(), [self.settlement]);
        let now = self.clock.now();
        let is_settled = charge
            .store
            .settle(&[charge.as_charge()], &mut receipt, &settlement, now)
            .is_ready();
        if is_settled {
            queue.wake_head();
            return;
        }
        // Without an async runtime, do nothing, because no request of this process can be waiting
        // for the slot, and the lease of the slot will expire.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                let charges = [charge.as_charge()];
                let settled = charge
                    .store
                    .settle(&charges, &mut receipt, &settlement, now);
                settled.await;
                queue.wake_head();
            });
        }
    }
}

impl<S> ThrottleCharge<S> {
    fn as_charge(&self) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
            longest_wait: None,
            blocked: None,
        }
    }
}
