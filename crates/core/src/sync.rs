//! The lock of the memory store: one that spins, or loom's where loom explores every interleaving.
//!
//! A shard is held for some tens of nanoseconds, less than a parking lock takes to find out that nobody
//! is parked: letting go is a plain store here. Who finds the lock taken backs off, twice as long each time, so that the
//! holder has its cache line to itself, and soon gives the core away: to whoever was interrupted while holding.

#[cfg(loom)]
use loom::sync;
#[cfg(not(loom))]
use spin::mutex as sync;

#[cfg(loom)]
pub(crate) type Guard<'a, T> = sync::MutexGuard<'a, T>;
#[cfg(not(loom))]
pub(crate) type Guard<'a, T> = sync::SpinMutexGuard<'a, T>;

#[cfg(loom)]
type Inner<T> = sync::Mutex<T>;
#[cfg(not(loom))]
type Inner<T> = sync::SpinMutex<T>;

/// A lock without poison: a decision does not panic, and if one did, its key would be as good as new and
/// the others as they were.
#[derive(Debug)]
pub(crate) struct Mutex<T>(Inner<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| self.wait())
    }

    /// The guard, unless somebody else has it.
    #[cfg(not(loom))]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.0.try_lock()
    }

    #[cfg(not(loom))]
    #[cold]
    fn wait(&self) -> Guard<'_, T> {
        /// A few decisions long, so that the holder gets some done before its cache line is asked for.
        const FIRST_PAUSES: u32 = 8;
        /// Some microseconds: a holder that takes longer has lost its core.
        const MOST_PAUSES: u32 = 64;
        let mut pauses = FIRST_PAUSES;
        loop {
            if pauses > MOST_PAUSES {
                std::thread::yield_now();
            } else {
                (0..pauses).for_each(|_| std::hint::spin_loop());
                pauses *= 2;
            }
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
        }
    }

    #[cfg(loom)]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.0.try_lock().ok()
    }

    #[cfg(loom)]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
