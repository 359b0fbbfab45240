//! The handover of connections and state to the new process of an upgrade.

use std::{future::pending, io, time::Duration};

use tidegate::RateLimiter as _;
use tidegate_limiter::{ServerLimiter, metrics::UpgradeResult};
use tokio::time::{Instant, sleep};

use super::{ServerHandle, Signals, signals::SignalAction};
use crate::serve::upgrade::{Upgrade, UpgradeReport};

/// How long a handover waits for HTTP/2 requests to the proxy that a client sent before it received
/// the GOAWAY.
const GOAWAY_GRACE: Duration = Duration::from_millis(300);

/// The interval at which a handover checks whether the requests are finished.
const HANDOVER_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The open connections that determine how long a handover waits. A handover does not wait for
/// proxied requests that have been decided.
#[derive(Debug, Default)]
struct OpenConnections {
    /// The connections that can be handed over, without those of the proxy.
    movable: usize,
    /// The connections of the proxy that cannot be handed over.
    proxied: usize,
    /// All other connections that cannot be handed over. A connection whose TLS handshake is in
    /// progress is handed over after it.
    others: usize,
}

impl OpenConnections {
    fn of(limiter: &ServerLimiter) -> Self {
        let mut connections = Self::default();
        limiter.metrics().visit_listeners(|name, listener| {
            // A connection that closes at the same time must not make `fixed` too small.
            let open = listener.open();
            let movable = listener.movable();
            let later = movable + listener.handshaking();
            let fixed = open.saturating_sub(later);
            if name == "proxy" {
                connections.proxied += fixed;
            } else {
                connections.movable += movable;
                connections.others += fixed;
            }
        });
        connections
    }
}

impl ServerHandle {
    /// Starts the new process of an upgrade. If the new process cannot be started, logs the reason.
    pub(super) fn start_upgrade(&self) -> Option<Upgrade> {
        let Some(program) = self.program.clone() else {
            tracing::error!(
                "SIGUSR2 ignored: the server is shutting down, or was started without a program for upgrades"
            );
            return None;
        };
        // The container or the machine ends with its first process.
        if std::process::id() == 1 {
            self.limiter.metrics().count_upgrade(UpgradeResult::Failed);
            tracing::error!(
                "upgrade failed, so this process continues to serve: this process is the first process of a container, and the container would end with this process; replace the container instead (a rolling update)"
            );
            return None;
        }
        let started = Upgrade::start(program, &self.own_listeners);
        started
            .inspect_err(|error| {
                self.limiter.metrics().count_upgrade(UpgradeResult::Failed);
                tracing::error!("upgrade failed, so this process continues to serve: {error}");
            })
            .ok()
    }

    /// Handles a report of the upgrade. Returns the upgrade if the new process serves.
    pub(super) async fn advance_upgrade(
        &self,
        upgrade: &mut Option<Upgrade>,
        report: UpgradeReport,
    ) -> Option<Upgrade> {
        let error = match report {
            UpgradeReport::Prepared => {
                self.hand_over(upgrade.as_ref()?).await;
                let next = upgrade.as_mut()?.report().await;
                match next {
                    UpgradeReport::Failed(error) => error,
                    UpgradeReport::Prepared | UpgradeReport::Committed => return upgrade.take(),
                }
            }
            UpgradeReport::Failed(error) => error,
            UpgradeReport::Committed => return upgrade.take(),
        };
        self.limiter.metrics().count_upgrade(UpgradeResult::Failed);
        tracing::error!("upgrade failed, so this process continues to serve: {error}");
        let moved = upgrade.take()?;
        self.limiter.take_back_state();
        self.server.resume_serving();
        let adopter = self.server.adopter();
        for connection in moved.give_back() {
            if let Err(error) = adopter.adopt(connection) {
                tracing::debug!(%error, "connection lost");
            }
        }
        None
    }

    /// Stops deciding, and hands over the connections and the state.
    async fn hand_over(&self, upgrade: &Upgrade) {
        self.server.stop_accepting().await;
        // With Redis, two processes can decide at the same time.
        let is_exclusive = self.limiter.redis_store().is_none();
        if is_exclusive {
            self.wait_while(|open, since| {
                open.others > 0 || open.proxied > 0 && since < GOAWAY_GRACE
            })
            .await;
        }
        self.server.hand_over(Box::new(upgrade.mover())).await;
        let meanwhile = if is_exclusive { "; requests wait" } else { "" };
        tracing::info!("upgrade: handing over the connections and the state{meanwhile}");
        if is_exclusive
            && self
                .wait_while(|open, _| open.movable > 0 || self.has_undecided_requests())
                .await
        {
            tracing::warn!(
                "upgrade: some requests in progress were not finished after {:?}; if they need a decision later, they are answered with 503",
                self.shutdown.handover
            );
        }
        upgrade.send_state(&self.limiter);
    }

    /// Returns whether a request is undecided because it waits for a concurrency slot, or because
    /// the proxy waits for its body.
    fn has_undecided_requests(&self) -> bool {
        let proxy = self.proxy.as_ref();
        self.limiter.wait_queues().count() > 0 || proxy.is_some_and(|proxy| proxy.has_undecided())
    }

    /// Waits while `must_wait` returns true for the open connections and the time since the call,
    /// at most for `shutdown.handover`. Returns the last result.
    async fn wait_while(&self, must_wait: impl Fn(&OpenConnections, Duration) -> bool) -> bool {
        let begun = Instant::now();
        loop {
            let since = begun.elapsed();
            let must_wait = must_wait(&OpenConnections::of(&self.limiter), since);
            if !must_wait || since >= self.shutdown.handover {
                return must_wait;
            }
            sleep(HANDOVER_CHECK_INTERVAL).await;
        }
    }

    /// Finishes the requests in progress after a new process has taken over.
    pub(super) async fn finish_upgrade(
        mut self,
        upgrade: Upgrade,
        signals: &mut Signals,
    ) -> io::Result<()> {
        let drain = self.shutdown.drain;
        let stopped = async { while !matches!(signals.next().await, SignalAction::Stop) {} };
        tokio::select! {
            () = self.server.finish_handover(drain) => {}
            () = stopped => {}
        }
        // The snapshot file belongs to the new process.
        self.snapshot = None;
        self.shutdown.drain = Duration::ZERO;
        let stopped = self.stop().await;
        upgrade.finish();
        tracing::info!("upgrade finished: this process exits");
        stopped
    }
}

/// Waits for the next report of an upgrade, forever if there is none.
pub(super) async fn next_report(upgrade: &mut Option<Upgrade>) -> UpgradeReport {
    match upgrade {
        Some(upgrade) => upgrade.report().await,
        None => pending().await,
    }
}
