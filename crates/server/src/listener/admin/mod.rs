//! The admin listener: health, metrics, the console, and operations on blocks, keys and rules.
//!
//! | path | what |
//! | --- | --- |
//! | `GET /` | the console, a page for browsers; its files are under `/console` |
//! | `GET /healthz` | liveness: the process responds |
//! | `GET /readyz` | readiness, and the result of the last reload |
//! | `GET /metrics` | metrics in the Prometheus text format |
//! | `GET /v1/blocks` | all blocks |
//! | `GET`, `PUT`, `DELETE /v1/blocks/{rule}/{key}` | one block |
//! | `GET /v1/keys/{rule}` | the keys of a rule, page by page |
//! | `GET`, `DELETE /v1/keys/{rule}/{key}` | the state of a key; reset its counters |
//! | `GET /v1/denials` | recent denials |
//! | `POST /v1/explain` | how a request would be decided, and why |
//! | `DELETE /v1/throttles/{key}` | reset the counter of a limit that is sent with the request |
//! | `GET /v1/top` | the keys with the most requests, denials or cost |
//! | `GET /v1/rules` | the current rules |
//! | `POST /v1/rules/preview` | what another rules file would change |
//! | `GET /v1/candidate` | how the candidate rules would change the decisions |
//! | `POST /v1/candidate/promote` | put the candidate rules in force |
//! | `GET /v1/traffic` | decisions and denials of the last 15 minutes by rule |
//! | `GET /v1/status` | version, readiness, store, rules and listeners in one document |
//! | `POST /v1/reload` | reload the rules file |
//!
//! A key consists of the values of the rule's key entries, in order. Each value is one
//! percent-encoded path segment.

mod access;
mod blocks;
mod candidate;
mod console;
mod denials;
mod explain;
mod keys;
mod path;
mod preview;
mod query;
mod reload;
mod rules;
mod status;
mod top;
mod traffic;

use std::{
    io,
    net::{IpAddr, TcpListener},
    sync::Arc,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue, VARY},
};
use serde_json::json;
use tidegate_config::Identity;
use tidegate_envoy::ConfigWatcher;
use tidegate_limiter::ServerLimiter;
use tidegate_net::{
    Bounds, Listener, Problem, Server, Shutdown, Tls,
    prometheus::{self, Format, Page},
    response::{Answer, json},
};
use tidegate_proxy::ProxyRuntime;
use tidegate_redis::StoreError;

use self::{
    access::Access,
    path::{KeyTarget, Path},
    query::Query,
    reload::ReloadTargets,
};
use super::http::{read_body, serve};
use crate::{geoip::GeoIp, reload::Reloader};

/// The dependencies and settings of the admin listener.
#[derive(Debug)]
pub struct AdminContext {
    /// The limiter.
    pub limiter: Arc<ServerLimiter>,
    /// Reloads the rules file on `POST /v1/reload`; `None` if there is no rules file.
    pub reloader: Option<Arc<Reloader>>,
    /// The configuration of Envoy's rate limit service, which `POST /v1/reload` reloads too.
    pub envoy: Option<Arc<ConfigWatcher>>,
    /// The listeners' certificates, which `POST /v1/reload` reloads too.
    pub certificates: Vec<Arc<Tls>>,
    /// The GeoIP databases, which `POST /v1/reload` reloads too.
    pub geoip: Option<Arc<GeoIp>>,
    /// The reverse proxy, if there is one.
    pub proxy: Option<Arc<ProxyRuntime>>,
    /// The settings for trusting and normalising client addresses.
    pub identity: Arc<Identity>,
    /// The token that requests must include. Without a token, any request from this machine is
    /// accepted.
    pub token: Option<String>,
    /// The host names that browsers may use in addition to `localhost`, in lower case. Without a
    /// token, this setting has no effect.
    pub hosts: Vec<String>,
    /// The listener's certificate; without one, connections are plaintext.
    pub tls: Option<Arc<Tls>>,
}

