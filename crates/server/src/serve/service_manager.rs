//! The systemd protocols between a service manager and this process: notifications
//! (`sd_notify(3)`), the watchdog (`sd_watchdog_enabled(3)`) and sockets (`sd_listen_fds(3)`). A
//! service manager sets the environment variables of these protocols. Without these environment
//! variables, the functions have no effect.

use std::{io, net::TcpListener, time::Duration};

use listenfd::ListenFd;
use sd_notify::NotifyState;

/// Reports that the server is ready, after startup or after a reload.
pub(super) fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that a reload has begun. [`ready`] must follow, because the service manager waits for
/// it.
pub(super) fn reloading() {
    // The service manager ignores a report of readiness from before this time.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("cannot read the monotonic clock: {error}"),
    }
}

/// Reports that the server has begun to shut down.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Reports that the process with the ID `process` is now the main process of the service.
pub(super) fn main_process(process: u32) {
    notify(&[NotifyState::MainPid(process)]);
}

/// Returns the time after which the service manager restarts the server if [`alive`] is not called;
/// `None` if it has no watchdog.
pub(super) fn watchdog() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}

/// Reports to the watchdog that the server is alive.
pub(super) fn alive() {
    notify(&[NotifyState::Watchdog]);
}

/// Returns the sockets that the service manager has passed, each with its name.
pub(super) fn sockets() -> io::Result<Vec<(String, io::Result<TcpListener>)>> {
    // The variables may belong to another process, for example the shell that started this process.
    if sd_notify::listen_fds()?.len() == 0 {
        return Ok(Vec::new());
    }
    let names: Vec<String> = sd_notify::listen_fds_with_names()?
        .map(|(_, name)| name)
        .collect();
    let mut passed = ListenFd::from_env();
    let take = |(index, name)| {
        let socket = passed.take_tcp_listener(index).and_then(|socket| {
            socket.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "was not passed"))
        });
        (name, socket)
    };
    Ok(names.into_iter().enumerate().map(take).collect())
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(
            "cannot notify the service manager over the socket in NOTIFY_SOCKET: {error}; the service manager may stop this server after the start timeout of the unit"
        );
    }
}
