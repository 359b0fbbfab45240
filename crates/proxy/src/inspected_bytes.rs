//! The memory of request bodies that are read because a rule takes its cost from them.

use std::cell::Cell;

/// The maximum number of bytes that bodies take on one worker while rules read their costs, for all clients
/// together. It is more than the largest `proxy.max_inspected_body`.
const MAX_INSPECTED_BYTES: usize = 256 << 20;

thread_local! {
    /// The number of bytes that such bodies take on this worker.
    static INSPECTED: Cell<usize> = const { Cell::new(0) };
}

/// Bytes of a body that are counted towards [`MAX_INSPECTED_BYTES`].
#[derive(Debug, Default)]
pub(crate) struct InspectedBytes(usize);

impl InspectedBytes {
    /// Adds `bytes`. Returns false if the maximum is exceeded.
    pub(crate) fn add(&mut self, bytes: usize) -> bool {
        self.0 += bytes;
        let sum = INSPECTED.get().saturating_add(bytes);
        INSPECTED.set(sum);
        sum <= MAX_INSPECTED_BYTES
    }
}

impl Drop for InspectedBytes {
    fn drop(&mut self) {
        INSPECTED.set(INSPECTED.get().saturating_sub(self.0));
    }
}
