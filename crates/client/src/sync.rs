//! Locks for this crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a thread panicked while it held the lock.
///
/// The values behind this crate's locks stay consistent even if the code that changes them panics.
/// At worst, a request is not counted, or a body whose reading panicked is treated as ended. With
/// an `unwrap`, every later request would panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
