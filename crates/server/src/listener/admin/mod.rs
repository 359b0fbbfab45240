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
//! | `GET /v1/entry-blocks` | blocks by entries, page by page |
//! | `GET`, `PUT`, `DELETE /v1/entry-blocks/{entry}/{value}` | one block by entries |
//! | `GET /v1/keys/{rule}` | the keys of a rule, page by page |
//! | `GET`, `DELETE /v1/keys/{rule}/{key}` | the state of a key; reset its counters |
//! | `GET /v1/denials` | recent denials |
//! | `GET /v1/events` | events as they happen (server-sent events) |
//! | `GET /v1/overrides` | overrides, page by page |
//! | `GET`, `PUT`, `DELETE /v1/overrides/{rule}/{key}` | the override of a key or of a pattern |
//! | `POST /v1/explain` | how a request would be decided, and why |
//! | `DELETE /v1/throttles/{key}` | reset the counter of a limit that is sent with the request |
//! | `GET /v1/top` | the keys with the most requests, denials or cost |
//! | `GET /v1/rules` | the active rules |
//! | `POST /v1/rules/preview` | what another rules file would change |
//! | `GET /v1/candidate` | how decisions would change under the candidate rules |
//! | `POST /v1/candidate/promote` | activate the candidate rules |
//! | `GET /v1/history` | requests and denials of one key over time |
//! | `GET /v1/traffic` | decisions and denials in the last 15 minutes, by rule |
//! | `GET /v1/status` | version, readiness, store, rules and listeners in one document |
//! | `POST /v1/reload` | reload the rules file |
//!
//! A key consists of the values of the rule's key entries, in order. In the path, each value is one
//! percent-encoded segment.

mod access;
mod audit;
mod blocks;
mod candidate;
mod console;
mod denials;
mod end;
mod endpoint;
mod entry_blocks;
mod events;
mod explain;
mod keys;
mod override_limits;
mod overrides;
mod path;
mod preview;
mod query;
mod reload;
mod rules;
mod shell;
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
use tidegate_envoy::RuleSource;
use tidegate_limiter::{
    ServerLimiter,
    overrides::{ChangeError, StateMoved},
};
use tidegate_net::{
    Bounds, Listener, Problem, Server, Shutdown, Tls,
    prometheus::Format,
    response::{Answer, json},
};
use tidegate_proxy::ProxyRuntime;
use tidegate_redis::StoreError;

pub use self::access::AdminCredential;
use self::{
    access::{Access, Operator},
    audit::Auditor,
    endpoint::{EndpointMatch, Operation},
    events::AdminBody,
    path::{KeyTarget, Path},
    query::Query,
    reload::ReloadTargets,
};
use super::http::{read_body, serve};
use crate::{MetricsPage, geoip::GeoIp, reload::Reloader};

/// The dependencies and settings of the admin listener.
#[derive(Debug)]
pub struct AdminContext {
    /// The limiter.
    pub limiter: Arc<ServerLimiter>,
    /// Reloads the rules file on `POST /v1/reload`; `None` if there is no rules file.
    pub reloader: Option<Arc<Reloader>>,
    /// The configuration of Envoy's rate limit service, which `POST /v1/reload` reloads too.
    pub envoy: Option<Arc<RuleSource>>,
    /// The listeners' certificates, which `POST /v1/reload` reloads too.
    pub certificates: Vec<Arc<Tls>>,
    /// The GeoIP databases, which `POST /v1/reload` reloads too.
    pub geoip: Option<Arc<GeoIp>>,
    /// The reverse proxy, if there is one.
    pub proxy: Option<Arc<ProxyRuntime>>,
    /// The settings for trusting and normalising client addresses.
    pub identity: Arc<Identity>,
    /// The accepted tokens. Each request must include one of these tokens. If the list is empty,
    /// any request from this machine is accepted.
    pub credentials: Vec<AdminCredential>,
    /// The host names that browsers may use in addition to `localhost`, in lower case. Without a
    /// configured token, this setting has no effect.
    pub hosts: Vec<String>,
    /// The TLS configuration with the listener's certificate; `None` for plaintext connections.
    pub tls: Option<Arc<Tls>>,
}

/// Serves the admin API on `socket`.
///
/// # Errors
///
/// Fails if other machines can reach `socket` and no token is configured. Returns the operating
/// system error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: AdminContext,
) -> io::Result<Listener> {
    let access = Access::new(
        &context.credentials,
        context.hosts.clone(),
        socket.local_addr()?,
        context.limiter.clock().clone(),
    )?;
    let metrics = context.limiter.metrics();
    metrics.show_authenticator(access.authenticator());
    let (access, tls) = (Arc::new(access), context.tls.clone());
    let admin = Arc::new(Admin::new(context, server));
    server.listen(socket, bounds, move |stream, connection| {
        let (admin, access, tls) = (Arc::clone(&admin), Arc::clone(&access), tls.clone());
        async move {
            let peer = connection.peer.ip();
            let answer = |request| admin.answer(&access, request, peer);
            let Some(tls) = connection.tls_to_accept(tls.as_ref()) else {
                return serve::serve(stream, &connection, answer).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                serve::serve(stream, &connection, answer).await;
            }
        }
    })
}

