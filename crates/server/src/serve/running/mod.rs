//! The running server: handles signals, does the work that is due at intervals, and shuts down
//! gracefully.

mod handover;
mod reload;
mod signals;
mod snapshot;

use std::{future::pending, io, pin::pin, sync::Arc, time::Duration};

use tidegate_config::{ShutdownConfig, Snapshot};
use tidegate_envoy::RuleSource;
use tidegate_limiter::{ServerLimiter, metrics::Metrics};
use tidegate_net::{Server, Tls};
use tidegate_proxy::ProxyRuntime;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};

pub use self::signals::Signals;
use self::{handover::next_report, signals::SignalAction, snapshot::save};
use super::{
    service_manager,
    upgrade::{OwnListener, Program, Takeover, TakeoverError, Upgrade},
};
use crate::{
    MetricsPage,
    geoip::GeoIp,
    redis_runtime::RedisRuntime,
    reload::{CHECK_INTERVAL, Reloader},
    runtime_thread::RuntimeThread,
};

/// The shortest interval between reports to the watchdog of the service manager.
const MIN_WATCHDOG_INTERVAL: Duration = Duration::from_millis(10);

/// The reason why a server did not stop as intended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// The process could not take over from the old process of an upgrade.
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    /// The last snapshot could not be written.
    #[error("error during shutdown: {0}")]
    Snapshot(io::Error),
}

/// The reason why a server no longer serves.
enum ServingEnd {
    Stop,
    /// A new process serves.
    Upgraded(Upgrade),
}

/// A running server.
#[derive(Debug)]
pub struct ServerHandle {
    pub(super) server: Server,
    pub(super) proxy: Option<Arc<ProxyRuntime>>,
    /// The runtime thread of the Redis connections, which stops after the listeners.
    pub(super) redis: Option<RedisRuntime>,
    pub(super) limiter: Arc<ServerLimiter>,
    pub(super) reloader: Option<Arc<Reloader>>,
    pub(super) envoy: Option<Arc<RuleSource>>,
    /// The runtime thread of the connection to a control plane.
    pub(super) _xds: Option<RuntimeThread>,
    pub(super) certificates: Vec<Arc<Tls>>,
    pub(super) geoip: Option<Arc<GeoIp>>,
    pub(super) shutdown: ShutdownConfig,
    pub(super) snapshot: Option<Snapshot>,
    /// A copy of each listening socket, for a new process.
    pub(super) own_listeners: Vec<OwnListener>,
    /// The old process, if this process takes over from one.
    pub(super) takeover: Option<Takeover>,
    /// The program of an upgrade; `None` if upgrades are not possible.
    pub(super) program: Option<Program>,
}

