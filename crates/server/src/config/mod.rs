//! The configuration: what the rules file says, valid by construction.
//!
//! [`Config::parse`] reads the whole file and reports every mistake at once, each with its path and its
//! line. What it returns needs no further checking: addresses are addresses, limits are built, rules are
//! indexed. It reads no environment, opens no file and no socket; whoever starts the
//! server does.

mod bill;
mod conditions;
mod doors;
mod envoy;
mod escapes;
mod exact_path;
mod geoip;
mod grpc;
mod identity;
pub(crate) mod limits;
mod proxy;
mod quotas;
mod redis;
pub(crate) mod report;
mod rules;
mod shutdown;
mod store;
mod unmet;
pub(crate) mod value;
pub(crate) mod yaml;

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tidegate_core::{MemoryBounds, RuleSet, Span};
use tidegate_http::{Atlas, Part, Place, Trust};

pub use envoy::Envoy;
pub use proxy::{
    AccessLog, Adaptive, Class, Ejection, ForwardedHeaders, Heads, HealthCheck, MinRate, Proxy,
    Scheme, Slow, Timeouts, Underscores, Upstream, Url, Via,
};
pub use redis::{Password, RedisConfig};
use report::Report;
pub use shutdown::Shutdown;
use value::Value;
use yaml::Dialect;

use crate::quota::QuotaRule;

/// The largest rules file, in bytes.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// The keys of the file.
const SECTIONS: &[&str] = &[
    "listen", "store", "defaults", "headers", "clients", "entries", "geoip", "admin", "grpc",
    "envoy", "allow", "rules", "quotas", "proxy", "shutdown",
];

/// What the rules file says. The default is what an empty file says: every door open on its usual
/// port, the memory store, no rules.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Config {
    /// `listen`: where the doors are.
    pub listen: Listen,
    /// `listen`: what the doors may use, and who may use them.
    pub listeners: Listeners,
    /// `store.memory`: the bounds of the memory store.
    pub memory: MemoryBounds,
    /// `store.memory.snapshot`: where counters are kept over a restart; `None` keeps them nowhere.
    pub snapshot: Option<Snapshot>,
    /// `store.redis`: where a fleet shares its counts; `None` keeps them in this process.
    pub redis: Option<RedisConfig>,
    /// `headers`: which headers answers carry.
    pub headers: Headers,
    /// `grpc`: how the gRPC door serves its connections.
    pub grpc: Grpc,
    /// `shutdown`: how the server comes to its end.
    pub shutdown: Shutdown,
    /// `clients` and `entries`: how forward-auth finds out who is asking.
    pub identity: Identity,
    /// `geoip`: the databases that say where addresses are, and what each says; relative to the directory in which the server runs.
    pub geoip: Vec<(Place, PathBuf)>,
    /// `admin`: who may ask the admin door.
    pub admin_token: AdminToken,
    /// `envoy`: the rate limit service for Envoy; `None` without the section.
    pub envoy: Option<Envoy>,
    /// `rules` and `allow`, ready to decide.
    pub rules: RuleSet,
    /// `quotas`: limits that are divided among the Envoys that enforce them.
    pub quotas: Vec<QuotaRule>,
    /// `proxy`: the reverse proxy; `None` without the section.
    pub proxy: Option<Proxy>,
    /// What was understood but will not do what its author may expect.
    pub warnings: Vec<Mistake>,
}

/// Where the doors are; `None` is a door that stays shut (`off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listen {
    /// `listen.http`: checks and forward-auth; default `127.0.0.1:8080`.
    pub http: Option<SocketAddr>,
    /// `listen.grpc`: Envoy's rate limit services; default `127.0.0.1:8081`.
    pub grpc: Option<SocketAddr>,
    /// `listen.resp`: the Redis protocol; default `127.0.0.1:6380`.
    pub resp: Option<SocketAddr>,
    /// `listen.admin`: health, metrics, blocks; default `127.0.0.1:8082`. An address that other
    /// machines reach is refused unless there is an admin token.
    pub admin: Option<SocketAddr>,
}

