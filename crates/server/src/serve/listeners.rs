//! Opens the listeners.

use std::{io, net::TcpListener, sync::Arc};

use tidegate_config::{Config, Grpc, Headers, Identity, ListenerConfig, ListenerSettings};
use tidegate_envoy::{
    RuleSource,
    grpc::{self, Http2},
    quota::Quotas,
};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Bounds, Listener, Server, Tls, TlsError, TlsListener};
use tidegate_proxy::ProxyRuntime;

use super::{preflight::load_tls, sockets::Sockets};
use crate::{
    geoip::GeoIp,
    listener::{
        admin::{self, AdminContext, AdminCredential},
        http, resp, spop,
    },
    reload::Reloader,
};

/// The certificates of the listeners that use TLS.
pub(super) struct Certificates {
    http: Option<Arc<Tls>>,
    grpc: Option<Arc<Tls>>,
    resp: Option<Arc<Tls>>,
    spop: Option<Arc<Tls>>,
    admin: Option<Arc<Tls>>,
    proxy: Option<Arc<Tls>>,
}

impl Certificates {
    pub(super) fn load(config: &Config) -> Result<Self, TlsError> {
        let listeners = &config.listeners;
        let of_proxy = config.proxy.as_ref().and_then(|proxy| proxy.tls.as_ref());
        Ok(Self {
            http: load_tls(TlsListener::Http, listeners.http.tls.as_ref())?,
            grpc: load_tls(TlsListener::Grpc, config.grpc.tls.as_ref())?,
            resp: load_tls(TlsListener::Resp, listeners.resp.tls.as_ref())?,
            spop: load_tls(TlsListener::Spop, listeners.spop.tls.as_ref())?,
            admin: load_tls(TlsListener::Admin, listeners.admin.tls.as_ref())?,
            proxy: load_tls(TlsListener::Proxy, of_proxy)?,
        })
    }

    pub(super) fn all(&self) -> Vec<Arc<Tls>> {
        let all = [
            &self.http,
            &self.grpc,
            &self.resp,
            &self.spop,
            &self.admin,
            &self.proxy,
        ];
        all.into_iter().flatten().cloned().collect()
    }
}

/// The state that the listeners share or need to start.
pub(super) struct ListenerContext<'a> {
    pub(super) limiter: &'a Arc<ServerLimiter>,
    pub(super) quotas: &'a Arc<Quotas>,
    pub(super) reloader: Option<&'a Arc<Reloader>>,
    pub(super) envoy: Option<&'a Arc<RuleSource>>,
    pub(super) headers: Headers,
    pub(super) identity: Arc<Identity>,
    pub(super) grpc: Grpc,
    pub(super) listeners: ListenerSettings,
    pub(super) http_token: Option<String>,
    pub(super) resp_password: Option<String>,
    pub(super) certificates: &'a Certificates,
    pub(super) geoip: Option<Arc<GeoIp>>,
    pub(super) proxy: Option<Arc<ProxyRuntime>>,
    pub(super) credentials: Vec<AdminCredential>,
}

impl ListenerContext<'_> {
    pub(super) fn open(&self, server: &Server, sockets: Sockets) -> io::Result<()> {
        if let Some(socket) = sockets.http {
            self.opened("http", self.listen_http(server, socket)?);
        }
        if let Some(socket) = sockets.grpc {
            self.opened("grpc", self.listen_grpc(server, socket)?);
        }
        if let Some(socket) = sockets.resp {
            self.opened("resp", self.listen_resp(server, socket)?);
        }
        if let Some(socket) = sockets.spop {
            self.opened("spop", self.listen_spop(server, socket)?);
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
        let context = http::HttpContext {
            limiter: Arc::clone(self.limiter),
            headers: self.headers,
            identity: Arc::clone(&self.identity),
            rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
            token: self.http_token.clone(),
            hosts: settings.hosts.clone(),
            tls: self.certificates.http.clone(),
        };
        let bounds = bounds(settings, Bounds::default());
        http::listen(server, socket, bounds, context)
    }

    fn listen_grpc(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let authorization = || grpc::AuthorizationContext {
            identity: Arc::clone(&self.identity),
            headers: self.headers,
        };
        let context = grpc::GrpcContext {
            limiter: Arc::clone(self.limiter),
            quotas: Arc::clone(self.quotas),
            rate_limits: self.envoy.map(|envoy| Arc::clone(envoy.service())),
            authorization: self.grpc.authorization.then(authorization),
        };
        let http2 = Http2::new(self.grpc.clone(), self.certificates.grpc.clone());
        let bounds = bounds(&self.listeners.grpc, Bounds::default());
        grpc::listen(server, socket, bounds, context, http2)
    }

    fn listen_resp(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let settings = &self.listeners.resp;
        let context = resp::RespContext {
            limiter: Arc::clone(self.limiter),
            username: settings.username.clone(),
            password: self.resp_password.clone(),
            tls: self.certificates.resp.clone(),
            top: settings.top,
        };
        let bounds = bounds(settings, resp::default_bounds());
        resp::listen_guarded(server, socket, bounds, context)
    }

    fn listen_spop(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let settings = &self.listeners.spop;
        let context = spop::SpopContext {
            limiter: Arc::clone(self.limiter),
            headers: self.headers,
            tls: self.certificates.spop.clone(),
        };
        let bounds = bounds(settings, Bounds::default());
        spop::listen(server, socket, bounds, context)
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
        admin::listen(server, socket, bounds, self.admin_context())
    }

    fn listen_metrics(&self, server: &Server, socket: TcpListener) -> io::Result<Listener> {
        let bounds = bounds(&self.listeners.metrics, Bounds::default());
        admin::listen_metrics(server, socket, bounds, self.admin_context())
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
fn bounds(settings: &ListenerConfig, defaults: Bounds) -> Bounds {
    Bounds {
        connections: settings.max_connections,
        connections_per_client: settings.max_connections_per_client,
        idle: settings.idle_timeout.unwrap_or(defaults.idle),
        ..defaults
    }
}
