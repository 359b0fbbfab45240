//! Starts the server from a configuration and shuts it down gracefully.
//!
//! ```text
//! config -> limiter (rules, store restored from the snapshot, clock)
//!        -> server  (workers) -> one listener per protocol
//!        -> running: reloads on change and on SIGHUP, snapshots, until SIGTERM or SIGINT
//!        -> announced: reports not-ready, still serves for `shutdown.pre_stop_delay`
//!        -> drained: no new connections, in-flight requests finish, the last snapshot is written
//! ```

mod descriptors;
mod preflight;
mod running;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
};

use socket2::{Domain, Socket, Type};
use tidegate::Clock;
use tidegate_config::{Config, Envoy, Identity, Listeners, Proxy, Snapshot};
use tidegate_core::{MemoryBounds, MemoryStore};
use tidegate_envoy::{
    ConfigFilesError, ConfigWatcher, RateLimitService,
    grpc::{self, Http2},
    quota::Quotas,
};
use tidegate_limiter::{
    Backend, Limiter,
    snapshot::{self, RestoreOutcome},
};
use tidegate_net::{Bounds, Listener, Server, Tls, TlsError, TlsListener};
use tidegate_proxy::{AccessLog, ProxyRuntime, TrustAnchorError};

use self::{
    descriptors::Bound,
    preflight::{load_tls, open_geoip},
};
pub use self::{
    preflight::{preflight_errors, preflight_warnings},
    running::{Running, Signals},
};
use crate::{
    geoip::{GeoIp, GeoIpError},
    listener,
    redis_runtime::RedisRuntime,
    reload::{Reloader, RestartOnlySettings},
};

/// The target of the log records of this module.
pub const LOG_TARGET: &str = module_path!();

/// The reason why the server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A listener's address could not be bound: it is in use or not an address of this machine.
    #[error(
        "cannot listen for {listener} on {address}: {source}; choose another address under `listen`, or `off`"
    )]
    Bind {
        /// The listener, by its name in the rules file.
        listener: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The admin listener would be reachable from other machines without a token.
    #[error(
        "listen.admin: {0} can be reached from other machines; set `admin.token_env`, or listen on 127.0.0.1"
    )]
    OpenAdmin(SocketAddr),
    /// The configuration of Envoy's rate limit service cannot be used.
    #[error("envoy.config: {0}")]
    Envoy(#[from] ConfigFilesError),
    /// The TLS settings of a listener cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// TLS to an upstream cannot be set up, for example because its trust anchors cannot be read.
    #[error(transparent)]
    Authorities(#[from] TrustAnchorError),
    /// The access log of the proxy could not be opened.
    #[error("proxy.access_log: cannot open {path}: {source}; fix the path or its permissions")]
    AccessLog {
        /// The path of the file, or `stdout`.
        path: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A GeoIP database cannot be used.
    #[error(transparent)]
    GeoIp(#[from] GeoIpError),
    /// The snapshot could not be read.
    #[error(
        "cannot read the snapshot {path}: {source}; fix the path or its permissions, or remove `store.memory.snapshot`"
    )]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A certificate for Redis could not be read.
    #[error("store.tls: cannot read {path}: {source}; fix the path or its permissions")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The operating system could not start a thread or install a signal handler.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// Secrets that the rules file refers to by the name of an environment variable. The caller of
/// [`start`] reads them.
#[derive(Clone, Default)]
pub struct Secrets {
    /// The admin token, if there is one.
    pub token: Option<String>,
    /// The password for Redis, if there is one.
    pub password: Option<String>,
    /// The token of the HTTP listener, if there is one.
    pub http_token: Option<String>,
    /// The password of the Redis protocol listener, if there is one.
    pub resp_password: Option<String>,
}

/// Omits the values, so that secrets never reach a log.
impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(…)")
    }
}

