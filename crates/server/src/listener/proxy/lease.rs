//! A connection checked out of the pool for one request.

use super::{address::Load, link::Link};

/// A checked-out connection to an upstream. Dropping it closes an HTTP/1.1 connection, or its share
/// of an HTTP/2 one.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) link: Box<Link>,
    pub(super) load: Load,
    /// The worker that owns the connection.
    pub(super) worker: usize,
}

impl Lease {
    /// Returns the connection to the pool, if it can take another request. An HTTP/1.1 connection
    /// whose upstream answered before it had the whole request is closed instead.
    pub(super) fn give_back(self) {
        // A shared HTTP/2 connection never left the pool.
        if self.load.address().http2 {
            return;
        }
        if self.link.is_ready() {
            let Self { link, load, worker } = self;
            load.address().keep(worker, link);
        }
    }
}
