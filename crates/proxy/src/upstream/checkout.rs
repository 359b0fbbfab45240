//! A connection checked out of the pool for one request.

use super::{connection::UpstreamConnection, endpoint::ActiveRequest};

/// A checked-out connection to an upstream. Dropping the checkout closes an HTTP/1.1 connection, or
/// releases the request's stream on an HTTP/2 connection.
#[derive(Debug)]
pub(crate) struct Checkout {
    pub(crate) connection: Box<UpstreamConnection>,
    pub(crate) active: ActiveRequest,
    /// The worker that owns the connection.
    pub(crate) worker: usize,
}

impl Checkout {
    /// Returns the connection to the pool if the connection can take another request. If the
    /// upstream responded before it had received the whole HTTP/1.1 request, closes the connection
    /// instead.
    pub(crate) fn return_to_pool(self) {
        // A shared HTTP/2 connection stays in the pool during a checkout.
        if self.active.endpoint().address.http2 {
            return;
        }
        if self.connection.is_ready() {
            let Self {
                connection,
                active,
                worker,
            } = self;
            active.endpoint().put_back(worker, connection);
        }
    }
}
