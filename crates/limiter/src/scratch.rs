//! The key buffer of each worker.

use std::cell::Cell;

use tidegate_core::Scratch;

thread_local! {
    // The buffer is boxed, because it is moved into each decision and back.
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Runs `decide` with the key buffer of this worker. If a suspended decision is using the buffer, a
/// fresh buffer is allocated.
pub async fn with_scratch<T>(decide: impl AsyncFnOnce(&mut Scratch) -> T) -> T {
    let mut scratch = SCRATCH.take().unwrap_or_default();
    let decided = decide(&mut scratch).await;
    SCRATCH.set(Some(scratch));
    decided
}
