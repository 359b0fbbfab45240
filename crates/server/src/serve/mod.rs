//! Starts the server from a configuration and shuts it down gracefully.
//!
//! ```text
//! config -> limiter (rules, store restored from the snapshot, clock)
//!        -> server  (workers) -> one listener per protocol
//!        -> running: reloads on change and on SIGHUP, snapshots, until SIGTERM or SIGINT
//!        -> announced: reports not-ready, still serves for `shutdown.pre_stop_delay`
//!        -> drained: no new connections, in-flight requests finish, the last snapshot is written
//!
//! SIGUSR2 -> upgrade: a new process takes over the sockets, the state and the connections
//! ```

mod descriptors;
mod envoy;
mod error;
mod limiter;
mod listeners;
mod preflight;
mod running;
mod secrets;
mod service_manager;
mod sockets;
mod upgrade;

use std::{path::Path, sync::Arc};

use tidegate::Clock;
use tidegate_config::{AccessLogConfig, Config, Identity, Proxy, quota::QuotaRule};
use tidegate_envoy::quota::Quotas;
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Server, file_watch::stamp};
use tidegate_proxy::{AccessLog, ProxyRuntime};

pub use self::{
    error::{InheritedSocketError, ServeError},
    preflight::{preflight_errors, preflight_warnings},
    running::{ServerHandle, Signals, StopError},
    secrets::{Secrets, secret_errors},
    upgrade::{ChannelError, Program, Takeover, TakeoverError, TakeoverReporter},
};
use self::{
    limiter::CounterSource,
    listeners::{Certificates, ListenerContext},
    preflight::open_geoip,
    secrets::{admin_credentials, check_admin},
    sockets::Sockets,
};
pub use crate::redis_runtime::RedisStartError;
use crate::{
    geoip::GeoIp,
    listener::admin::AdminCredential,
    redis_runtime::RedisRuntime,
    reload::{Reloader, RestartOnlySettings},
};

/// The target of the log records of this module.
pub const LOG_TARGET: &str = module_path!();

/// Starts the listeners that are configured in `config`.
///
/// `source` is the rules file that contains the configuration. If `source` is `None`, reloads are
/// not possible. Call [`Signals::install`] before this function. An unreachable Redis does not
/// prevent the server from starting: the fallback policies apply until Redis is reachable.
///
/// With a `takeover`, the server uses the sockets of the old process of an upgrade. With a
/// `takeover`, the server accepts connections only in [`ServerHandle::until_stopped`], when it has
/// taken over the state.
///
/// # Errors
///
/// Returns a [`ServeError`] if the server cannot start. If the server cannot start, all listeners
/// are closed.
pub fn start(
    mut config: Config,
    source: Option<&Path>,
    secrets: Secrets,
    mut takeover: Option<Takeover>,
) -> Result<ServerHandle, ServeError> {
    let loaded = load(&mut config, &secrets, takeover.as_mut())?;
    let clock = Clock::real();
    let start_redis = |redis| RedisRuntime::start(redis, secrets.password.clone());
    let redis = config.redis.take().map(start_redis).transpose()?;
    // The stamp is taken before the file is read, so that a later change to the file is detected.
    let candidate = config.candidate.clone();
    let candidate = candidate.map(|candidate| (stamp(&candidate.file), candidate));
    let counters = match takeover {
        Some(_) => CounterSource::OldProcess,
        None => CounterSource::Snapshot,
    };
    let limiter = limiter::build(&mut config, &secrets, redis.as_ref(), &clock, counters)?;
    let quotas = start_quotas(config.quotas, &limiter);
    let start_envoy = |envoy| envoy::start(envoy, &limiter);
    let (envoy, xds) = config.envoy.map(start_envoy).transpose()?.unzip();
    let workers = Server::default_workers();
    let server = match takeover {
        Some(_) => Server::start_waiting(workers)?,
        None => Server::start(workers)?,
    };
    let start_proxy = |proxy| start_proxy(proxy, &server, clock);
    let proxy = config.proxy.map(start_proxy).transpose()?;
    let reloader = source.map(|path| {
        Arc::new(Reloader::new(
            path.to_owned(),
            Arc::clone(&limiter),
            Arc::clone(&quotas),
            proxy.clone(),
            loaded.restart_only,
            candidate.as_ref().map(|(seen, file)| (file, *seen)),
        ))
    });

    let listeners = ListenerContext {
        limiter: &limiter,
        quotas: &quotas,
        reloader: reloader.as_ref(),
        envoy: envoy.as_ref(),
        headers: config.headers,
        identity: Arc::new(loaded.identity),
        grpc: config.grpc,
        listeners: config.listeners,
        http_token: secrets.http_token,
        resp_password: secrets.resp_password,
        certificates: &loaded.certificates,
        geoip: loaded.geoip.clone(),
        proxy: proxy.clone(),
        credentials: loaded.credentials,
    };
    // Log this warning only after all files have been loaded, so that the warning does not distract
    // from an error in a file.
    if let Some(warning) = loaded.lowered_connections {
        tracing::warn!("{warning}");
    }
    let own_listeners = loaded.sockets.own()?;
    listeners.open(&server, loaded.sockets)?;
    Ok(ServerHandle {
        server,
        proxy,
        redis,
        limiter,
        reloader,
        envoy,
        _xds: xds.flatten(),
        certificates: loaded.certificates.all(),
        geoip: loaded.geoip,
        shutdown: config.shutdown,
        snapshot: config.snapshot,
        own_listeners,
        takeover,
        program: None,
    })
}