/// Starts the listeners that `config` names.
///
/// `source` is the rules file that the configuration was read from; without a file there is nothing
/// to reload. Call [`Signals::install`] before this function. An unreachable Redis does not prevent
/// the start: the fallback policy decides until Redis is reachable.
///
/// # Errors
///
/// Returns a [`ServeError`]; no listener stays open.
pub fn start(
    mut config: Config,
    source: Option<&Path>,
    secrets: Secrets,
) -> Result<Running, ServeError> {
    let Secrets {
        token,
        password,
        http_token,
        resp_password,
    } = secrets;
    check_admin(config.listen.admin, token.as_deref())?;
    let restart_only = RestartOnlySettings::with(&config);
    let certificates = Certificates::load(&config)?;
    let too_many = fit_descriptors(&mut config);
    let (geoip, identity) = open_geoip(&config.geoip, config.identity.clone())?;
    let sockets = Sockets::bind(&config)?;
    let clock = Clock::real();
    let store = memory(config.memory, config.snapshot.as_ref(), &clock)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let redis = config
        .redis
        .map(|redis| RedisRuntime::start(redis, password));
    let redis = redis.transpose()?;
    let backend = match &redis {
        None => Backend::Memory(store),
        Some(redis) => Backend::Redis(redis.fallback_store(store)),
    };
    let limiter = Limiter::new(config.rules, backend, clock);
    let limiter = Arc::new(limiter.with_trust(config.identity.trust.clone()));
    if let Some(snapshot) = &config.snapshot {
        limiter.snapshots().mark_configured();
        try_snapshot(snapshot, &limiter);
    }
    let quotas = Arc::<Quotas>::default();
    quotas.swap_rules(config.quotas, limiter.now());
    quotas.show_in(limiter.metrics());
    let envoy = config.envoy.map(|envoy| start_watcher(envoy, &limiter));
    let envoy = envoy.transpose()?;
    let server = Server::start(Server::default_workers())?;
    let clock = limiter.clock();
    let proxy = config.proxy;
    let proxy = proxy.map(|settings| build_proxy(settings, &server, clock.clone()));
    let proxy = proxy.transpose()?;
    let reloader = source.map(|path| {
        let (limiter, quotas) = (Arc::clone(&limiter), Arc::clone(&quotas));
        let path = path.to_owned();
        Arc::new(Reloader::new(
            path,
            limiter,
            quotas,
            proxy.clone(),
            restart_only,
        ))
    });
    let listeners = StartContext {
        limiter: &limiter,
        quotas: &quotas,
        reloader: reloader.as_ref(),
        envoy: envoy.as_ref(),
        headers: config.headers,
        identity: Arc::new(identity),
        grpc: config.grpc,
        listeners: config.listeners,
        http_token,
        resp_password,
        certificates: &certificates,
        geoip: geoip.clone(),
        proxy,
        token,
    };
    let proxy = listeners.proxy.clone();
    if let Some(too_many) = too_many {
        tracing::warn!("{too_many}");
    }
    listeners.open(&server, sockets)?;
    Ok(Running {
        server,
        proxy,
        redis,
        limiter,
        reloader,
        envoy,
        certificates: certificates.all(),
        geoip,
        shutdown: config.shutdown,
        snapshot: config.snapshot,
    })
}

/// Requires a token for an admin listener that is not on a loopback address.
fn check_admin(address: Option<SocketAddr>, token: Option<&str>) -> Result<(), ServeError> {
    match address {
        Some(address) if token.is_none() && !address.ip().is_loopback() => {
            Err(ServeError::OpenAdmin(address))
        }
        _ => Ok(()),
    }
}

impl ServeError {
    /// Wraps an error from opening the access log.
    fn unopened(log: &tidegate_config::AccessLog, source: io::Error) -> Self {
        let path = log.to.as_ref().map(|path| path.display().to_string());
        Self::AccessLog {
            path: path.unwrap_or_else(|| "stdout".to_owned()),
            source,
        }
    }
}

fn build_proxy(
    settings: Proxy,
    server: &Server,
    clock: Clock,
) -> Result<Arc<ProxyRuntime>, ServeError> {
    let open = |log: &tidegate_config::AccessLog| {
        AccessLog::open(log).map_err(|source| ServeError::unopened(log, source))
    };
    let log = settings.access_log.as_ref().map(open).transpose()?;
    Ok(Arc::new(ProxyRuntime::new(settings, server, log, clock)?))
}

/// Loads the configuration of Envoy's rate limit service. An invalid one prevents the start unless
/// `start_without_config` is set.
fn start_watcher(
    envoy: Envoy,
    limiter: &Arc<Limiter>,
) -> Result<Arc<ConfigWatcher>, ConfigFilesError> {
    let service = Arc::new(RateLimitService::new(Arc::clone(limiter), envoy.settings));
    let watch = ConfigWatcher::new(envoy.folder, service);
    match watch.load() {
        Ok(_) => watch.log_start(),
        Err(error) if envoy.start_without_config => {
            tracing::error!("started without a rate limit service configuration: {error}");
        }
        Err(error) => return Err(error),
    }
    Ok(Arc::new(watch))
}

/// The listening sockets; `None` for listeners that are off.
struct Sockets {
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    resp: Option<TcpListener>,
    admin: Option<TcpListener>,
    proxy: Option<TcpListener>,
}

impl Sockets {
    fn bind(config: &Config) -> Result<Self, ServeError> {
        let listen = &config.listen;
        Ok(Self {
            http: bind("http", listen.http)?,
            grpc: bind("grpc", listen.grpc)?,
            resp: bind("resp", listen.resp)?,
            admin: bind("admin", listen.admin)?,
            proxy: bind("proxy", config.proxy.as_ref().map(|proxy| proxy.listen))?,
        })
    }
}