/// Serves the admin API on `socket`.
///
/// # Errors
///
/// Fails if other machines can reach `socket` and there is no token. Returns the error of the
/// operating system if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: AdminContext,
) -> io::Result<Listener> {
    let AdminContext {
        limiter,
        reloader,
        envoy,
        certificates,
        geoip,
        proxy,
        identity,
        token,
        hosts,
        tls,
    } = context;
    let access = Access::new(
        token.as_deref(),
        hosts,
        socket.local_addr()?,
        limiter.clock().clone(),
    )?;
    limiter.metrics().show_authenticator(access.authenticator());
    let admin = Arc::new(Admin {
        limiter,
        reloader,
        envoy,
        certificates,
        geoip,
        proxy,
        identity,
        shutdown: server.shutdown_signal(),
        access,
    });
    server.listen(socket, bounds, move |stream, connection| {
        let (admin, tls) = (Arc::clone(&admin), tls.clone());
        async move {
            let peer = connection.peer.ip();
            let answer = |request| admin.answer(request, peer);
            let Some(tls) = tls else {
                return serve::serve(stream, &connection, answer).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                serve::serve(stream, &connection, answer).await;
            }
        }
    })
}

#[derive(Debug)]
struct Admin {
    limiter: Arc<ServerLimiter>,
    reloader: Option<Arc<Reloader>>,
    envoy: Option<Arc<ConfigWatcher>>,
    certificates: Vec<Arc<Tls>>,
    geoip: Option<Arc<GeoIp>>,
    proxy: Option<Arc<ProxyRuntime>>,
    identity: Arc<Identity>,
    shutdown: Shutdown,
    access: Access,
}

impl Admin {
    async fn answer(self: &Arc<Self>, request: Request<Incoming>, peer: IpAddr) -> Answer {
        let answered = match self.access.check(&request, peer) {
            Ok(()) => self.route(request).await,
            Err(problem) => Err(problem),
        };
        answered.unwrap_or_else(Problem::answer)
    }

    async fn route(self: &Arc<Self>, request: Request<Incoming>) -> Result<Answer, Problem> {
        if let Some(file) = console::file(request.uri().path(), request.headers()) {
            return match *request.method() {
                Method::GET | Method::HEAD => Ok(file),
                _ => Err(Problem::method("GET")),
            };
        }
        let path = Path::parse(request.uri().path())?;
        let method = match request.method() {
            // hyper omits the body of a response to HEAD.
            &Method::HEAD => Method::GET,
            method => method.clone(),
        };
        let segments: Vec<&str> = path.segments().collect();
        let trust = &self.identity.trust;
        match (segments.as_slice(), &method) {
            (["healthz"], &Method::GET) => Ok(json(StatusCode::OK, &json!({"ok": true}))),
            (["readyz"], &Method::GET) => Ok(self.readyz()),
            (["metrics"], &Method::GET) => Ok(self.metrics(Format::negotiate(request.headers()))),
            (["v1", "rules"], &Method::GET) => Ok(rules::list(&self.limiter)),
            (["v1", "rules", "preview"], &Method::POST) => {
                preview::preview(&self.limiter, self.reloader.as_ref(), request.into_body()).await
            }
            (["v1", "reload"], &Method::POST) => self.reload().await,
            (["v1", "status"], &Method::GET) => Ok(self.status()),
            (["v1", "top"], &Method::GET) => {
                top::list(&self.limiter, request.uri().query().unwrap_or_default()).await
            }
            (["v1", "candidate"], &Method::GET) => {
                candidate::show(&self.limiter, request.uri().query())
            }
            (["v1", "candidate", "promote"], &Method::POST) => {
                candidate::promote(self.reloader.as_ref()).await
            }
            (["v1", "traffic"], &Method::GET) => traffic::show(&self.limiter, request.uri()),
            (["v1", "throttles", key], &Method::DELETE) => {
                keys::reset_throttle(&self.limiter, key).await
            }
            (["v1", "blocks"], &Method::GET) => blocks::list(&self.limiter).await,
            (["v1", "blocks", rule, key @ ..], &Method::GET) => {
                blocks::show(&self.limiter, KeyTarget { rule, key, trust }).await
            }
            (["v1", "blocks", rule, key @ ..], &Method::PUT) => {
                let body = read_body(request.into_body()).await?;
                let target = KeyTarget { rule, key, trust };
                blocks::put(&self.limiter, target, &body).await
            }
            (["v1", "blocks", rule, key @ ..], &Method::DELETE) => {
                blocks::lift(&self.limiter, KeyTarget { rule, key, trust }).await
            }
            (["v1", "denials"], &Method::GET) => {
                denials::list(&self.limiter, request.uri().query()).await
            }
            (["v1", "explain"], &Method::POST) => {
                let query = request.uri().query().map(str::to_owned);
                let body = read_body(request.into_body()).await?;
                explain::explain(&self.limiter, query.as_deref(), &body).await
            }
            (["v1", "keys", rule], &Method::GET) => {
                let query = Query::parse(request.uri().query(), &["after", "n"], None)?;
                let target = KeyTarget {
                    rule,
                    key: &[],
                    trust,
                };
                // A rule without key entries has a single key, so the path of that key contains no
                // values.
                if query.is_empty() && target.is_complete(&self.limiter.rules()) {
                    return keys::show(&self.limiter, target).await;
                }
                keys::list(&self.limiter, rule, &query).await
            }
            (["v1", "keys", rule, key @ ..], &Method::GET) => {
                keys::show(&self.limiter, KeyTarget { rule, key, trust }).await
            }
            (["v1", "keys", rule, key @ ..], &Method::DELETE) => {
                keys::reset(&self.limiter, KeyTarget { rule, key, trust }).await
            }
            (
                ["healthz" | "readyz" | "metrics"]
                | [
                    "v1",
                    "rules" | "blocks" | "status" | "top" | "denials" | "traffic" | "candidate",
                ],
                _,
            ) => Err(Problem::method("GET")),
            (["v1", "reload" | "explain"] | ["v1", "candidate", "promote"], _) => {
                Err(Problem::method("POST"))
            }
            (["v1", "blocks", ..], _) => Err(Problem::method("GET, PUT, DELETE")),
            (["v1", "throttles", _], _) => Err(Problem::method("DELETE")),
            (["v1", "keys", _, ..], _) => Err(Problem::method("GET, DELETE")),
            _ => Err(Problem::not_found(
                "/, /healthz, /readyz, /metrics, /v1/blocks, /v1/keys/{rule}/{key}, /v1/throttles/{key}, /v1/top, /v1/denials, /v1/explain, /v1/rules, /v1/candidate, /v1/traffic, /v1/status and /v1/reload",
            )),
        }
    }

