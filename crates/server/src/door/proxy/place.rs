//! The place of a request among those that an upstream bears, while it is the upstream's turn.
//!
//! Whoever drips a body gives the upstream nothing to do. If he kept his place meanwhile, a few like him would shut it for everybody.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tidegate_http::Held;

/// A place, until it is dropped or taken.
#[derive(Debug)]
pub(super) struct Place(Arc<Slot>);

/// A place as the body of its request has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn(Weak<Slot>);

/// Empty once there is an answer.
type Slot = Mutex<Option<Held>>;

impl Place {
    pub(super) fn new(held: Held) -> Self {
        Self(Arc::new(Mutex::new(Some(held))))
    }

    pub(super) fn turn(&self) -> Turn {
        Turn(Arc::downgrade(&self.0))
    }

    /// There is an answer, or there will be none.
    pub(super) fn take(self) -> Option<Held> {
        lock(&self.0).take()
    }
}

impl Turn {
    /// The client has yet to send more.
    pub(super) fn is_clients(&self) {
        self.change(Held::pause);
    }

    /// He has.
    pub(super) fn is_upstreams(&self) {
        self.change(Held::resume);
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        if let Some(slot) = self.0.upgrade()
            && let Some(held) = &mut *lock(&slot)
        {
            change(held);
        }
    }
}

fn lock(slot: &Slot) -> MutexGuard<'_, Option<Held>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
