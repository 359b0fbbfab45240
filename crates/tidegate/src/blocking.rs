//! Stores that a thread can wait for.

use tidegate_core::{MemoryStore, Store};

/// A store that a thread can wait for.
pub trait BlockingStore: Store {
    /// Makes the thread ready to wait for the store, until the result is dropped.
    #[doc(hidden)]
    fn enter(&self) -> impl Sized;
}

impl BlockingStore for MemoryStore {
    fn enter(&self) -> impl Sized {}
}

/// The futures of a store in Redis need the runtime of its connections.
#[cfg(feature = "redis")]
impl BlockingStore for tidegate_redis::Fleet {
    fn enter(&self) -> impl Sized {
        self.runtime().enter()
    }
}
