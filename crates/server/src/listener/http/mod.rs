//! The HTTP listener: `POST /v1/check`, `/v1/peek`, `/v1/throttle`, `/v1/reserve`, `/v1/settle` and
//! `/v1/renew`, `ANY /v1/authorize` for forward-auth, envoyproxy/ratelimit's `/json` and
//! `/healthcheck`, and Limitador's API.
//!
//! The module `serve` serves HTTP/1.1, `body` reads request bodies, and `verdict` writes responses.
//! Each endpoint has its own module. A denial is a normal response with a verdict. Only invalid
//! requests get problem details (RFC 9457).

mod authorize;
mod body;
mod build_limits;
mod check;
mod close_watch;
mod fields;
mod limit_fields;
mod reserve;
pub(super) mod serve;
mod template_cache;
mod throttle;
#[cfg(any(test, fuzzing))]
mod transcript;
mod verdict;

use std::{
    cell::RefCell,
    future, io,
    net::{IpAddr, TcpListener},
    sync::Arc,
};

use futures_util::{
    FutureExt as _, TryFutureExt as _,
    future::{Either, LocalBoxFuture},
};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::Incoming,
    header::{AUTHORIZATION, HeaderName, HeaderValue},
};
use tidegate::DecidedRequest;
use tidegate_config::{Headers, Identity};
use tidegate_core::{Effect, Reason, RuleSet, Timestamp, Verdict};
use tidegate_envoy::{
    RateLimitService,
    json::{self, LimitadorEndpoint},
};
use tidegate_limiter::{
    ServerLimiter,
    entries::{AuditedRequest, Origin},
    metrics::ListenerKind,
    trace,
};
use tidegate_net::{
    Bounds, Listener, Problem, Server, Shutdown, Tls,
    auth::{AuthOutcome, Authenticator},
    response::{self, Answer},
};
use tidegate_tower::{HeaderWriter, RuleNames};
use tracing::{Instrument as _, Span};

use self::close_watch::CloseWatch;
#[cfg(any(test, fuzzing))]
pub use self::transcript::transcript;
pub(crate) use self::{
    body::{read as read_body, read_up_to as read_body_up_to},
    check::{CheckRequest, read as read_check},
    verdict::millis,
};
use super::cross_site;

/// The endpoints listed in 404 responses.
const PATHS: &str =
    "/v1/check, /v1/peek, /v1/throttle, /v1/reserve, /v1/settle, /v1/renew and /v1/authorize";

/// The endpoints listed in 404 responses if Limitador's API is served.
const PATHS_WITH_LIMITADOR: &str = "/check, /report, /check_and_report, /limits/{namespace}, \
     /counters/{namespace}, /status, /v1/check, /v1/peek, /v1/throttle, /v1/reserve, /v1/settle, \
     /v1/renew and /v1/authorize";

/// The dependencies and settings of the HTTP listener.
#[derive(Clone, Debug)]
pub struct HttpContext {
    /// The limiter.
    pub limiter: Arc<ServerLimiter>,
    /// The settings for rate limit headers in responses.
    pub headers: Headers,
    /// The settings for identifying clients in forward-auth requests.
    pub identity: Arc<Identity>,
    /// The service that handles `/json` and `/healthcheck`; without it, these paths return 404.
    pub rate_limits: Option<Arc<RateLimitService>>,
    /// The token that clients must send; `None` if no authentication is required.
    pub token: Option<String>,
    /// The host names that browsers may use in addition to `localhost`, in lower case.
    pub hosts: Vec<String>,
    /// The TLS configuration with the listener's certificate; `None` for plaintext connections.
    pub tls: Option<Arc<Tls>>,
}

