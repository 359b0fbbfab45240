//! Stores on whose results a thread can block.

use tidegate_core::{MemoryStore, Store};

/// A store on whose results a thread can block.
pub trait BlockingStore: Store {
    /// Prepares the thread for blocking on the store's futures. This lasts until the result is
    /// dropped.
    #[doc(hidden)]
    fn enter(&self) -> impl Sized;
}

impl BlockingStore for MemoryStore {
    fn enter(&self) -> impl Sized {}
}

/// The futures of a store in Redis need the runtime of its connections.
#[cfg(feature = "redis")]
impl BlockingStore for tidegate_redis::FallbackStore {
    fn enter(&self) -> impl Sized {
        self.runtime().enter()
    }
}
