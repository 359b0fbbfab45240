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
mod service_manager;
mod sockets;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
};

use tidegate::Clock;
use tidegate_config::{
    Config, Envoy, EventsConfig, Identity, Listeners, Proxy, RecordConfig, Snapshot, TokenScope,
    check_secrets, envoy::RuleOrigin,
};
use tidegate_core::{MemoryBounds, MemoryStore};
use tidegate_envoy::{
    ConfigFilesError, ConfigWatcher, InitialConfig, RateLimitService, RuleSource, XdsClient,
    grpc::{self, Http2},
    quota::Quotas,
};
use tidegate_limiter::{
    Backend, KeyMask, NoRandomBytes, RequestRecorder, ServerLimiter,
    events::{Events, EventsError, WebhookSecret, WebhookSettings},
    reservations::{NoTokenKey, Reservations},
    snapshot::{self, RestoreOutcome},
};
use tidegate_net::{
    Bounds, ClientTlsError, Listener, Server, Tls, TlsError, TlsListener, file_watch::stamp,
};
use tidegate_proxy::{AccessLog, ProxyRuntime, TrustAnchorError};

use self::{
    descriptors::Bound,
    preflight::{load_tls, open_geoip},
    sockets::Sockets,
};
pub use self::{
    preflight::{preflight_errors, preflight_warnings},
    running::{ServerHandle, Signals},
    sockets::InheritedSocketError,
};
pub use crate::redis_runtime::RedisStartError;
use crate::{
    geoip::{GeoIp, GeoIpError},
    listener::{
        self,
        admin::{AdminContext, AdminCredential},
    },
    redis_runtime::RedisRuntime,
    reload::{LoadError, Reloader, RestartOnlySettings, read_candidate},
    runtime_thread::RuntimeThread,
};

/// The target of the log records of this module.
pub const LOG_TARGET: &str = module_path!();