/// The parts of a configuration that are loaded before the server starts.
struct StartupResources {
    credentials: Vec<AdminCredential>,
    restart_only: RestartOnlySettings,
    certificates: Certificates,
    /// A warning, if the number of connections was lowered to fit the limit on open files.
    lowered_connections: Option<String>,
    geoip: Option<Arc<GeoIp>>,
    identity: Identity,
    sockets: Sockets,
}

/// Checks the secrets, and loads the files that `config` names. Opens the listening sockets, or
/// takes them from the old process.
fn load(
    config: &mut Config,
    secrets: &Secrets,
    takeover: Option<&mut Takeover>,
) -> Result<StartupResources, ServeError> {
    if let Some(error) = secret_errors(config, secrets).pop() {
        return Err(error);
    }
    let credentials = admin_credentials(config, secrets);
    let restart_only = RestartOnlySettings::with(config);
    let certificates = Certificates::load(config)?;
    let lowered_connections = descriptors::fit_connections(config);
    let (geoip, identity) = open_geoip(&config.geoip, config.identity.clone())?;
    let passed = takeover.map(Takeover::take_listeners);
    let sockets = Sockets::open(config, passed.unwrap_or_default())?;
    // Check the address only after `Sockets::open`, because the address may come from a socket
    // passed by the service manager.
    check_admin(config.listen.admin, &credentials)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    Ok(StartupResources {
        credentials,
        restart_only,
        certificates,
        lowered_connections,
        geoip,
        identity,
        sockets,
    })
}

fn start_quotas(rules: Vec<QuotaRule>, limiter: &ServerLimiter) -> Arc<Quotas> {
    let quotas = Arc::<Quotas>::default();
    quotas.swap_rules(rules, limiter.now());
    quotas.show_in(limiter.metrics());
    quotas
}

fn start_proxy(
    settings: Proxy,
    server: &Server,
    clock: Clock,
) -> Result<Arc<ProxyRuntime>, ServeError> {
    let open = |log: &AccessLogConfig| {
        AccessLog::open(log).map_err(|source| ServeError::access_log(log, source))
    };
    let log = settings.access_log.as_ref().map(open).transpose()?;
    Ok(Arc::new(ProxyRuntime::new(settings, server, log, clock)?))
}