/// The certificates of the listeners that use TLS.
struct Certificates {
    http: Option<Arc<Tls>>,
    grpc: Option<Arc<Tls>>,
    resp: Option<Arc<Tls>>,
    admin: Option<Arc<Tls>>,
    proxy: Option<Arc<Tls>>,
}

impl Certificates {
    fn load(config: &Config) -> Result<Self, TlsError> {
        let listeners = &config.listeners;
        let of_proxy = config.proxy.as_ref().and_then(|proxy| proxy.tls.as_ref());
        Ok(Self {
            http: load_tls(TlsListener::Http, listeners.http.tls.as_ref())?,
            grpc: load_tls(TlsListener::Grpc, config.grpc.tls.as_ref())?,
            resp: load_tls(TlsListener::Resp, listeners.resp.tls.as_ref())?,
            admin: load_tls(TlsListener::Admin, listeners.admin.tls.as_ref())?,
            proxy: load_tls(TlsListener::Proxy, of_proxy)?,
        })
    }

    fn all(&self) -> Vec<Arc<Tls>> {
        let all = [&self.http, &self.grpc, &self.resp, &self.admin, &self.proxy];
        all.into_iter().flatten().cloned().collect()
    }
}

/// The state that the listeners share or need to start.
struct StartContext<'a> {
    limiter: &'a Arc<Limiter>,
    quotas: &'a Arc<Quotas>,
    reloader: Option<&'a Arc<Reloader>>,
    envoy: Option<&'a Arc<ConfigWatcher>>,
    headers: tidegate_config::Headers,
    identity: Arc<Identity>,
    grpc: tidegate_config::Grpc,
    listeners: Listeners,
    http_token: Option<String>,
    resp_password: Option<String>,
    certificates: &'a Certificates,
    geoip: Option<Arc<GeoIp>>,
    proxy: Option<Arc<ProxyRuntime>>,
    token: Option<String>,
}

impl StartContext<'_> {
    fn open(self, server: &Server, sockets: Sockets) -> io::Result<()> {
        if let Some(socket) = sockets.http {
            let context = listener::http::ListenerContext {
                limiter: Arc::clone(self.limiter),
                headers: self.headers,
                identity: Arc::clone(&self.identity),
                rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
                token: self.http_token.clone(),
                hosts: self.listeners.http.hosts.clone(),
                tls: self.certificates.http.clone(),
            };
            let bounds = bounds(&self.listeners.http, Bounds::default());
            self.opened(
                "http",
                listener::http::listen(server, socket, bounds, context)?,
            );
        }
        if let Some(socket) = sockets.grpc {
            let context = grpc::ListenerContext {
                limiter: Arc::clone(self.limiter),
                quotas: Arc::clone(self.quotas),
                rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
            };
            let http2 = Http2::new(self.grpc.clone(), self.certificates.grpc.clone());
            let bounds = bounds(&self.listeners.grpc, Bounds::default());
            let listener = grpc::listen(server, socket, bounds, context, http2)?;
            self.opened("grpc", listener);
        }
        if let Some(socket) = sockets.resp {
            let settings = &self.listeners.resp;
            let context = listener::resp::ListenerContext {
                limiter: Arc::clone(self.limiter),
                username: settings.username.clone(),
                password: self.resp_password.clone(),
                tls: self.certificates.resp.clone(),
            };
            let bounds = bounds(settings, listener::resp::default_bounds());
            let listener = listener::resp::listen_guarded(server, socket, bounds, context)?;
            self.opened("resp", listener);
        }
        if let Some((socket, live)) = sockets.proxy.zip(self.proxy.as_ref()) {
            let dependencies = tidegate_proxy::Dependencies {
                limiter: Arc::clone(self.limiter),
                headers: self.headers,
                runtime: Arc::clone(live),
                identity: Arc::clone(&self.identity),
                tls: self.certificates.proxy.clone(),
            };
            self.opened(
                "proxy",
                tidegate_proxy::listen(server, socket, dependencies)?,
            );
        }
        if let Some(socket) = sockets.admin {
            let context = listener::admin::ListenerContext {
                limiter: Arc::clone(self.limiter),
                reloader: self.reloader.cloned(),
                envoy: self.envoy.cloned(),
                certificates: self.certificates.all(),
                geoip: self.geoip.clone(),
                proxy: self.proxy.clone(),
                identity: Arc::clone(&self.identity),
                token: self.token.clone(),
                hosts: self.listeners.admin.hosts.clone(),
                tls: self.certificates.admin.clone(),
            };
            let bounds = bounds(&self.listeners.admin, Bounds::default());
            let listener = listener::admin::listen(server, socket, bounds, context)?;
            self.opened("admin", listener);
        }
        Ok(())
    }

    fn opened(&self, name: &'static str, listener: Listener) {
        tracing::info!(listener = name, address = %listener.local_addr(), "listening");
        self.limiter.metrics().show_listener(name, listener);
    }
}

