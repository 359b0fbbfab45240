//! A connection while one request has it.

use super::{address::Load, link::Link};

/// A connection to an upstream that is in use. Whoever drops it closes the connection.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) link: Box<Link>,
    pub(super) load: Load,
    /// The worker on which it lives.
    pub(super) worker: usize,
}

impl Lease {
    /// Keeps the connection for the next request, if it can have one. If the upstream has answered before it had the whole
    /// request, the connection is closed.
    pub(super) fn give_back(self) {
        // One that takes many requests has been kept since it was made.
        if self.load.address().http2 {
            return;
        }
        if self.link.is_ready() {
            let Self { link, load, worker } = self;
            load.address().keep(worker, link);
        }
    }
}
