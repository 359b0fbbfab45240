//! Counts the memory used by request bodies from which rules read costs.

use std::cell::Cell;

/// The maximum total size in bytes of the inspected bodies on one worker, for all clients together.
/// The maximum exceeds the largest permitted `proxy.max_inspected_body`.
const MAX_INSPECTED_BYTES: usize = 256 << 20;

thread_local! {
    /// The total size in bytes of the inspected bodies on this worker.
    static INSPECTED: Cell<usize> = const { Cell::new(0) };
}

/// The size of one body in bytes. The size counts towards [`MAX_INSPECTED_BYTES`] until this value
/// is dropped.
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
