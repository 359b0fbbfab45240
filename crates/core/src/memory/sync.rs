//! The memory store's lock: a spin lock, or loom's mutex when loom tests all interleavings.
//!
//! A shard is locked for a few tens of nanoseconds. Unlocking a spin lock takes one plain store.
//! Unlocking a parking lock requires a check for parked threads, which takes longer than a shard is
//! usually locked. A waiting thread doubles its pause after each attempt, so that it does not take
//! the cache line from the lock holder. After a few attempts, a waiting thread yields its core, in
//! case the lock holder was preempted.

#[cfg(loom)]
use loom::sync;
#[cfg(not(loom))]
use spin::mutex as sync;

#[cfg(loom)]
pub(crate) type LockGuard<'a, T> = sync::MutexGuard<'a, T>;
#[cfg(not(loom))]
pub(crate) type LockGuard<'a, T> = sync::SpinMutexGuard<'a, T>;

#[cfg(loom)]
type Inner<T> = sync::Mutex<T>;
#[cfg(not(loom))]
type Inner<T> = sync::SpinMutex<T>;

/// A lock without poisoning. Decisions do not panic. If a decision did panic, only its key's state
/// would be lost.
#[derive(Debug)]
pub(crate) struct Mutex<T>(Inner<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Returns the guard, or `None` if the lock is held.
    #[cfg(not(loom))]
    pub(crate) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        self.0.try_lock()
    }

    #[cfg(not(loom))]
    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        /// The number of spin-loop hints in the first pause. The pause is about as long as a few
        /// decisions, so that the holder makes progress before this thread requests the cache line
        /// again.
        const FIRST_PAUSES: u32 = 8;
        /// The number of spin-loop hints in the longest pause, which lasts a few microseconds. If
        /// the holder takes longer, the holder was probably preempted.
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
    pub(crate) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        self.0.try_lock().ok()
    }

    #[cfg(loom)]
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
