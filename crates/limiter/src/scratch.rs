//! The key buffer of each worker.

use std::cell::RefCell;

use tidegate_core::Scratch;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Runs `decide` with the key buffer of this worker. If a suspended decision is using the buffer, a
/// fresh buffer is allocated.
pub async fn with_scratch<T>(decide: impl AsyncFnOnce(&mut Scratch) -> T) -> T {
    let mut scratch = SCRATCH.take();
    let decided = decide(&mut scratch).await;
    SCRATCH.set(scratch);
    decided
}
