//! The errors that prevent the server from starting.

use std::{io, net::SocketAddr, path::PathBuf};

use tidegate_config::AccessLogConfig;
use tidegate_envoy::ConfigFilesError;
use tidegate_limiter::{NoRandomBytes, events::EventsError, reservations::NoTokenKey};
use tidegate_net::{ClientTlsError, TlsError};
use tidegate_proxy::TrustAnchorError;

use crate::{geoip::GeoIpError, redis_runtime::RedisStartError, reload::LoadError};

/// The names of the listeners that can use a socket passed by the service manager.
const NAMES: &str = "http, grpc, resp, spop, admin, metrics and proxy";

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
        /// The operating system error.
        source: io::Error,
    },
    /// A socket passed by the service manager cannot be used.
    #[error(transparent)]
    InheritedSocket(#[from] InheritedSocketError),
    /// The admin listener would be reachable from other machines without a token.
    #[error(
        "listen.admin: {0} can be reached from other machines; set `admin.token_env`, or listen on 127.0.0.1"
    )]
    OpenAdmin(SocketAddr),
    /// Two admin tokens have the same secret, so the audit log could not distinguish between their
    /// owners.
    #[error(
        "admin.tokens: the tokens \"{0}\" and \"{1}\" have the same secret; give each token its own secret"
    )]
    EqualTokens(String, String),
    /// The configuration of Envoy's rate limit service cannot be used.
    #[error("envoy.config: {0}")]
    Envoy(#[from] ConfigFilesError),
    /// The Limitador limits file cannot be used.
    #[error("envoy.limitador: {0}")]
    Limitador(ConfigFilesError),
    /// TLS to the control plane of Envoy's rate limit service cannot be set up.
    #[error("envoy.config.xds.tls: {0}")]
    Xds(#[from] ClientTlsError),
    /// The TLS settings of a listener cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// TLS to an upstream cannot be set up, for example because its trust anchors cannot be read.
    #[error(transparent)]
    Authorities(#[from] TrustAnchorError),
    /// The proxy's access log could not be opened.
    #[error("proxy.access_log: cannot open {path}: {source}; fix the path or its permissions")]
    AccessLog {
        /// The path of the file, or `stdout`.
        path: String,
        /// The operating system error.
        source: io::Error,
    },
    /// The file for recorded requests could not be opened.
    #[error("record.to: cannot open {path}: {source}; fix the path or its permissions")]
    Record {
        /// The file.
        path: PathBuf,
        /// The operating system error.
        source: io::Error,
    },
    /// An event destination cannot be used.
    #[error(transparent)]
    Events(#[from] EventsError),
    /// A webhook secret cannot be used.
    #[error("events.webhooks[{index}]: the secret {problem}")]
    WebhookSecret {
        /// The zero-based index of the webhook in the rules file.
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
    /// The override file could not be read or written.
    #[error(
        "cannot use the override file {path}: {source}; fix its permissions, or change `store.memory.snapshot`"
    )]
    Overrides {
        /// The path of the file.
        path: PathBuf,
        /// The file system error.
        source: io::Error,
    },
    /// The snapshot could not be read.
    #[error(
        "cannot read the snapshot {path}: {source}; fix the path or its permissions, or remove `store.memory.snapshot`"
    )]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// The operating system error.
        source: io::Error,
    },
    /// The connections to Redis could not be started.
    #[error(transparent)]
    Redis(#[from] RedisStartError),
    /// Keys cannot be hashed, because the system provides no random bytes.
    #[error("privacy.keys: {0}")]
    Privacy(#[from] NoRandomBytes),
    /// A reservation secret is empty or too short.
    #[error("reservations.secret_env: {0}")]
    ReservationSecret(&'static str),
    /// The key for reservation tokens could not be created.
    #[error(transparent)]
    Reservations(#[from] NoTokenKey),
    /// The operating system could not start a thread or install a signal handler.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

impl ServeError {
    /// Wraps an error from opening the access log.
    pub(super) fn access_log(log: &AccessLogConfig, source: io::Error) -> Self {
        let path = log.to.as_ref().map(|path| path.display().to_string());
        Self::AccessLog {
            path: path.unwrap_or_else(|| "stdout".to_owned()),
            source,
        }
    }
}

/// The reason why the service manager's sockets cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InheritedSocketError {
    /// The variables `LISTEN_FDS`, `LISTEN_PID` and `LISTEN_FDNAMES`, or the descriptors that they
    /// name, are invalid.
    #[error("LISTEN_FDS, LISTEN_PID or LISTEN_FDNAMES: {0}; set them as in sd_listen_fds(3)")]
    Variables(io::Error),
    /// The socket has a name that is not the name of a listener.
    #[error(
        "socket {0:?}: no listener has this name; set FileDescriptorName= in the socket unit to one of {NAMES}"
    )]
    UnknownName(String),
    /// Two sockets have the same name.
    #[error(
        "socket {0:?}: passed twice, but a listener has only one socket; write one ListenStream= in its socket unit"
    )]
    Duplicate(String),
    /// The socket's listener is disabled in the rules file.
    #[error(
        "socket {0:?}: this listener is off; give it an address in the rules file, or disable its socket unit"
    )]
    Off(String),
    /// The descriptor is not a listening TCP socket.
    #[error(
        "socket {name:?}: {problem}; set ListenStream= in the socket unit to an IP address and a port"
    )]
    NotListening {
        /// The name of the socket.
        name: String,
        /// The problem.
        problem: String,
    },
}