fn bind(
    listener: &'static str,
    address: Option<SocketAddr>,
) -> Result<Option<TcpListener>, ServeError> {
    let bind = |address| {
        listening(address).map_err(|source| ServeError::Bind {
            listener,
            address,
            source,
        })
    };
    address.map(bind).transpose()
}

/// The maximum number of connections that wait to be accepted. The operating system may have a
/// lower one (`net.core.somaxconn`).
const BACKLOG: i32 = 4_096;

fn listening(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // SO_REUSEADDR, as the standard library sets it: a restarted server can bind although
    // connections of its predecessor are still in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Merges the configured settings of a listener into its `defaults`.
fn bounds(settings: &tidegate_config::Listener, defaults: Bounds) -> Bounds {
    Bounds {
        connections: settings.max_connections,
        connections_per_client: settings.max_connections_per_client,
        idle: settings.idle_timeout.unwrap_or(defaults.idle),
        ..defaults
    }
}

fn fitted_connections(proxy: &mut Proxy) -> &mut usize {
    proxy.fitted_connections.insert(proxy.max_connections)
}

/// Raises the open-file limit and, if it is still too low, lowers the connection limits to fit.
/// Returns a warning with the lowered limits.
fn fit_descriptors(config: &mut Config) -> Option<String> {
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let limit = descriptors::raise_limit();
    let upstreams = config
        .proxy
        .iter()
        .flat_map(|proxy| &proxy.upstreams)
        .map(|upstream| upstream.urls.len().saturating_mul(upstream.max_connections));
    let reserved = upstreams.map(count).fold(
        count(config.listeners.admin.max_connections),
        u64::saturating_add,
    );
    let Listeners {
        http, grpc, resp, ..
    } = &mut config.listeners;
    let proxy = config.proxy.as_mut();
    let bounds = [
        (
            "http",
            config.listen.http.map(|_| &mut http.max_connections),
        ),
        (
            "grpc",
            config.listen.grpc.map(|_| &mut grpc.max_connections),
        ),
        (
            "resp",
            config.listen.resp.map(|_| &mut resp.max_connections),
        ),
        ("proxy", proxy.map(fitted_connections)),
    ];
    let open = |(listener, connections): (&'static str, Option<_>)| {
        connections.map(|connections| Bound {
            listener,
            connections,
        })
    };
    let mut bounds: Vec<Bound<'_>> = bounds.into_iter().filter_map(open).collect();
    descriptors::fit(&mut bounds, reserved, limit)
}

/// Creates the memory store and restores the snapshot into it.
fn memory(
    bounds: MemoryBounds,
    snapshot: Option<&Snapshot>,
    clock: &Clock,
) -> Result<MemoryStore, ServeError> {
    let store = MemoryStore::new(bounds);
    if let Some(snapshot) = snapshot {
        restore(&store, snapshot, clock)?;
    }
    Ok(store)
}

fn restore(store: &MemoryStore, snapshot: &Snapshot, clock: &Clock) -> Result<(), ServeError> {
    let path = &snapshot.path;
    let restored = snapshot::restore(store, path, clock.now());
    match restored.map_err(|source| ServeError::Snapshot {
        path: path.clone(),
        source,
    })? {
        RestoreOutcome::Nothing => tracing::info!(file = %path.display(), "no snapshot yet"),
        RestoreOutcome::Keys(keys) => {
            tracing::info!(file = %path.display(), keys, "restored the counters")
        }
        RestoreOutcome::SetAside(aside) => tracing::error!(
            file = %path.display(), kept_as = %aside.display(),
            "snapshot damaged and set aside; starting with empty counters"
        ),
    }
    Ok(())
}

/// Logs and records the error if the snapshot cannot be written now, so that the reported status is
/// correct before the first snapshot is written.
fn try_snapshot(snapshot: &Snapshot, limiter: &Limiter) {
    let path = &snapshot.path;
    if let Some(error) = preflight::lacks_folder(path).or_else(|| snapshot::try_out(path).err()) {
        tracing::error!(
            file = %path.display(), "a restart will lose the counters: {error}; make the path writable, or fix `store.memory.snapshot`"
        );
        let problem = format!("cannot write the snapshot {}: {error}", path.display());
        limiter.snapshots().fail_at_start(problem, limiter.now());
        limiter.metrics().note_snapshot_failure();
    }
}