impl Listen {
    /// The doors by their names.
    fn doors(&self) -> [(&'static str, Option<SocketAddr>); 4] {
        [
            ("http", self.http),
            ("grpc", self.grpc),
            ("resp", self.resp),
            ("admin", self.admin),
        ]
    }
}

/// What a listener may use, and who may use it; written where a map stands in the place of its address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listener {
    /// `max_connections`: the most connections at once, 1 to 1,000,000; default 10,000, and 128 of the admin listener.
    pub max_connections: usize,
    /// `max_connections_per_client`: the most of one address (IPv6: of one /64), at least 1; default 1,000.
    pub max_connections_per_client: usize,
    /// `idle_timeout`: how long a connection may be quiet between two requests; `None` is the listener's default.
    pub idle_timeout: Option<Duration>,
    /// `tls`, of the HTTP and RESP listeners: the certificate; `None` is in the clear.
    pub tls: Option<TlsFiles>,
    /// `username`, of the RESP listener: whom `AUTH` must name; `None` is `default`.
    pub username: Option<String>,
    /// `token` and `token_env` of the HTTP listener, `password` and `password_env` of the RESP listener.
    pub credential: Password,
}

impl Default for Listener {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_client: 1_000,
            idle_timeout: None,
            tls: None,
            username: None,
            credential: Password::None,
        }
    }
}

/// The settings of the listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// `listen.http`.
    pub http: Listener,
    /// `listen.grpc`, whose TLS is under `grpc`.
    pub grpc: Listener,
    /// `listen.resp`.
    pub resp: Listener,
    /// `listen.admin`, whose token is under `admin`.
    pub admin: Listener,
}

impl Default for Listeners {
    fn default() -> Self {
        let admin = Listener {
            max_connections: 128,
            max_connections_per_client: 128,
            ..Listener::default()
        };
        Self {
            http: Listener::default(),
            grpc: Listener::default(),
            resp: Listener::default(),
            admin,
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        let loopback = |port| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self {
            http: loopback(8080),
            grpc: loopback(8081),
            resp: loopback(6380),
            admin: loopback(8082),
        }
    }
}

/// How the gRPC door serves its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// `grpc.tls`: the door's certificate; `None` is HTTP/2 in the clear.
    pub tls: Option<TlsFiles>,
    /// `grpc.keep_alive`: how often a client must answer a ping; default 30 s.
    pub keep_alive: Duration,
    /// `grpc.keep_alive_timeout`: in what time; default 10 s.
    pub keep_alive_timeout: Duration,
    /// `grpc.max_connection_age`: when a client is asked to connect anew, give or take a tenth; default one day.
    pub max_connection_age: Duration,
    /// `grpc.max_connection_age_grace`: how long calls that have begun may last after that; default one hour.
    pub max_connection_age_grace: Duration,
    /// `grpc.max_streams`: the most calls at once on one connection; default 1,000.
    pub max_streams: u32,
}

impl Default for Grpc {
    fn default() -> Self {
        Self {
            tls: None,
            keep_alive: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(10),
            max_connection_age: Duration::from_secs(86_400),
            max_connection_age_grace: Duration::from_secs(3_600),
            max_streams: 1_000,
        }
    }
}

/// PEM files; relative to the directory in which the server runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `certificate`: the door's certificate, and those between it and its authority.
    pub certificate: PathBuf,
    /// `key`: its private key.
    pub key: PathBuf,
    /// `client_ca`: the authorities of the clients; with them, nobody is let in without a certificate of theirs.
    pub client_ca: Option<PathBuf>,
}

/// Where counters are kept over a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The file; relative to the directory in which the server runs.
    pub path: PathBuf,
    /// How often it is written; default 30 s. It is also written at shutdown.
    pub every: Span,
}

/// Which headers answers carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// `headers.ratelimit`: `RateLimit` and `RateLimit-Policy`; default true.
    pub ratelimit: bool,
    /// `headers.legacy`: the `X-RateLimit-*` triple; default off.
    pub legacy: LegacyHeaders,
    /// `headers.rule_names`: whether clients are told the names of rules, in headers and in denials; default false.
    pub rule_names: bool,
}

impl Default for Headers {
    fn default() -> Self {
        Self {
            ratelimit: true,
            legacy: LegacyHeaders::Off,
            rule_names: false,
        }
    }
}

/// How forward-auth finds out who is asking.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// `clients`: whose word is taken for a client's address; by default only that of the proxy that asks.
    pub trust: Trust,
    /// `entries`: the entries that are part of another, by their names.
    pub parts: Vec<(Box<str>, Part)>,
    /// Who knows where addresses are. Whoever starts the server brings it, by `geoip`.
    pub atlas: Option<Arc<dyn Atlas>>,
}

/// How `X-RateLimit-Reset` is written, if the triple is sent at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegacyHeaders {
    /// The triple is not sent.
    #[default]
    Off,
    /// Seconds from now, rounded up.
    Delta,
    /// Seconds since the Unix epoch, rounded up.
    Epoch,
}

