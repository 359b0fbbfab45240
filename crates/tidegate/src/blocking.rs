//! Stores that can also be used from blocking code.

use tidegate_core::{MemoryStore, Store};

/// A store that blocking code can use: a thread can block until the store's result is ready.
pub trait BlockingStore: Store {
    /// Prepares the thread for blocking on the store's futures. The thread stays prepared until the
    /// result is dropped.
    #[doc(hidden)]
    fn enter(&self) -> impl Sized;
}

impl BlockingStore for MemoryStore {
    fn enter(&self) -> impl Sized {}
}

/// A Redis store's futures must be polled within the tokio runtime that runs the store's
/// connections.
#[cfg(feature = "redis")]
impl BlockingStore for tidegate_redis::FallbackStore {
    fn enter(&self) -> impl Sized {
        self.runtime().enter()
    }
}
