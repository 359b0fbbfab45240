//! What HTTP/2 does beside its connection, on the thread of the connection.

use std::future::Future;

use hyper::rt::Executor;

/// Runs a connection's calls on the thread of the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local;

impl<F> Executor<F> for Local
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        drop(tokio::task::spawn_local(future));
    }
}