/// What a caller of the admin door must show.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum AdminToken {
    /// Nothing: the door is on loopback.
    #[default]
    None,
    /// `admin.token`: this token.
    Literal(String),
    /// `admin.token_env`: the token in the environment variable of this name, which whoever starts the
    /// server must read. A variable that is not set must stop the start.
    Env(String),
}

/// Tokens are not written to logs.
impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Literal(_) => f.write_str("Literal(…)"),
            Self::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}

/// Something wrong in the rules file: where it is, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The path of the value, such as `rules[2].limits[0].refill`; empty for the file as a whole.
    pub path: String,
    /// The line, from 1; `None` if no line is to blame.
    pub line: Option<usize>,
    /// What was expected and what was found.
    pub message: String,
}

impl Mistake {
    /// The name of a warning, such as `no-match`, with which its message begins; `None` for a mistake, and a
    /// warning without a name.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        let (code, _) = self.message.split_once(": ")?;
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (code.contains('-') && code.bytes().all(is_part)).then_some(code)
    }

    /// What is wrong, without the code and the advice.
    #[must_use]
    pub fn problem(&self) -> &str {
        let text = self.text();
        text.split_once("; ").map_or(text, |(problem, _)| problem)
    }

    /// What to do about it, where the message says so.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.text().split_once("; ").map(|(_, advice)| advice)
    }

    fn text(&self) -> &str {
        let code = self.code().and_then(|code| self.message.strip_prefix(code));
        code.and_then(|rest| rest.strip_prefix(": "))
            .unwrap_or(&self.message)
    }
}

/// `rules[2].limits[0].refill (line 31): expected a rate such as 20/min`.
impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path.as_str(), self.line) {
            ("", None) => f.write_str(&self.message),
            ("", Some(line)) => write!(f, "line {line}: {}", self.message),
            (path, None) => write!(f, "{path}: {}", self.message),
            (path, Some(line)) => write!(f, "{path} (line {line}): {}", self.message),
        }
    }
}

impl Config {
    /// Reads the text of a rules file.
    ///
    /// # Errors
    ///
    /// Every mistake in it, in the order of their lines: what is no YAML, an unknown or repeated key, a
    /// missing or ill-typed value, a limit that cannot work. Never an empty list.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_server::config::Config;
    ///
    /// let config = Config::parse("listen: {http: 127.0.0.1:8000, resp: off}").unwrap();
    /// assert_eq!(config.listen.http, Some(([127, 0, 0, 1], 8000).into()));
    /// assert_eq!(config.listen.resp, None);
    ///
    /// let mistakes = Config::parse("lisen: {}\nrules: 5\n").unwrap_err();
    /// assert_eq!(mistakes[0].to_string(), "lisen (line 1): unknown key `lisen`; did you mean `listen`?");
    /// assert_eq!(mistakes[1].to_string(), "rules (line 2): expected a list of rules, got the number 5");
    /// ```
    pub fn parse(text: &str) -> Result<Self, Vec<Mistake>> {
        if text.len() > MAX_FILE_BYTES {
            let message = format!(
                "{} bytes are over the maximum of {MAX_FILE_BYTES}",
                text.len()
            );
            return Err(vec![Mistake {
                path: String::new(),
                line: None,
                message,
            }]);
        }
        let document = yaml::parse(text, Dialect::Strict).map_err(|mistake| vec![mistake])?;
        let mut report = Report::default();
        let mut config = Self::default();
        if let Some(file) =
            Value::root(&document.root).fields(&mut report, "a map of settings", SECTIONS)
        {
            config.admin_token = doors::admin_token(&file, &mut report);
            (config.listen, config.listeners) =
                doors::listen(&file, &config.admin_token, &mut report);
            let store = store::store(&file, &mut report);
            (config.memory, config.snapshot, config.redis) =
                (store.memory, store.snapshot, store.redis);
            config.headers = doors::headers(&file, &mut report);
            config.grpc = grpc::grpc(&file, &mut report);
            doors::warn_of_open(&file, &config, &mut report);
            config.envoy = envoy::envoy(&file, &mut report);
            config.shutdown = shutdown::shutdown(&file, &mut report);
            config.identity = identity::identity(&file, &mut report);
            config.geoip = geoip::geoip(&file, &mut report);
            config.rules = rules::rule_set(&file, &config.identity.parts, &mut report);
            config.quotas = quotas::quotas(&file, &config.listen, &mut report);
            config.proxy = proxy::proxy(&file, &config.listen, &config.rules, &mut report);
            bill::check_seen(&file, &config.listen, &mut report);
            exact_path::warn(&file, &mut report);
            unmet::warn(&file, &config, &mut report);
        }
        config.warnings = report.finish()?;
        Ok(config)
    }
}
