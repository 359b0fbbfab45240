//! Threads that have their own tokio runtime, for the connections that the server itself opens.

use std::{io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// A thread with a tokio runtime. Dropping this value stops the thread.
#[derive(Debug)]
pub(crate) struct RuntimeThread {
    pub(crate) runtime: Handle,
    _stop: oneshot::Sender<()>,
}

impl RuntimeThread {
    /// Starts a thread with the name `name`.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let body = move || {
            // No message is ever sent on the channel. To stop the thread, the sender is dropped.
            // The receiver then returns an error, and the runtime ends.
            let _ = runtime.block_on(stopped);
        };
        thread::Builder::new().name(name.into()).spawn(body)?;
        Ok(Self {
            runtime: handle,
            _stop: stop,
        })
    }
}
