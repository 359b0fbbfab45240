//! The running server: reloads, snapshots and graceful shutdown.

use std::{io, sync::Arc, time::Duration};

use tidegate_config::{ShutdownConfig, Snapshot};
use tidegate_envoy::RuleSource;
use tidegate_limiter::{ServerLimiter, metrics::Metrics, snapshot};
use tidegate_net::{Server, Tls};
use tidegate_proxy::ProxyRuntime;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, Interval, MissedTickBehavior, interval, sleep_until},
};

use super::service_manager;
use crate::{
    MetricsPage,
    geoip::GeoIp,
    redis_runtime::RedisRuntime,
    reload::{CHECK_INTERVAL, Reloader, report_inactive_blocks, report_inactive_overrides},
    runtime_thread::RuntimeThread,
};

/// The shortest interval between reports to the watchdog of the service manager.
const MIN_WATCHDOG_INTERVAL: Duration = Duration::from_millis(10);

/// The signals that the server handles.
///
/// Create this value before the listeners start. Otherwise, a SIGTERM that arrives immediately
/// after they start kills the process without a graceful shutdown.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
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
        })
    }

    async fn next(&mut self) -> SignalAction {
        tokio::select! {
            () = received(&mut self.terminate) => SignalAction::Stop,
            () = received(&mut self.interrupt) => SignalAction::Stop,
            () = received(&mut self.hangup) => SignalAction::Reload,
        }
    }
}

/// The action that a signal requests.
enum SignalAction {
    Stop,
    Reload,
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
}

impl ServerHandle {
    /// Returns the metrics. An embedding program can add its own metrics to them.
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

    /// Serves until SIGTERM or SIGINT arrives, and then shuts down gracefully.
    ///
    /// The server first reports not-ready and keeps serving for `shutdown.pre_stop_delay`; a second
    /// signal ends this phase early. Then the server drains connections and writes the last
    /// snapshot.
    ///
    /// # Errors
    ///
    /// Fails if the last snapshot cannot be written.
    pub async fn until_stopped(self, mut signals: Signals) -> io::Result<()> {
        // The snapshot or Redis may contain blocks for rules that were removed while the server was
        // down.
        self.report_inactive();
        let limiter = Arc::clone(&self.limiter);
        let expiry = tokio::spawn(async move { limiter.keep_expiring_reservations().await });
        let limiter = Arc::clone(&self.limiter);
        let overrides = tokio::spawn(async move { limiter.sync_overrides().await });
        service_manager::ready();
        self.serve(&mut signals, None).await;
        service_manager::stopping();
        self.server.announce_shutdown();
        let delay = self.shutdown.pre_stop_delay;
        if !delay.is_zero() {
            tracing::info!(
                pre_stop_delay = ?delay,
                "shutting down: reporting not-ready, still serving for {delay:?}"
            );
            self.serve(&mut signals, Some(Instant::now() + delay)).await;
        }
        let stopped = self.stop().await;
        expiry.abort();
        overrides.abort();
        stopped
    }

    /// Serves until a stop signal arrives or `end` is reached.
    async fn serve(&self, signals: &mut Signals, end: Option<Instant>) {
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
        loop {
            tokio::select! {
                action = signals.next() => match action {
                    SignalAction::Stop => return,
                    SignalAction::Reload => {
                        service_manager::reloading();
                        self.reopen();
                        self.reload();
                        service_manager::ready();
                    }
                },
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => return,
                _ = check.tick() => {
                    self.limiter.clock().follow();
                    if let Some(top) = self.limiter.top_talkers() {
                        top.collect_ended(self.limiter.now());
                    }
                    let limiter = Arc::clone(&self.limiter);
                    // A slow Redis must not delay the handling of signals.
                    tokio::spawn(async move {
                        limiter.publish_top().await;
                        limiter.publish_denials().await;
                    });
                    self.limiter.sample_traffic();
                    self.reload_if_changed();
                }
                _ = save.tick(), if self.snapshot.is_some() => {
                    self.save();
                }
                // This thread asks the worker thread that accepts connections to send the report.
                // This way, the service manager notices if either thread hangs.
                _ = alive.tick(), if watchdog.is_some() => {
                    self.server.spawn(|| async { service_manager::alive() });
                }
            }
        }
    }