impl ServerHandle {
    /// Returns the metrics. An embedding program can add its own metrics to the returned metrics.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        self.limiter.metrics()
    }

    /// Returns the metrics of the whole server.
    #[must_use]
    pub fn metrics_page(&self) -> MetricsPage {
        MetricsPage {
            limiter: Arc::clone(&self.limiter),
            envoy: self.envoy.clone(),
            certificates: self.certificates.clone(),
            geoip: self.geoip.clone(),
            proxy: self.proxy.clone(),
        }
    }

    /// Permits upgrades: SIGUSR2 starts `program`, which takes over from this process.
    #[must_use]
    pub fn with_program(self, program: Program) -> Self {
        Self {
            program: Some(program),
            ..self
        }
    }

    /// Takes over from the old process, if there is one. Then serves until a new process has taken
    /// over, or until SIGTERM or SIGINT arrives. After a signal, shuts down gracefully.
    ///
    /// During a shutdown, the server first reports not-ready and keeps serving for
    /// `shutdown.pre_stop_delay`; a second signal ends this phase early. Then the server drains
    /// connections and writes the last snapshot.
    ///
    /// # Errors
    ///
    /// Fails if the old process continues to serve, or if the last snapshot cannot be written.
    pub async fn until_stopped(mut self, mut signals: Signals) -> Result<(), StopError> {
        if let Some(takeover) = self.takeover.take() {
            takeover.finish(&self.server, &self.limiter)?;
        }
        // The snapshot or Redis may contain blocks for rules that were removed while the server was
        // down.
        self.report_inactive();
        let limiter = Arc::clone(&self.limiter);
        let expiry = tokio::spawn(async move { limiter.keep_expiring_reservations().await });
        let limiter = Arc::clone(&self.limiter);
        let overrides = tokio::spawn(async move { limiter.sync_overrides().await });
        service_manager::ready();
        let end = self.serve(&mut signals, None).await;
        if matches!(end, ServingEnd::Stop) {
            service_manager::stopping();
            self.server.announce_shutdown();
            let delay = self.shutdown.pre_stop_delay;
            if !delay.is_zero() {
                tracing::info!(
                    pre_stop_delay = ?delay,
                    "shutting down: reporting not-ready, still serving for {delay:?}"
                );
                // An upgrade that is still in progress is abandoned.
                self.program = None;
                self.serve(&mut signals, Some(Instant::now() + delay)).await;
            }
        }
        let stopped = match end {
            ServingEnd::Stop => {
                tracing::info!(
                    "shutting down: accepting no new connections, finishing requests in progress"
                );
                self.stop().await
            }
            ServingEnd::Upgraded(upgrade) => self.finish_upgrade(upgrade, &mut signals).await,
        };
        expiry.abort();
        overrides.abort();
        stopped.map_err(StopError::Snapshot)
    }

    /// Serves until a stop signal arrives, `end` is reached, or a new process has taken over.
    async fn serve(&self, signals: &mut Signals, end: Option<Instant>) -> ServingEnd {
        let mut check = ticks(CHECK_INTERVAL);
        let save_every = self
            .snapshot
            .as_ref()
            .map_or(CHECK_INTERVAL, |snapshot| micros(snapshot.every));
        let mut save = ticks(save_every);
        let watchdog = service_manager::watchdog();
        // The server reports twice as often as the service manager requires.
        let alive_every = watchdog.map(|within| (within / 2).max(MIN_WATCHDOG_INTERVAL));
        let mut alive = ticks(alive_every.unwrap_or(CHECK_INTERVAL));
        let mut upgrade = None;
        loop {
            tokio::select! {
                action = signals.next() => match action {
                    SignalAction::Stop => return ServingEnd::Stop,
                    SignalAction::Reload => {
                        service_manager::reloading();
                        self.reopen();
                        self.reload();
                        service_manager::ready();
                    }
                    SignalAction::Upgrade if upgrade.is_some() => tracing::warn!(
                        "SIGUSR2 ignored: an upgrade is already in progress"
                    ),
                    SignalAction::Upgrade => upgrade = self.start_upgrade(),
                },
                report = next_report(&mut upgrade) => {
                    let advanced = self.advance_upgrade(&mut upgrade, report);
                    let watched = watchdog.is_some().then_some(&mut alive);
                    if let Some(upgraded) = self.keep_alive(watched, advanced).await {
                        return ServingEnd::Upgraded(upgraded);
                    }
                }
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => {
                    return ServingEnd::Stop;
                }
                _ = check.tick() => self.check(),
                _ = save.tick(), if self.snapshot.is_some() => {
                    self.save();
                }
                _ = alive.tick(), if watchdog.is_some() => self.report_alive(),
            }
        }
    }

    /// Asks the worker thread that accepts connections to report to the watchdog. The service
    /// manager therefore notices if the accepting thread or the reporting thread hangs.
    fn report_alive(&self) {
        self.server.spawn(|| async { service_manager::alive() });
    }

    /// Awaits `future`, and reports to the watchdog at each tick of `alive`.
    async fn keep_alive<T>(
        &self,
        mut alive: Option<&mut Interval>,
        future: impl Future<Output = T>,
    ) -> T {
        let mut future = pin!(future);
        loop {
            let tick = async {
                match &mut alive {
                    Some(alive) => drop(alive.tick().await),
                    None => pending().await,
                }
            };
            tokio::select! {
                output = &mut future => return output,
                () = tick => self.report_alive(),
            }
        }
    }

    /// Does the work that is due every second.
    fn check(&self) {
        self.limiter.clock().follow();
        if let Some(top) = self.limiter.top_talkers() {
            top.collect_ended(self.limiter.now());
        }
        let limiter = Arc::clone(&self.limiter);
        // A slow Redis must not delay the handling of signals.
        tokio::spawn(async move {
            limiter.publish_lists().await;
        });
        self.limiter.sample_traffic();
        self.reload_if_changed();
    }

    /// Finishes the requests in progress, at most for `shutdown.drain`, and writes the last
    /// snapshot.
    async fn stop(self) -> io::Result<()> {
        let Self {
            server,
            proxy,
            redis,
            limiter,
            shutdown,
            snapshot,
            ..
        } = self;
        let dropped = server.shutdown(shutdown.drain).await;
        if let Some(log) = proxy.as_ref().and_then(|proxy| proxy.log()) {
            log.finish();
        }
        if let Some(recorder) = limiter.recorder() {
            recorder.finish();
        }
        if let Some(events) = limiter.events() {
            events.finish();
        }
        // Publish the last counts. Otherwise, the lists on other servers would lack the requests
        // that arrived in the last second and during the drain.
        if let Some(top) = limiter.top_talkers() {
            top.collect_ended(limiter.now());
        }
        limiter.publish_lists().await;
        limiter.flush_expiry_queue().await;
        drop(redis);
        if dropped > 0 {
            tracing::warn!(
                connections = dropped,
                "drain deadline passed, connections dropped"
            );
        }
        save(&limiter, snapshot.as_ref())
    }
}

fn ticks(every: Duration) -> Interval {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    ticks
}

fn micros(span: tidegate_core::Span) -> Duration {
    Duration::from_micros(span.as_micros())
}
