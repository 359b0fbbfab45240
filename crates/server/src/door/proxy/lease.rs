//! A connection while one request has it.

use std::time::Duration;

use super::{address::Load, link::Link};

/// A connection to an upstream that is in use. Whoever drops it closes the connection.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) link: Link,
    pub(super) load: Load,
    /// The worker on which it lives.
    pub(super) worker: usize,
    /// For how long it may wait for another request.
    pub(super) keep: Duration,
}

impl Lease {
    /// Keeps the connection for the next request, if it can have one: one on which the request's body is still being
    /// sent cannot.
    pub(super) fn give_back(self) {
        // One that takes many requests has been kept since it was made.
        if !self.load.address().http2 && self.link.is_ready() {
            let Self {
                link,
                load,
                worker,
                keep,
            } = self;
            load.address().keep(worker, link, keep);
        }
    }
}