/// The reason why the server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A listener's address could not be bound, because it is in use or is not an address of this
    /// machine.
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
    /// A socket that the service manager passed cannot be used.
    #[error(transparent)]
    InheritedSocket(#[from] InheritedSocketError),
    /// The admin listener would be reachable from other machines without a token.
    #[error(
        "listen.admin: {0} can be reached from other machines; set `admin.token_env`, or listen on 127.0.0.1"
    )]
    OpenAdmin(SocketAddr),
    /// Two tokens of the admin listener have the same secret, so that the audit log could not tell
    /// their owners apart.
    #[error(
        "admin.tokens: the tokens \"{0}\" and \"{1}\" have the same secret; give each token its own secret"
    )]
    EqualTokens(String, String),
    /// The configuration of Envoy's rate limit service cannot be used.
    #[error("envoy.config: {0}")]
    Envoy(#[from] ConfigFilesError),
    /// TLS to the control plane of Envoy's rate limit service cannot be set up.
    #[error("envoy.config.xds.tls: {0}")]
    Xds(#[from] ClientTlsError),
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
    /// The file for recorded requests could not be opened.
    #[error("record.to: cannot open {path}: {source}; fix the path or its permissions")]
    Record {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A destination of events cannot be used.
    #[error(transparent)]
    Events(#[from] EventsError),
    /// The secret of a webhook cannot be used.
    #[error("events.webhooks[{index}]: the secret {problem}")]
    WebhookSecret {
        /// The position of the webhook in the rules file, counted from 0.
        index: usize,
        /// The problem.
        problem: &'static str,
    },
    /// The candidate rules cannot be used.
    #[error(transparent)]
    Candidate(#[from] LoadError),
    /// A GeoIP database cannot be used.
    #[error(transparent)]
    GeoIp(#[from] GeoIpError),
    /// The file of overrides could not be read or written.
    #[error(
        "cannot use the file of overrides {path}: {source}; fix its permissions, or change `store.memory.snapshot`"
    )]
    Overrides {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
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
    /// The connections to Redis could not be started.
    #[error(transparent)]
    Redis(#[from] RedisStartError),
    /// Keys cannot be hashed, because the system provides no random bytes.
    #[error("privacy.keys: {0}")]
    Privacy(#[from] NoRandomBytes),
    /// A secret of reservations is empty or too short.
    #[error("reservations.secret_env: {0}")]
    ReservationSecret(&'static str),
    /// No key for the tokens of reservations could be created.
    #[error(transparent)]
    Reservations(#[from] NoTokenKey),
    /// The operating system could not start a thread or install a signal handler.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// Secrets that the rules file specifies by the names of environment variables. The caller of
/// [`start`] reads these secrets.
#[derive(Clone, Default)]
pub struct Secrets {
    /// The admin token, if there is one.
    pub token: Option<String>,
    /// The tokens of [`Config::operator_tokens`], in the same order.
    pub operator_tokens: Vec<String>,
    /// The secrets of the webhooks of [`Config::events`], in the same order.
    pub webhook_secrets: Vec<String>,
    /// The password for Redis, if there is one.
    pub password: Option<String>,
    /// The token of the HTTP listener, if there is one.
    pub http_token: Option<String>,
    /// The password of the Redis protocol listener, if there is one.
    pub resp_password: Option<String>,
    /// The secret with which keys are hashed, if there is one.
    pub key_secret: Option<String>,
    /// The secrets with which the tokens of reservations are sealed, if there are any.
    pub reservation_secrets: Option<String>,
}

/// Omits the values, so that secrets never reach a log.
impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(…)")
    }
}

/// Starts the listeners that `config` names.
///
/// `source` is the rules file from which the configuration was read; without a file, reloads are
/// not possible. Call [`Signals::install`] before this function. An unreachable Redis does not
/// prevent the start, because the fallback policy decides until Redis is reachable.
///
/// # Errors
///
/// Returns a [`ServeError`] if the server cannot start. No listener stays open in that case.
pub fn start(
    mut config: Config,
    source: Option<&Path>,
    secrets: Secrets,
) -> Result<ServerHandle, ServeError> {
    if let Some(error) = secret_errors(&config, &secrets).pop() {
        return Err(error);
    }
    let Secrets {
        token,
        operator_tokens,
        webhook_secrets,
        password,
        http_token,
        resp_password,
        key_secret,
        reservation_secrets,
    } = secrets;
    let credentials = admin_credentials(token, operator_tokens, &config);
    let restart_only = RestartOnlySettings::with(&config);
    let certificates = Certificates::load(&config)?;
    let too_many = fit_descriptors(&mut config);
    let (geoip, identity) = open_geoip(&config.geoip, config.identity.clone())?;
    let sockets = Sockets::open(&mut config)?;
    // The address may be that of a socket that the service manager passed.
    check_admin(config.listen.admin, &credentials)?;
    let clock = Clock::real();
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let start_redis = |redis| RedisRuntime::start(redis, password);
    let redis = config.redis.take().map(start_redis).transpose()?;
    // The stamp is taken before the file is read, so that a change in between is noticed.
    let candidate_seen = config.candidate.as_ref();
    let candidate_seen = candidate_seen.and_then(|candidate| stamp(&candidate.file));
    let key_mask = config.key_privacy.mask(key_secret.as_deref())?;
    let events = config.events.0.as_ref();
    let events = events.map(|events| open_events(events, &webhook_secrets, &key_mask, &clock));
    let events = events.transpose()?.map(Arc::new);
    let reservations = open_reservations(&config, reservation_secrets.as_deref())?;
    let parts = LimiterParts {
        key_mask,
        events,
        reservations,
    };
    let limiter = build_limiter(&mut config, redis.as_ref(), &clock, parts)?;
    let quotas = Arc::<Quotas>::default();
    quotas.swap_rules(config.quotas, limiter.now());
    quotas.show_in(limiter.metrics());
    let start_envoy = |envoy| start_envoy(envoy, &limiter);
    let envoy = config.envoy.map(start_envoy).transpose()?;
    let (envoy, xds) = envoy.unzip();
    let server = Server::start(Server::default_workers())?;
    let start_proxy = |settings| build_proxy(settings, &server, clock);
    let proxy = config.proxy.map(start_proxy).transpose()?;
    let reloader = source.map(|path| {
        let (limiter, quotas) = (Arc::clone(&limiter), Arc::clone(&quotas));
        let reloader = Reloader::new(
            path.to_owned(),
            limiter,
            quotas,
            proxy.clone(),
            restart_only,
            config.candidate.as_ref().map(|file| (file, candidate_seen)),
        );
        Arc::new(reloader)
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
        proxy: proxy.clone(),
        credentials,
    };
    if let Some(too_many) = too_many {
        tracing::warn!("{too_many}");
    }
    listeners.open(&server, sockets)?;
    Ok(ServerHandle {
        server,
        proxy,
        redis,
        limiter,
        reloader,
        envoy,
        _xds: xds.flatten(),
        certificates: certificates.all(),
        geoip,
        shutdown: config.shutdown,
        snapshot: config.snapshot,
    })
}

/// Parts of the limiter that depend on secrets.
struct LimiterParts {
    key_mask: KeyMask,
    events: Option<Arc<Events>>,
    reservations: Reservations,
}

/// Creates the reservations that `config` describes.
fn open_reservations(config: &Config, secrets: Option<&str>) -> Result<Reservations, ServeError> {
    if let Some(secrets) = secrets {
        check_secrets(secrets).map_err(ServeError::ReservationSecret)?;
    }
    Ok(Reservations::new(config.reservations.clone(), secrets)?)
}

/// Creates the limiter with the rules of `config`, which are taken out of it, and restores the
/// counters from the snapshot.
fn build_limiter(
    config: &mut Config,
    redis: Option<&RedisRuntime>,
    clock: &Clock,
    parts: LimiterParts,
) -> Result<Arc<ServerLimiter>, ServeError> {
    let LimiterParts {
        key_mask,
        events,
        reservations,
    } = parts;
    let store = memory(config.memory, config.snapshot.as_ref(), clock)?;
    let backend = match redis {
        None => Backend::Memory(store),
        Some(redis) => Backend::Redis(redis.fallback_store(store)),
    };
    let candidate = config
        .candidate
        .as_ref()
        .map(|candidate| read_candidate(candidate, &config.identity))
        .transpose()?;
    let rules = std::mem::take(&mut config.rules);
    let rules = match &candidate {
        Some(candidate) => rules.with_extra_entries_of(&candidate.rules),
        None => rules,
    };
    let record = config.record.take();
    let recorder = record.map(|record| open_recorder(record, &key_mask));
    let mut limiter = ServerLimiter::new(rules, backend, clock.clone())
        .with_trust(config.identity.trust.clone())
        .with_key_mask(key_mask)
        .with_recorder(recorder.transpose()?)
        .with_top(config.top.0)
        .with_denials(&config.denials)
        .with_reservations(reservations)
        .with_events(events);
    if let Some(snapshot) = &config.snapshot {
        restore_overrides(&mut limiter, snapshot)?;
    }
    let limiter = Arc::new(limiter);
    limiter.set_candidate(candidate, config.memory);
    if let Some(snapshot) = &config.snapshot {
        limiter.snapshots().mark_configured();
        try_snapshot(snapshot, &limiter);
    }
    Ok(limiter)
}

/// Restores the overrides from the file beside the snapshot, and keeps them in it.
fn restore_overrides(limiter: &mut ServerLimiter, snapshot: &Snapshot) -> Result<(), ServeError> {
    let mut path = snapshot.path.clone().into_os_string();
    path.push(".overrides");
    let path = PathBuf::from(path);
    match limiter.keep_overrides_in(&path) {
        Ok(0) => Ok(()),
        Ok(count) => {
            tracing::info!(file = %path.display(), count, "overrides restored");
            Ok(())
        }
        // The folder does not exist. The server starts without snapshots, too.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::warn!(
                file = %path.display(),
                "overrides are not kept across a restart, because their file cannot be written: {error}"
            );
            Ok(())
        }
        Err(source) => Err(ServeError::Overrides { path, source }),
    }
}

/// Opens the destinations of events. `secrets` are the secrets of the webhooks, in the order of the
/// rules file.
fn open_events(
    settings: &EventsConfig,
    secrets: &[String],
    key_mask: &KeyMask,
    clock: &Clock,
) -> Result<Events, ServeError> {
    let webhooks = settings.webhooks.iter().zip(secrets).enumerate();
    let webhooks = webhooks.map(|(index, (webhook, secret))| {
        let secret = WebhookSecret::parse(secret)
            .map_err(|problem| ServeError::WebhookSecret { index, problem })?;
        Ok(WebhookSettings {
            url: webhook.url.clone(),
            secret,
            types: webhook.types.clone(),
        })
    });
    let webhooks = webhooks.collect::<Result<_, ServeError>>()?;
    Ok(Events::open(settings, webhooks, key_mask.clone(), clock)?)
}

/// Opens the file for recorded requests. The values of entries are hashed with `key_mask` or, if
/// that mask shows keys unchanged, with a random secret.
fn open_recorder(record: RecordConfig, key_mask: &KeyMask) -> Result<RequestRecorder, ServeError> {
    let mask = if key_mask.is_hashed() {
        key_mask.clone()
    } else {
        KeyMask::random()?
    };
    let path = record.to.clone();
    RequestRecorder::open(record, mask).map_err(|source| ServeError::Record { path, source })
}

/// Returns the errors in the secrets because of which a server with `config` would not start.
#[must_use]
pub fn secret_errors(config: &Config, secrets: &Secrets) -> Vec<ServeError> {
    let (token, tokens) = (secrets.token.clone(), secrets.operator_tokens.clone());
    let credentials = admin_credentials(token, tokens, config);
    let twins = credentials.iter().enumerate().filter_map(|(at, one)| {
        let earlier = credentials[..at].iter();
        let twin = earlier.rev().find(|other| other.token == one.token)?;
        Some(ServeError::EqualTokens(twin.name.clone(), one.name.clone()))
    });
    let webhooks = secrets.webhook_secrets.iter().enumerate();
    let webhooks = webhooks.filter_map(|(index, secret)| {
        let problem = WebhookSecret::parse(secret).err()?;
        Some(ServeError::WebhookSecret { index, problem })
    });
    twins.chain(webhooks).collect()
}

/// Returns the tokens of the admin listener. `token` is the token without a name, and `tokens` are
/// the tokens of [`Config::operator_tokens`].
fn admin_credentials(
    token: Option<String>,
    tokens: Vec<String>,
    config: &Config,
) -> Vec<AdminCredential> {
    let unnamed = token.map(|token| AdminCredential {
        name: "admin".to_owned(),
        scope: TokenScope::Operate,
        token,
    });
    let named = config.operator_tokens.iter().zip(tokens);
    let named = named.map(|(operator, token)| AdminCredential {
        name: operator.name.clone(),
        scope: operator.scope,
        token,
    });
    unnamed.into_iter().chain(named).collect()
}

/// Requires a token for an admin listener that is not on a loopback address.
fn check_admin(
    address: Option<SocketAddr>,
    credentials: &[AdminCredential],
) -> Result<(), ServeError> {
    match address {
        Some(address) if credentials.is_empty() && !address.ip().is_loopback() => {
            Err(ServeError::OpenAdmin(address))
        }
        _ => Ok(()),
    }
}

impl ServeError {
    /// Wraps an error from opening the access log.
    fn unopened(log: &tidegate_config::AccessLogConfig, source: io::Error) -> Self {
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
    let open = |log: &tidegate_config::AccessLogConfig| {
        AccessLog::open(log).map_err(|source| ServeError::unopened(log, source))
    };
    let log = settings.access_log.as_ref().map(open).transpose()?;
    Ok(Arc::new(ProxyRuntime::new(settings, server, log, clock)?))
}

/// Starts Envoy's rate limit service. Returns the thread of the connection to its control plane, if
/// there is one.
fn start_envoy(
    envoy: Envoy,
    limiter: &Arc<ServerLimiter>,
) -> Result<(Arc<RuleSource>, Option<RuntimeThread>), ServeError> {
    let service = Arc::new(RateLimitService::new(Arc::clone(limiter), envoy.settings));
    match envoy.rules {
        RuleOrigin::Files(files) => {
            let watcher = ConfigWatcher::new(files, service);
            load_at_start(&watcher, envoy.start_without_config)?;
            Ok((Arc::new(RuleSource::Files(watcher)), None))
        }
        RuleOrigin::Xds(xds) => {
            // A mistake in the path of a file would otherwise be noticed only in the log.
            preflight::check_xds(&xds)?;
            let initial = if envoy.start_without_config {
                InitialConfig::Optional
            } else {
                InitialConfig::Required
            };
            let client = Arc::new(XdsClient::new(*xds, service, initial));
            let thread = RuntimeThread::start("xds")?;
            let running = Arc::clone(&client);
            thread.runtime.spawn(async move { running.run().await });
            Ok((Arc::new(RuleSource::Xds(client)), Some(thread)))
        }
    }
}

/// Loads the files of Envoy's rate limit service. Invalid files prevent the start unless
/// `start_without_config` is set.
fn load_at_start(
    watcher: &ConfigWatcher,
    start_without_config: bool,
) -> Result<(), ConfigFilesError> {
    match watcher.load() {
        Ok(_) => watcher.log_start(),
        Err(error) if start_without_config => {
            tracing::error!(
                "started without the configuration of Envoy's rate limit service: {error}"
            );
        }
        Err(error) => return Err(error),
    }
    Ok(())
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
    limiter: &'a Arc<ServerLimiter>,
    quotas: &'a Arc<Quotas>,
    reloader: Option<&'a Arc<Reloader>>,
    envoy: Option<&'a Arc<RuleSource>>,
    headers: tidegate_config::Headers,
    identity: Arc<Identity>,
    grpc: tidegate_config::Grpc,
    listeners: Listeners,
    http_token: Option<String>,
    resp_password: Option<String>,
    certificates: &'a Certificates,
    geoip: Option<Arc<GeoIp>>,
    proxy: Option<Arc<ProxyRuntime>>,
    credentials: Vec<AdminCredential>,
}

impl StartContext<'_> {
    fn open(&self, server: &Server, sockets: Sockets) -> io::Result<()> {
        if let Some(socket) = sockets.http {
            self.opened("http", self.listen_http(server, socket)?);
        }
        if let Some(socket) = sockets.grpc {
            self.opened("grpc", self.listen_grpc(server, socket)?);
        }
        if let Some(socket) = sockets.resp {
            self.opened("resp", self.listen_resp(server, socket)?);
        }
        if let Some((socket, runtime)) = sockets.proxy.zip(self.proxy.as_ref()) {
            self.opened("proxy", self.listen_proxy(server, socket, runtime)?);
        }
        if let Some(socket) = sockets.admin {
            self.opened("admin", self.listen_admin(server, socket)?);
        }
        if let Some(socket) = sockets.metrics {
            self.opened("metrics", self.listen_metrics(server, socket)?);
        }
        Ok(())
    }

    fn listen_http(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let settings = &self.listeners.http;
        let context = listener::http::HttpContext {
            limiter: Arc::clone(self.limiter),
            headers: self.headers,
            identity: Arc::clone(&self.identity),
            rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
            token: self.http_token.clone(),
            hosts: settings.hosts.clone(),
            tls: self.certificates.http.clone(),
        };
        let bounds = bounds(settings, Bounds::default());
        listener::http::listen(server, socket, bounds, context)
    }

    fn listen_grpc(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let context = grpc::GrpcContext {
            limiter: Arc::clone(self.limiter),
            quotas: Arc::clone(self.quotas),
            rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
        };
        let http2 = Http2::new(self.grpc.clone(), self.certificates.grpc.clone());
        let bounds = bounds(&self.listeners.grpc, Bounds::default());
        grpc::listen(server, socket, bounds, context, http2)
    }

    fn listen_resp(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let settings = &self.listeners.resp;
        let context = listener::resp::RespContext {
            limiter: Arc::clone(self.limiter),
            username: settings.username.clone(),
            password: self.resp_password.clone(),
            tls: self.certificates.resp.clone(),
            top: settings.top,
        };
        let bounds = bounds(settings, listener::resp::default_bounds());
        listener::resp::listen_guarded(server, socket, bounds, context)
    }

    fn listen_proxy(
        &self,
        server: &Server,
        socket: TcpListener,
        runtime: &Arc<ProxyRuntime>,
    ) -> io::Result<Listener> {
        let dependencies = tidegate_proxy::Dependencies {
            limiter: Arc::clone(self.limiter),
            headers: self.headers,
            runtime: Arc::clone(runtime),
            identity: Arc::clone(&self.identity),
            tls: self.certificates.proxy.clone(),
        };
        tidegate_proxy::listen(server, socket, dependencies)
    }

    fn listen_admin(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let bounds = bounds(&self.listeners.admin, Bounds::default());
        listener::admin::listen(server, socket, bounds, self.admin_context())
    }

    fn listen_metrics(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let bounds = bounds(&self.listeners.metrics, Bounds::default());
        listener::admin::listen_metrics(server, socket, bounds, self.admin_context())
    }

    fn admin_context(&self) -> AdminContext {
        AdminContext {
            limiter: Arc::clone(self.limiter),
            reloader: self.reloader.cloned(),
            envoy: self.envoy.cloned(),
            certificates: self.certificates.all(),
            geoip: self.geoip.clone(),
            proxy: self.proxy.clone(),
            identity: Arc::clone(&self.identity),
            credentials: self.credentials.clone(),
            hosts: self.listeners.admin.hosts.clone(),
            tls: self.certificates.admin.clone(),
        }
    }

    fn opened(&self, name: &'static str, listener: Listener) {
        tracing::info!(listener = name, address = %listener.local_addr(), "listening");
        self.limiter.metrics().show_listener(name, listener);
    }
}

/// Merges the configured settings of a listener into its `defaults`.
fn bounds(settings: &tidegate_config::ListenerConfig, defaults: Bounds) -> Bounds {
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

/// Raises the file descriptor limit. If the limit is still too low, lowers the connection limits to
/// fit, and returns a warning with the lowered limits.
fn fit_descriptors(config: &mut Config) -> Option<String> {
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let limit = descriptors::raise_limit();
    let upstreams = config
        .proxy
        .iter()
        .flat_map(|proxy| &proxy.upstreams)
        .map(|upstream| upstream.urls.len().saturating_mul(upstream.max_connections));
    let reserved = upstreams.map(count).fold(
        count(config.listeners.admin.max_connections)
            .saturating_add(count(config.listeners.metrics.max_connections)),
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
            "snapshot is damaged and was renamed to `kept_as`; starting with empty counters"
        ),
    }
    Ok(())
}

/// Tests whether the snapshot can be written now, and logs and records an error. So the reported
/// status is correct even before the first snapshot is written.
fn try_snapshot(snapshot: &Snapshot, limiter: &ServerLimiter) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_secrets_are_named() {
        let text = "
admin:
  token_env: A
  tokens: [{name: alice, token_env: B}, {name: bob, token_env: C}]
events: {webhooks: [{url: 'http://h', secret_env: D}, {url: 'http://h', secret_env: E}]}
";
        let config = Config::parse(text).unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let secrets = Secrets {
            token: Some("one".to_owned()),
            operator_tokens: texts(&["two", "one"]),
            webhook_secrets: texts(&["any text", "whsec_c2hvcnQ="]),
            ..Secrets::default()
        };
        let errors = secret_errors(&config, &secrets);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert_eq!(
            errors[0],
            "admin.tokens: the tokens \"admin\" and \"bob\" have the same secret; give each token \
             its own secret"
        );
        assert!(
            errors[1].starts_with("events.webhooks[1]: the secret has `whsec_` followed by a key"),
            "{errors:?}"
        );
        assert!(secret_errors(&config, &Secrets::default()).is_empty());
    }
}