/// Serves checks and forward-auth on `socket`.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    listener: HttpContext,
) -> io::Result<Listener> {
    let headers = listener.headers.writer();
    let clock = listener.limiter.clock().clone();
    let authenticator = Arc::new(Authenticator::new(
        "http",
        listener.token.as_deref().map(str::as_bytes),
        clock,
    ));
    let metrics = listener.limiter.metrics();
    metrics.show_authenticator(Arc::clone(&authenticator));
    let exempt = listener.identity.exempt();
    let hosts: Arc<[String]> = listener.hosts.into();
    server.listen_exempting(socket, bounds, exempt, move |stream, connection| {
        let context = HttpConnectionContext {
            limiter: Arc::clone(&listener.limiter),
            rate_limits: listener.rate_limits.clone(),
            headers: RefCell::new(headers.clone()),
            identity: Arc::clone(&listener.identity),
            peer: connection.peer.ip(),
            shutdown: connection.shutdown.clone(),
            authenticator: Arc::clone(&authenticator),
            hosts: Arc::clone(&hosts),
            close: CloseWatch::default(),
        };
        let tls = listener.tls.clone();
        async move {
            let (answer, close) = (|request| context.answer(request), &context.close);
            let Some(tls) = connection.tls_to_accept(tls.as_ref()) else {
                return serve::serve_watched(stream, &connection, close, answer).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                serve::serve_watched(stream, &connection, close, answer).await;
            }
        }
    })
}

/// An endpoint that takes a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpEndpoint {
    /// `/v1/check`
    Check,
    /// `/v1/peek`
    Peek,
    /// `/v1/throttle`
    Throttle,
    /// `/v1/reserve`
    Reserve,
    /// `/v1/settle`
    Settle,
    /// `/v1/renew`
    Renew,
}

/// Returns the trace span name for a request to `path`; `None` if requests to this path are not
/// decided by rules or limits.
fn span_name(path: &str) -> Option<&'static str> {
    match path {
        "/v1/check" => Some("check"),
        "/v1/peek" => Some("peek"),
        "/v1/throttle" => Some("throttle"),
        "/v1/reserve" => Some("reserve"),
        "/v1/settle" => Some("settle"),
        "/v1/renew" => Some("renew"),
        "/v1/authorize" => Some("authorize"),
        "/json" => Some("ShouldRateLimit"),
        _ => None,
    }
}

/// The header for this listener's token. Forward-auth requests must use this header, because their
/// `Authorization` header belongs to the original client request.
const TIDEGATE_TOKEN: HeaderName = HeaderName::from_static("tidegate-token");

/// Returns the token in `Authorization: Bearer TOKEN`.
pub(super) fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// The maximum size of the future that answers a request. hyper moves this future for each request,
/// so the futures of rare operations and of calls to Redis are boxed.
const MAX_FUTURE_BYTES: usize = 1 << 10;

/// A response, or the problem with a request.
type AnswerResult = Result<Answer, Problem>;

/// The context for handling the requests of one connection.
#[derive(Debug)]
struct HttpConnectionContext {
    limiter: Arc<ServerLimiter>,
    rate_limits: Option<Arc<RateLimitService>>,
    headers: RefCell<HeaderWriter>,
    identity: Arc<Identity>,
    peer: IpAddr,
    shutdown: Shutdown,
    authenticator: Arc<Authenticator>,
    /// The host names of [`HttpContext::hosts`].
    hosts: Arc<[String]>,
    /// Detects whether the client of a waiting request has disconnected.
    close: CloseWatch,
}

impl HttpConnectionContext {
    fn answer(&self, request: Request<Incoming>) -> impl Future<Output = Answer> {
        let span = match span_name(request.uri().path()) {
            Some(name) => trace::request_span(ListenerKind::Http, name, request.headers()),
            None => Span::none(),
        };
        let answer = match self.route(request) {
            Ok(answer) => answer,
            Err(problem) => Either::Right(future::ready(Err(problem)).boxed_local()),
        };
        let answer = answer.map(|answer| answer.unwrap_or_else(|problem| self.refuse(problem)));
        debug_assert!(
            size_of_val(&answer) <= MAX_FUTURE_BYTES,
            "box the rare futures"
        );
        answer.instrument(span)
    }