/// Serves health, readiness and metrics on `socket`, without a token and without TLS.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen_metrics(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: AdminContext,
) -> io::Result<Listener> {
    let admin = Arc::new(Admin::new(context, server));
    server.listen(socket, bounds, move |stream, connection| {
        let admin = Arc::clone(&admin);
        async move {
            let answer = |request| std::future::ready(admin.answer_metrics(&request));
            serve::serve(stream, &connection, answer).await;
        }
    })
}

#[derive(Debug)]
struct Admin {
    limiter: Arc<ServerLimiter>,
    reloader: Option<Arc<Reloader>>,
    envoy: Option<Arc<RuleSource>>,
    certificates: Vec<Arc<Tls>>,
    geoip: Option<Arc<GeoIp>>,
    proxy: Option<Arc<ProxyRuntime>>,
    identity: Arc<Identity>,
    shutdown: Shutdown,
}

impl Admin {
    fn new(context: AdminContext, server: &Server) -> Self {
        let AdminContext {
            limiter,
            reloader,
            envoy,
            certificates,
            geoip,
            proxy,
            identity,
            ..
        } = context;
        Self {
            limiter,
            reloader,
            envoy,
            certificates,
            geoip,
            proxy,
            identity,
            shutdown: server.shutdown_signal(),
        }
    }

    /// Answers a request to the metrics listener.
    fn answer_metrics(self: &Arc<Self>, request: &Request<Incoming>) -> Answer {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return Problem::method("GET").answer();
        }
        match request.uri().path() {
            "/healthz" => liveness(),
            "/readyz" => self.readyz(),
            "/metrics" => self.metrics(Format::negotiate(request.headers())),
            _ => Problem::not_found("/healthz, /readyz and /metrics").answer(),
        }
    }

    async fn answer(
        self: &Arc<Self>,
        access: &Access,
        request: Request<Incoming>,
        peer: IpAddr,
    ) -> Response<AdminBody> {
        let answered = match access.check(&request, peer) {
            Ok(operator) => self.route(request, &operator).await,
            Err(problem) => Err(problem),
        };
        answered.unwrap_or_else(|problem| problem.answer().map(AdminBody::Full))
    }

    async fn route(
        self: &Arc<Self>,
        request: Request<Incoming>,
        operator: &Operator,
    ) -> Result<Response<AdminBody>, Problem> {
        if let Some(file) = console::file(request.uri().path(), request.headers()) {
            return match *request.method() {
                Method::GET | Method::HEAD => Ok(file.map(AdminBody::Full)),
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
        let matched = endpoint::find(&segments, &method)?;
        if matched.operation.is_change() {
            operator.may_operate()?;
            self.may_change()?;
        }
        if matched.operation == Operation::FollowEvents {
            return events::serve(&self.limiter, &request, self.shutdown.clone());
        }
        let answer = self.operate(matched, request, operator).await?;
        Ok(answer.map(AdminBody::Full))
    }

    /// Fails if a new process has taken over the state of this process, because a change would be
    /// lost.
    fn may_change(&self) -> Result<(), Problem> {
        if self.limiter.has_moved() {
            let detail = StateMoved.to_string();
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
        }
        Ok(())
    }

    /// Answers a request for an operation other than [`Operation::FollowEvents`].
    async fn operate(
        self: &Arc<Self>,
        EndpointMatch { operation, rest }: EndpointMatch<'_>,
        request: Request<Incoming>,
        operator: &Operator,
    ) -> Result<Answer, Problem> {
        let limiter = &self.limiter;
        let auditor = Auditor::new(limiter, operator);
        let (rule, key) = rest.split_first().unwrap_or((&"", &[]));
        let trust = &self.identity.trust;
        let target = KeyTarget { rule, key, trust };
        let (head, body) = request.into_parts();
        let query = head.uri.query();
        match operation {
            Operation::Liveness => Ok(liveness()),
            Operation::Readiness => Ok(self.readyz()),
            Operation::Metrics => Ok(self.metrics(Format::negotiate(&head.headers))),
            Operation::ListRules => Ok(rules::list(limiter)),
            Operation::PreviewRules => {
                preview::preview(limiter, self.reloader.as_ref(), body).await
            }
            Operation::Reload => self.reload(operator).await,
            Operation::ShowStatus => Ok(self.status(operator)),
            Operation::ListTop => top::list(limiter, query).await,
            Operation::ShowHistory => top::history(limiter, query, trust).await,
            Operation::ShowCandidate => candidate::show(limiter, query),
            Operation::PromoteCandidate => {
                candidate::promote(self.reloader.as_ref(), &auditor).await
            }
            Operation::ShowTraffic => traffic::show(limiter, &head.uri),
            Operation::ResetThrottle => keys::reset_throttle(&auditor, rule).await,
            Operation::ListBlocks => blocks::list(limiter, query).await,
            Operation::ShowBlock => blocks::show(limiter, target).await,
            Operation::PutBlock => blocks::put(&auditor, target, &read_body(body).await?).await,
            Operation::LiftBlock => blocks::lift(&auditor, target).await,
            Operation::ListEntryBlocks => entry_blocks::list(limiter, query).await,
            Operation::ShowEntryBlock => entry_blocks::show(limiter, rest, query),
            Operation::PutEntryBlock => {
                let body = read_body(body).await?;
                entry_blocks::put(&auditor, rest, query, &body).await
            }
            Operation::LiftEntryBlock => entry_blocks::lift(&auditor, rest, query).await,
            Operation::ListOverrides => overrides::list(limiter, query).await,
            Operation::ShowOverride => overrides::show(limiter, target),
            Operation::SetOverride => {
                overrides::put(&auditor, target, &read_body(body).await?).await
            }
            Operation::RemoveOverride => overrides::remove(&auditor, target).await,
            Operation::ListDenials => denials::list(limiter, query, trust).await,
            Operation::Explain => explain::explain(limiter, query, &read_body(body).await?).await,
            Operation::ShowKeys => {
                let is_list = key.is_empty();
                let known: &[&str] = if is_list { &["after", "n"] } else { &[] };
                let query = Query::parse(query, known, None)?;
                // A rule without key entries has a single key. The path of this single key contains
                // no values, so the same path stands for the key and for the list of keys.
                if is_list && !(query.is_empty() && target.is_complete(&limiter.rules())) {
                    return keys::list(limiter, rule, &query).await;
                }
                keys::show(limiter, target).await
            }
            Operation::ResetKey => keys::reset(&auditor, target).await,
            Operation::FollowEvents => Err(Problem::not_found("/v1/events")),
        }
    }

    fn metrics(&self, format: Format) -> Answer {
        let page = MetricsPage {
            limiter: Arc::clone(&self.limiter),
            envoy: self.envoy.clone(),
            certificates: self.certificates.clone(),
            geoip: self.geoip.clone(),
            proxy: self.proxy.clone(),
        };
        let mut answer = Response::new(Full::from(page.encode(format)));
        let headers = answer.headers_mut();
        let media_type = HeaderValue::from_static(format.content_type());
        headers.insert(CONTENT_TYPE, media_type);
        headers.insert(VARY, HeaderValue::from_static("accept"));
        answer
    }

    async fn reload(&self, operator: &Operator) -> Result<Answer, Problem> {
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
        // Reading a large file takes some time, and must not block the other connections of this
        // worker.
        let by = Arc::clone(&operator.name);
        let mut members = on_other_thread(move || targets.reload(&by)).await??;
        if self.reloader.is_some() {
            reload::add_inactive(&self.limiter, &mut members).await;
        }
        Ok(json(StatusCode::OK, &members))
    }
}

fn liveness() -> Answer {
    json(StatusCode::OK, &json!({"ok": true}))
}

/// Runs `work`, which takes too long for a worker, on another thread.
async fn on_other_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| {
        let detail = "the server is shutting down";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    })
}

