//! The concurrent streams of an HTTP/2 connection to an upstream.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::watch;

/// The maximum number of concurrent streams on a connection, and the number in use.
#[derive(Debug)]
pub(crate) struct StreamSlots {
    /// The upstream's most recent `SETTINGS_MAX_CONCURRENT_STREAMS`.
    pub(crate) max_streams: watch::Receiver<usize>,
    pub(crate) streams: AtomicUsize,
    /// Whether the connection is suspect: a response has timed out, and no data has arrived since.
    pub(crate) is_suspect: AtomicBool,
    /// Whether any response has ever arrived.
    pub(crate) has_responded: AtomicBool,
}

/// A reservation of one stream. Dropping the slot releases the stream.
#[derive(Debug)]
pub(crate) struct StreamSlot(pub(crate) Arc<StreamSlots>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}