    /// Returns the future that answers `request`. All checks of the head are made before the future
    /// is created, so that the future does not contain the head, and is cheap to move.
    fn route(
        &self,
        request: Request<Incoming>,
    ) -> Result<Either<impl Future<Output = AnswerResult>, LocalBoxFuture<'_, AnswerResult>>, Problem>
    {
        serve::check_host(&request)?;
        self.admit(&request)?;
        let endpoint = match request.uri().path() {
            "/v1/throttle" => HttpEndpoint::Throttle,
            "/v1/check" => HttpEndpoint::Check,
            "/v1/peek" => HttpEndpoint::Peek,
            "/v1/reserve" => HttpEndpoint::Reserve,
            "/v1/settle" => HttpEndpoint::Settle,
            "/v1/renew" => HttpEndpoint::Renew,
            _ => return Ok(Either::Right(Box::pin(self.answer_other(request)))),
        };
        if request.method() != Method::POST {
            return Err(Problem::method("POST"));
        }
        let (head, body) = request.into_parts();
        let headers = head.headers;
        // One future that awaits the body and then the answer would have room for both at once.
        Ok(Either::Left(body::read(body).and_then(async move |body| {
            self.answer_body(endpoint, &headers, &body).await
        })))
    }

    /// Answers a request to a path that is not an [`HttpEndpoint`].
    async fn answer_other(&self, request: Request<Incoming>) -> AnswerResult {
        match (request.uri().path(), &self.rate_limits) {
            ("/v1/authorize", _) => authorize::authorize(self, &request).await,
            ("/json", Some(service)) => {
                let body = body::read(request.into_body()).await?;
                // The future is boxed because it is larger than the others.
                Ok(Box::pin(json::decide(&self.limiter, service, &body)).await)
            }
            ("/healthcheck", Some(service)) => Ok(json::healthcheck(service, &self.shutdown)),
            (path, Some(service)) if service.has_limitador_api() => {
                let endpoint = LimitadorEndpoint::of(path);
                let endpoint = endpoint.ok_or_else(|| Problem::not_found(PATHS_WITH_LIMITADOR))?;
                Box::pin(self.answer_limitador(service, endpoint, request)).await
            }
            _ => Err(Problem::not_found(PATHS)),
        }
    }

    /// Answers a request to Limitador's API.
    async fn answer_limitador(
        &self,
        service: &RateLimitService,
        endpoint: LimitadorEndpoint,
        request: Request<Incoming>,
    ) -> AnswerResult {
        let method = endpoint.method();
        if request.method() != method {
            return Err(Problem::method(method.to_string()));
        }
        let (head, body) = request.into_parts();
        let body = body::read(body).await?;
        let path = head.uri.path();
        json::answer_limitador(&self.limiter, service, endpoint, path, &body).await
    }

    /// Rejects cross-site and unauthenticated requests.
    fn admit(&self, request: &Request<Incoming>) -> Result<(), Problem> {
        let path = request.uri().path();
        // In a forward-auth request, the headers from a browser belong to the client's original
        // request, which was sent to another server.
        if path != "/v1/authorize" {
            cross_site::check(request.headers(), &self.hosts)?;
        }
        if self.authenticator.is_open() || path == "/healthcheck" {
            return Ok(());
        }
        let is_forward_auth = path == "/v1/authorize";
        let missing = || {
            let advice = if is_forward_auth {
                "configure the proxy to overwrite `Tidegate-Token` with the token of this listener"
            } else {
                "send the token of this listener: `Authorization: Bearer TOKEN`, or `Tidegate-Token: TOKEN`"
            };
            Problem::new(StatusCode::UNAUTHORIZED, advice)
        };
        let headers = request.headers();
        let mut lines = headers.get_all(TIDEGATE_TOKEN).iter();
        let own = lines.next().map(HeaderValue::as_bytes);
        // In a forward-auth request, the client chooses the `Authorization` value. If the proxy
        // appends its own `Tidegate-Token` line instead of replacing the client's line, the client
        // chooses one of the lines. An invalid value from the client must not count as a wrong
        // guess by the proxy. If such a value counted as a wrong guess, a client could lock out the
        // proxy.
        let token = if is_forward_auth {
            own.filter(|_| lines.next().is_none())
        } else {
            own.or_else(|| bearer(headers))
        };
        let token = token.ok_or_else(missing)?;
        match self.authenticator.check(self.peer, token) {
            AuthOutcome::Accepted { .. } => Ok(()),
            AuthOutcome::Wrong => Err(missing()),
            AuthOutcome::Limited { retry_after } => Err(Problem::too_many_guesses(retry_after)),
        }
    }