/// Reports that an override or a block by entries was not changed. `refused` reports an invalid
/// change.
fn change_problem<E>(error: ChangeError<E>, refused: impl FnOnce(E) -> Problem) -> Problem
where
    E: std::error::Error + 'static,
{
    match error {
        ChangeError::Refused(error) => refused(error),
        ChangeError::Store(error @ StoreError::Unknown(_)) => {
            let detail = format!(
                "{error}; if it was, the change takes effect within a second; the request can be repeated safely"
            );
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
        ChangeError::Store(error) => store_problem(error),
        ChangeError::File(_) | ChangeError::Moved(_) => {
            let detail = format!("{error}; nothing was changed");
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
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

/// Reports that keys or blocks could not be read from Redis, and what still works without Redis.
#[expect(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn read_problem(error: StoreError) -> Problem {
    let detail = format!(
        "{error}; meanwhile, `tidegate explain` (/v1/explain) shows how this server decides a request, and \
         `tidegate status` (/v1/status) shows the state of Redis"
    );
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use tidegate_core::OverrideError;

    use super::*;

    /// Redis may have executed a change although its reply was lost.
    #[test]
    fn a_lost_reply_to_a_change_says_that_the_change_may_take_effect() {
        let detail = |error: StoreError| {
            let problem = change_problem(error.into(), |error: OverrideError| {
                unreachable!("the change is valid: {error}")
            });
            let answer = problem.answer();
            assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
            let body = answer.into_body().collect().now_or_never().unwrap();
            let body: serde_json::Value =
                serde_json::from_slice(&body.unwrap().to_bytes()).unwrap();
            body["detail"].as_str().unwrap().to_owned()
        };
        let lost = detail(StoreError::Unknown("timeout".to_owned()));
        let expected = "it is unknown whether the request was executed: timeout; if it was, the change takes effect \
                        within a second; the request can be repeated safely";
        assert!(lost.ends_with(expected), "{lost}");
        let refused = detail(StoreError::NotExecuted("no connection".to_owned()));
        assert!(
            refused.ends_with("no connection; nothing was done"),
            "{refused}"
        );
    }
}
