//! A connection while one request has it.

use std::future::poll_fn;

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
    /// Keeps the connection for the next request, if it can have one, as soon as the last one is sent.
    pub(super) fn give_back(self) {
        // One that takes many requests has been kept since it was made, and sends what is left by itself.
        if self.load.address().http2 {
            return;
        }
        if self.link.is_sending() {
            // Who has answered early may want the rest of the request all the same, and its client has yet to get rid of it.
            tokio::task::spawn_local(self.send_on());
        } else if self.link.is_ready() {
            let Self { link, load, worker } = self;
            load.address().keep(worker, link);
        }
    }

    /// Sends what is left of a request that has been answered, and keeps the connection then.
    async fn send_on(mut self) {
        match poll_fn(|cx| self.link.poll_sent(cx)).await {
            Ok(()) => self.give_back(),
            Err(error) => tracing::debug!("an upstream was not sent all of a request: {error}"),
        }
    }
}
