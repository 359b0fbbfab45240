//! Notifications to the service manager, by the protocol of systemd (`sd_notify(3)`). Without a
//! service manager, which names its socket in `NOTIFY_SOCKET`, they have no effect.

use sd_notify::NotifyState;

/// Reports that the server serves requests: after the start, and after a reload.
pub(super) fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that a reload has begun. [`ready`] must follow, because the service manager waits for it.
pub(super) fn reloading() {
    // The service manager ignores the reports that were sent before this time.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("cannot read the monotonic clock: {error}"),
    }
}

/// Reports that the server has begun to shut down.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(
            "cannot notify the service manager over the socket in NOTIFY_SOCKET: {error}; it may stop this server after its start timeout"
        );
    }
}
