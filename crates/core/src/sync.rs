//! The lock of the memory store: `parking_lot`'s, which two threads on one hot key hand over three times as
//! fast as the standard one, or loom's where loom explores every interleaving.

#[cfg(loom)]
use loom::sync;
#[cfg(not(loom))]
use parking_lot as sync;

pub(crate) type Guard<'a, T> = sync::MutexGuard<'a, T>;

/// A lock without poison: a decision does not panic, and if one did, its key would be as good as new and
/// the others as they were.
#[derive(Debug)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.lock()
    }

    #[cfg(loom)]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
