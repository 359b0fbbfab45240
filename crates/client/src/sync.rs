//! Locks of this crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a thread panicked while it held the lock.
///
/// The values behind this crate's locks stay consistent if the code that changes them panics. At
/// worst, a request is not counted, or a body that panicked while it was read counts as ended. With
/// an `unwrap`, every later request would panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