    fn metrics(self: &Arc<Self>, format: Format) -> Answer {
        let admin = Arc::clone(self);
        let page = prometheus::encode(format, move |page| admin.collect(page));
        let mut answer = Response::new(Full::from(page));
        let headers = answer.headers_mut();
        let media_type = HeaderValue::from_static(format.content_type());
        headers.insert(CONTENT_TYPE, media_type);
        headers.insert(VARY, HeaderValue::from_static("accept"));
        answer
    }

    fn collect(&self, page: &mut Page<'_>) {
        self.limiter.collect(page);
        if let Some(envoy) = &self.envoy {
            envoy.collect(page);
        }
        if !self.certificates.is_empty() {
            Tls::collect(&self.certificates, page);
        }
        if let Some(geoip) = &self.geoip {
            geoip.collect(page);
        }
        if let Some(proxy) = &self.proxy {
            proxy.collect(page);
        }
    }

    async fn reload(&self) -> Result<Answer, Problem> {
        let targets = ReloadTargets {
            rules: self.reloader.clone(),
            envoy: self.envoy.clone(),
            certificates: self.certificates.clone(),
            geoip: self.geoip.clone(),
        };
        if targets.is_empty() {
            return Err(Problem::new(
                StatusCode::CONFLICT,
                "the server has no rules file; start it with --config FILE",
            ));
        }
        // Reading a large file takes a while and must not block the other connections of this
        // worker.
        let reloaded = tokio::task::spawn_blocking(move || targets.reload()).await;
        let reloaded = reloaded.unwrap_or_else(|_| {
            let detail = "the server is shutting down";
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
        });
        let mut members = reloaded?;
        if self.reloader.is_some() {
            reload::add_inactive_blocks(&self.limiter, &mut members).await;
        }
        Ok(json(StatusCode::OK, &members))
    }
}

/// Reports that Redis could not be queried or did not execute the operation.
#[expect(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn store_problem(error: StoreError) -> Problem {
    let done = match error {
        StoreError::Unknown(_) => "check whether the operation was done before you repeat it",
        _ => "nothing was done",
    };
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, format!("{error}; {done}"))
}