    async fn stop(self) -> io::Result<()> {
        tracing::info!(
            "shutting down: accepting no new connections, finishing requests in progress"
        );
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
        // Publish the last counts. Otherwise, other servers would not list the requests that
        // arrived in the last second and during the drain.
        if let Some(top) = limiter.top_talkers() {
            top.collect_ended(limiter.now());
        }
        limiter.publish_top().await;
        limiter.publish_denials().await;
        drop(redis);
        if dropped > 0 {
            tracing::warn!(
                connections = dropped,
                "shutting down: drain deadline passed, connections dropped"
            );
        }
        save(&limiter, snapshot.as_ref())
    }

    /// Reopens the access log, the recorded requests file and the event files, because log rotation
    /// may have renamed them.
    fn reopen(&self) {
        if let Some(log) = self.proxy.as_ref().and_then(|proxy| proxy.log()) {
            log.reopen();
        }
        if let Some(recorder) = self.limiter.recorder() {
            recorder.reopen();
        }
        if let Some(events) = self.limiter.events() {
            events.reopen();
        }
    }

    fn reload(&self) {
        // Each reload reports its own result: in the log, on the admin listener, and as a metric.
        let reloaded = self
            .reloader
            .as_ref()
            .map(|reloader| reloader.reload("SIGHUP"));
        if let Some(Ok(_)) = reloaded {
            self.report_inactive();
        }
        if let Some(envoy) = &self.envoy {
            drop(envoy.reload());
        }
        for tls in &self.certificates {
            drop(tls.reload());
        }
        if let Some(geoip) = &self.geoip {
            drop(geoip.reload());
        }
        if self.reloader.is_none() && self.envoy.is_none() {
            tracing::warn!("no rules file to reload; start with --config FILE");
        }
    }

    fn reload_if_changed(&self) {
        let reloaded = self.reloader.as_ref();
        let reloaded = reloaded.and_then(|reloader| reloader.reload_if_changed());
        if let Some(Ok(_)) = reloaded {
            self.report_inactive();
        }
        if let Some(envoy) = &self.envoy {
            drop(envoy.reload_if_changed());
        }
        for tls in &self.certificates {
            if tls.has_changed() {
                drop(tls.reload());
            }
        }
        if let Some(geoip) = &self.geoip {
            geoip.reload_if_changed();
        }
    }

    /// Logs the blocks and the overrides that are inactive under the active rules. This function
    /// does not wait for the result, because a slow Redis must not delay the handling of signals.
    fn report_inactive(&self) {
        let limiter = Arc::clone(&self.limiter);
        tokio::spawn(async move {
            report_inactive_overrides(&limiter).await;
            // This function logs its error itself.
            drop(report_inactive_blocks(&limiter).await);
        });
    }

    fn save(&self) {
        // `save` logs the error and keeps it for the status page.
        drop(save(&self.limiter, self.snapshot.as_ref()));
    }
}

/// Writes the snapshot, if one is configured. The error names the file.
fn save(limiter: &ServerLimiter, snapshot: Option<&Snapshot>) -> io::Result<()> {
    let Some(Snapshot { path, .. }) = snapshot else {
        return Ok(());
    };
    let now = limiter.now();
    let saved = snapshot::save(limiter.local_store(), path, now);
    limiter.metrics().count_snapshot(saved.is_err());
    match saved {
        Ok(()) => {
            limiter.snapshots().record_success();
            Ok(())
        }
        Err(error) => {
            let problem = format!("cannot write the snapshot {}: {error}", path.display());
            limiter.snapshots().fail(&problem, now);
            Err(io::Error::new(error.kind(), problem))
        }
    }
}

fn ticks(every: Duration) -> Interval {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    ticks
}

/// Waits for `signal`. If the signal stream ends, this function waits forever.
async fn received(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
}

fn micros(span: tidegate_core::Span) -> Duration {
    Duration::from_micros(span.as_micros())
}
