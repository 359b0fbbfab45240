//! Stores whose results a thread can wait for by blocking.

use tidegate_core::{MemoryStore, Store};

/// A store whose results a thread can wait for by blocking.
pub trait BlockingStore: Store {
    /// Prepares the thread for blocking on the store's futures. The thread stays prepared until the
    /// result is dropped.
    #[doc(hidden)]
    fn enter(&self) -> impl Sized;
}

impl BlockingStore for MemoryStore {
    fn enter(&self) -> impl Sized {}
}

/// The futures of a store in Redis must run within the runtime of the store's connections.
#[cfg(feature = "redis")]
impl BlockingStore for tidegate_redis::FallbackStore {
    fn enter(&self) -> impl Sized {
        self.runtime().enter()
    }
}
