//! The signals that the server handles.

use std::{future::pending, io};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that the server handles.
///
/// Create this value before the listeners start: without it, a SIGTERM immediately after their
/// start kills the process without a graceful shutdown.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user2: Signal,
}

impl Signals {
    /// Installs the signal handlers.
    ///
    /// # Errors
    ///
    /// Returns the operating system error if a handler cannot be installed.
    // Signal handlers register with the current runtime, so this function is async.
    #[expect(
        clippy::unused_async,
        reason = "signal handlers must be installed inside a runtime"
    )]
    pub async fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    pub(super) async fn next(&mut self) -> SignalAction {
        tokio::select! {
            () = received(&mut self.terminate) => SignalAction::Stop,
            () = received(&mut self.interrupt) => SignalAction::Stop,
            () = received(&mut self.hangup) => SignalAction::Reload,
            () = received(&mut self.user2) => SignalAction::Upgrade,
        }
    }
}

/// The action that a signal requests.
pub(super) enum SignalAction {
    Stop,
    Reload,
    Upgrade,
}

/// Waits for `signal`. If the signal stream ends, this function waits forever.
async fn received(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        pending::<()>().await;
    }
}
