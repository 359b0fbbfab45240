//! Admission control in front of the rate limits.
//!
//! For each request, admission control does three things before the request is charged to the rate
//! limits:
//!
//! - It normalises the request head.
//! - It sheds the request if the upstream is at its adaptive concurrency limit.
//! - For elastic rules, admission control adds entries that say which upstreams have spare
//!   capacity.
//!
//! Admission control does not acquire a concurrency permit. The handler acquires the permit only
//! when it forwards the request, because a rate limit queue may delay the request. The permit is
//! paused while the client uploads, so that only the upstream's latency is measured.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::{
    FutureExt as _,
    future::{Either, Map},
};
use http::{Request, Response, request::Parts};
use http_body::Body;
use tidegate_identity::Entries;
use tidegate_limiter::{ServerLimiter, metrics::ListenerKind, trace};
use tidegate_tower::{LimitedBody, RateLimitLayer};
use tower_service::Service;
use tracing::{Instrument as _, instrument::Instrumented};

use super::{
    access_log::LoggedUpstream, client_limit::ClientLimitExceeded, error::ProxyError,
    headers::forwarded::ForwardingHeaders, normalise::normalise, rate_limit::ProxyLimiter,
    runtime::ProxyRuntime, upstream::config::RuntimeConfig,
};

/// The context that all requests of a connection share.
#[derive(Debug)]
pub(crate) struct AdmissionContext {
    pub(crate) runtime: Arc<ProxyRuntime>,
    pub(crate) forwarding: Arc<ForwardingHeaders>,
    pub(crate) limiter: Arc<ServerLimiter>,
    /// Evaluates the conditions of rules and priority classes.
    pub(crate) layer: RateLimitLayer<ProxyLimiter>,
}

/// A service that rejects malformed requests and requests that exceed a concurrency limit. The
/// service passes all other requests to the rate limits.
#[derive(Clone, Debug)]
pub(crate) struct AdmissionService<S> {
    inner: S,
    context: Arc<AdmissionContext>,
}

impl<S> AdmissionService<S> {
    pub(crate) fn new(inner: S, context: AdmissionContext) -> Self {
        Self {
            inner,
            context: Arc::new(context),
        }
    }
}

type AdmissionResult<R> = Result<Response<LimitedBody<R>>, Infallible>;

/// The future of a response that admission control generates itself. The response is boxed because
/// it is large and rare.
type LocalReplyFuture<R> =
    Map<Ready<Box<Response<Bytes>>>, fn(Box<Response<Bytes>>) -> AdmissionResult<R>>;

impl<S, B, R> Service<Request<B>> for AdmissionService<S>
where
    S: Service<Request<B>, Response = Response<LimitedBody<R>>, Error = Infallible>,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = Infallible;
    type Future = Instrumented<Either<S::Future, LocalReplyFuture<R>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        let span = trace::request_span(ListenerKind::Proxy, "proxy", &head.headers);
        let response: Either<S::Future, LocalReplyFuture<R>> = match self.context.check(&mut head) {
            Some(reply) => {
                let reply = ready(reply);
                Either::Right(reply.map(|reply| Ok(reply.map(LimitedBody::denial))))
            }
            None => {
                let request = Request::from_parts(head, body);
                Either::Left(span.in_scope(|| self.inner.call(request)))
            }
        };
        response.instrument(span)
    }
}

impl AdmissionContext {
    /// Normalises `head`. Returns a response if the request must be rejected, because the client
    /// has too many requests in flight, the request is malformed, or the upstream is at its
    /// concurrency limit.
    fn check(&self, head: &mut Parts) -> Option<Box<Response<Bytes>>> {
        let current = self.runtime.load();
        let normalised = match head.extensions.get() {
            Some(ClientLimitExceeded(max)) => Err(ProxyError::ClientFull(*max)),
            None => normalise(head, &current, &self.forwarding),
        };
        if let Err(error) = normalised {
            self.runtime.bad_requests().count(error);
            let call = tidegate_tower::grpc_content_type(&head.method, &head.headers);
            return Some(Box::new(error.response(call)));
        }
        // Fast path: most configurations have no adaptive limits.
        current.upstreams.concurrency_limits().next()?;
        self.add_headroom_entries(&current, head);
        // If no upstream matches, the handler responds with an error.
        let upstream = current.upstreams.route(head).ok()?;
        let concurrency = upstream.concurrency.as_ref()?;
        let classified = concurrency.classify(head, &self.layer, self.limiter.now());
        let mut reply = classified.err()?;
        reply
            .extensions_mut()
            .insert(LoggedUpstream::new(upstream, None));
        Some(reply)
    }

    /// Adds an entry for each upstream to which a rule's `elastic` setting refers. The entry says
    /// whether the upstream has headroom (spare capacity).
    fn add_headroom_entries(&self, current: &RuntimeConfig, head: &mut Parts) {
        let rules = self.limiter.rules();
        for concurrency in current.upstreams.concurrency_limits() {
            if rules.uses_entry(&concurrency.entry) {
                let value = if concurrency.has_headroom() {
                    "yes"
                } else {
                    "no"
                };
                let entries: Entries = head.extensions.remove().unwrap_or_default();
                head.extensions
                    .insert(entries.with(&concurrency.entry, value));
            }
        }
    }
}
