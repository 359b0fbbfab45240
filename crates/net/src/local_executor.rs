//! The executor for hyper's HTTP/2 tasks.

use std::future::Future;

use hyper::rt::Executor;

/// An executor that spawns the tasks of a connection on the connection's own thread.
#[derive(Clone, Copy, Debug)]
pub struct LocalExecutor;

impl<F> Executor<F> for LocalExecutor
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        drop(tokio::task::spawn_local(future));
    }
}
