//! A pausable concurrency permit: the slot that a request holds under an upstream's adaptive
//! concurrency limit.
//!
//! The permit is paused while the proxy waits for the client to send more of the request body. A
//! slow upload causes no load on the upstream. Without the pause, a few slow clients could use up
//! the limit.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tidegate_tower::ConcurrencyPermit;

/// A concurrency permit. The slot is released when the permit is taken or dropped.
#[derive(Debug)]
pub(crate) struct PausablePermit(Arc<SharedPermit>);

/// A handle with which the request body pauses and resumes its permit. The handle does nothing once
/// the permit has been taken or dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct PermitHandle(Weak<SharedPermit>);

/// The concurrency permit of a request; `None` once the permit has been taken.
type SharedPermit = Mutex<Option<ConcurrencyPermit>>;

impl PausablePermit {
    pub(crate) fn new(permit: ConcurrencyPermit) -> Self {
        Self(Arc::new(Mutex::new(Some(permit))))
    }

    pub(crate) fn handle(&self) -> PermitHandle {
        PermitHandle(Arc::downgrade(&self.0))
    }

    /// Takes the concurrency permit. Call this method when the response head has arrived or the
    /// request has failed. After this call, the [`PermitHandle`] has no effect.
    pub(crate) fn take(self) -> Option<ConcurrencyPermit> {
        lock(&self.0).take()
    }
}

impl PermitHandle {
    /// Pauses the permit while the proxy waits for more of the client's body.
    pub(crate) fn pause(&self) {
        self.change(ConcurrencyPermit::pause);
    }

    /// Resumes the permit, even if the number of requests in flight briefly exceeds the limit as a
    /// result. Call this method when the client has sent more of the body, so that the upstream can
    /// continue its work.
    pub(crate) fn resume(&self) {
        self.change(ConcurrencyPermit::resume);
    }

    fn change(&self, change: impl FnOnce(&mut ConcurrencyPermit)) {
        if let Some(slot) = self.0.upgrade()
            && let Some(permit) = &mut *lock(&slot)
        {
            change(permit);
        }
    }
}

fn lock(slot: &SharedPermit) -> MutexGuard<'_, Option<ConcurrencyPermit>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