    async fn answer_body(
        &self,
        endpoint: HttpEndpoint,
        headers: &HeaderMap,
        body: &[u8],
    ) -> AnswerResult {
        match endpoint {
            HttpEndpoint::Check => check::check(self, body, Effect::Charge).await,
            HttpEndpoint::Peek => check::check(self, body, Effect::Peek).await,
            HttpEndpoint::Throttle => throttle::throttle(self, body).await,
            HttpEndpoint::Reserve => reserve::reserve(self, body).await,
            // The futures are boxed because they are large and because these requests are rarer
            // than checks.
            HttpEndpoint::Settle => Box::pin(reserve::settle(self, headers, body)).await,
            HttpEndpoint::Renew => Box::pin(reserve::renew(self, body)).await,
        }
    }

    /// Awaits a decision that may have to wait for a concurrency slot. If the client disconnects,
    /// the decision is dropped, unless `cancel` returns true because a store call is in progress.
    async fn wait_for<T>(
        &self,
        decision: impl IntoFuture<Output = T>,
        cancel: impl Fn() -> bool,
    ) -> Result<T, Problem> {
        let decision = decision.into_future();
        let decided = self.close.unless_closed(decision, cancel).await;
        decided.ok_or_else(|| {
            let detail = "the client has closed the connection while the request waited for a slot";
            Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
        })
    }

    fn refuse(&self, problem: Problem) -> Answer {
        self.limiter.metrics().count_bad_request(ListenerKind::Http);
        problem.answer()
    }

    /// Counts `verdict`, which was reached at `now`, and audits the entries of `request`, which a
    /// calling service has sent.
    fn observe(
        &self,
        rules: &RuleSet,
        request: &tidegate_core::Request<'_>,
        verdict: &Verdict<'_>,
        now: Timestamp,
    ) {
        let audited = AuditedRequest {
            listener: ListenerKind::Http,
            origin: Origin::Service,
            decided: DecidedRequest {
                request,
                rules,
                now,
            },
        };
        self.limiter.observe_and_audit(audited, verdict);
    }

    /// Builds a response with `verdict` for a calling service. `verdict` was reached at `now`. The
    /// body contains rule names. The headers contain rule names only if configured, because
    /// services copy headers into their own responses.
    fn verdict(&self, status: StatusCode, verdict: &Verdict<'_>, now: Timestamp) -> Answer {
        let body = verdict::body(verdict, RuleNames::Shown);
        self.verdict_with(body, status, verdict, now)
    }

    /// Builds a response for a proxy. The proxy may pass the body on to a client, so the body
    /// contains rule names only if configured.
    fn public_verdict(&self, status: StatusCode, verdict: &Verdict<'_>, now: Timestamp) -> Answer {
        let names = self.headers.borrow().rule_names();
        let body = verdict::body(verdict, names);
        self.verdict_with(body, status, verdict, now)
    }

    /// Builds a response without a body.
    fn headers_only(&self, status: StatusCode, verdict: &Verdict<'_>, now: Timestamp) -> Answer {
        let mut answer = Answer::default();
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        self.headers.borrow_mut().write(verdict, now, headers);
        answer
    }

    fn verdict_with(
        &self,
        body: Vec<u8>,
        status: StatusCode,
        verdict: &Verdict<'_>,
        now: Timestamp,
    ) -> Answer {
        let mut answer = response::json_document(status, body);
        let headers = answer.headers_mut();
        self.headers.borrow_mut().write(verdict, now, headers);
        answer
    }
}

/// Returns the status for `verdict`. All HTTP endpoints map verdicts to statuses in this way. A
/// denial has status 429. If the store could not decide, or if the service is at its capacity, the
/// status is 503, because the client did not cause the problem.
pub(super) fn status(verdict: &Verdict<'_>) -> StatusCode {
    match (verdict.allowed, verdict.reason) {
        (true, _) => StatusCode::OK,
        (false, Some(Reason::Store)) => StatusCode::SERVICE_UNAVAILABLE,
        (false, _) if verdict.is_at_capacity() => StatusCode::SERVICE_UNAVAILABLE,
        (false, _) => StatusCode::TOO_MANY_REQUESTS,
    }
}
