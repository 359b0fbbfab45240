//! The running server: reloads, snapshots and graceful shutdown.

use std::{future::pending, io, pin::pin, sync::Arc, time::Duration};

use tidegate::RateLimiter as _;
use tidegate_config::{ShutdownConfig, Snapshot};
use tidegate_envoy::RuleSource;
use tidegate_limiter::{
    ServerLimiter,
    metrics::{Metrics, UpgradeResult},
};
use tidegate_net::{Server, Tls};
use tidegate_proxy::ProxyRuntime;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until},
};

use super::{
    service_manager,
    upgrade::{OwnListener, Program, Takeover, TakeoverError, Upgrade, UpgradeReport},
};
use crate::{
    MetricsPage,
    geoip::GeoIp,
    redis_runtime::RedisRuntime,
    reload::{CHECK_INTERVAL, Reloader, report_inactive_blocks, report_inactive_overrides},
    runtime_thread::RuntimeThread,
};

/// The shortest interval between reports to the watchdog of the service manager.
const MIN_WATCHDOG_INTERVAL: Duration = Duration::from_millis(10);

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

    async fn next(&mut self) -> SignalAction {
        tokio::select! {
            () = received(&mut self.terminate) => SignalAction::Stop,
            () = received(&mut self.interrupt) => SignalAction::Stop,
            () = received(&mut self.hangup) => SignalAction::Reload,
            () = received(&mut self.user2) => SignalAction::Upgrade,
        }
    }
}

/// The action that a signal requests.
enum SignalAction {
    Stop,
    Reload,
    Upgrade,
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
            limiter.publish_top().await;
            limiter.publish_denials().await;
        });
        self.limiter.sample_traffic();
        self.reload_if_changed();
    }

    /// Starts the new process of an upgrade. If the new process cannot be started, logs the reason.
    fn start_upgrade(&self) -> Option<Upgrade> {
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
    async fn advance_upgrade(
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
    async fn finish_upgrade(mut self, upgrade: Upgrade, signals: &mut Signals) -> io::Result<()> {
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
        limiter.publish_top().await;
        limiter.publish_denials().await;
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
    let saved = limiter.save_snapshot(path);
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

/// Waits for the next report of an upgrade, forever if there is none.
async fn next_report(upgrade: &mut Option<Upgrade>) -> UpgradeReport {
    match upgrade {
        Some(upgrade) => upgrade.report().await,
        None => pending().await,
    }
}

/// Waits for `signal`. If the signal stream ends, this function waits forever.
async fn received(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        pending::<()>().await;
    }
}

fn micros(span: tidegate_core::Span) -> Duration {
    Duration::from_micros(span.as_micros())
}
