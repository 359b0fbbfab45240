//! The addresses and settings of the listeners.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tidegate_net::TlsFiles;

use crate::Password;

/// The listener addresses. `None` means that a listener is disabled (`off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenAddresses {
    /// `listen.http`: the listener for rate limit checks and forward-auth; default
    /// `127.0.0.1:8080`.
    pub http: Option<SocketAddr>,
    /// `listen.grpc`: the listener for Envoy's rate limit services; default `127.0.0.1:8081`.
    pub grpc: Option<SocketAddr>,
    /// `listen.resp`: the listener for the Redis protocol (RESP); default `127.0.0.1:6380`.
    pub resp: Option<SocketAddr>,
    /// `listen.spop`: the listener for HAProxy's Stream Processing Offload Protocol; default off.
    pub spop: Option<SocketAddr>,
    /// `listen.admin`: the listener for health, metrics and manual blocks; default
    /// `127.0.0.1:8082`. Parsing rejects an address that other machines can reach, unless an admin
    /// token is set.
    pub admin: Option<SocketAddr>,
    /// `listen.metrics`: a listener for health, readiness and metrics only, which needs no token;
    /// default off.
    pub metrics: Option<SocketAddr>,
}

impl ListenAddresses {
    /// Returns the listeners with their names.
    pub(crate) fn listeners(&self) -> [(&'static str, Option<SocketAddr>); 6] {
        [
            ("http", self.http),
            ("grpc", self.grpc),
            ("resp", self.resp),
            ("spop", self.spop),
            ("admin", self.admin),
            ("metrics", self.metrics),
        ]
    }
}

/// The settings of a listener, except for its address. A map as the listener's value in the file,
/// instead of an address, can contain these settings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerConfig {
    /// `max_connections`: the maximum number of open connections, 1 to 1,000,000. The default is
    /// 10,000; for the admin and metrics listeners, the default is 128.
    pub max_connections: usize,
    /// `max_connections_per_client`: the maximum number of open connections per client address
    /// (IPv6: per /64), at least 1. The default is 1,000; for the admin listener, the default is
    /// 128.
    pub max_connections_per_client: usize,
    /// `idle_timeout`: how long a connection may be idle between two requests; `None` means the
    /// default of the listener.
    pub idle_timeout: Option<Duration>,
    /// `tls`: the certificate of the listener; `None` means plaintext.
    pub tls: Option<TlsFiles>,
    /// `username`, for the RESP listener: the user name that clients must send with `AUTH`; `None`
    /// means `default`.
    pub username: Option<String>,
    /// `hosts`, for the HTTP and admin listeners: the host names, in lower case, that browsers may
    /// use to reach the listener. The name `localhost` is always allowed.
    pub hosts: Vec<String>,
    /// `top`, for the RESP listener: whether clients are allowed to list the keys of all clients;
    /// default false.
    pub top: bool,
    /// The secret that clients must send: `token` or `token_env` of the HTTP listener, `password`
    /// or `password_env` of the RESP listener.
    pub credential: Password,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_client: 1_000,
            idle_timeout: None,
            tls: None,
            username: None,
            hosts: Vec::new(),
            top: false,
            credential: Password::None,
        }
    }
}

/// The settings of all listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    /// `listen.http`.
    pub http: ListenerConfig,
    /// `listen.grpc`. The TLS settings of the gRPC listener are in [`Grpc`](crate::Grpc).
    pub grpc: ListenerConfig,
    /// `listen.resp`.
    pub resp: ListenerConfig,
    /// `listen.spop`.
    pub spop: ListenerConfig,
    /// `listen.admin`. The token of the admin listener is in
    /// [`Config::admin_token`](crate::Config::admin_token).
    pub admin: ListenerConfig,
    /// `listen.metrics`.
    pub metrics: ListenerConfig,
}

impl Default for ListenerSettings {
    fn default() -> Self {
        let small = ListenerConfig {
            max_connections: 128,
            max_connections_per_client: 128,
            ..ListenerConfig::default()
        };
        Self {
            http: ListenerConfig::default(),
            grpc: ListenerConfig::default(),
            resp: ListenerConfig::default(),
            spop: ListenerConfig::default(),
            admin: small.clone(),
            metrics: small,
        }
    }
}

impl Default for ListenAddresses {
    fn default() -> Self {
        let loopback = |port| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self {
            http: loopback(8080),
            grpc: loopback(8081),
            resp: loopback(6380),
            spop: None,
            admin: loopback(8082),
            metrics: None,
        }
    }
}
