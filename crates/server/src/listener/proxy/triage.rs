//! Admission control in front of the rate limits.
//!
//! It normalises the head, sheds requests that exceed the upstream's adaptive concurrency limit
//! before they are charged, and tells elastic rules which upstreams have headroom.
//!
//! A request that is admitted here has no concurrency permit yet. It takes one when it is
//! forwarded, because a rate limit queue may delay it until then. The permit is paused while the
//! client uploads, so the measured latency is the upstream's alone.

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
use tidegate_http::{Entries, LimitedBody, LimiterLayer};
use tower_service::Service;

use super::{
    clients::Excess,
    forwarded::Forwarding,
    gate::ProxyGate,
    live::{Current, Live},
    normalise::normalise,
    refusal::Refusal,
};
use crate::limiter::Limiter;

/// The context that all requests of a connection share.
#[derive(Debug)]
pub(super) struct Bearings {
    pub(super) live: Arc<Live>,
    pub(super) forwarding: Arc<Forwarding>,
    pub(super) limiter: Arc<Limiter>,
    /// Evaluates the conditions of rules and priority classes.
    pub(super) layer: LimiterLayer<ProxyGate>,
}

/// A service behind rate limits, which sees only requests that the upstream has capacity for.
#[derive(Clone, Debug)]
pub(super) struct Triage<S> {
    inner: S,
    bearings: Arc<Bearings>,
}

impl<S> Triage<S> {
    pub(super) fn new(inner: S, bearings: Bearings) -> Self {
        Self {
            inner,
            bearings: Arc::new(bearings),
        }
    }
}

type Answered<R> = Result<Response<LimitedBody<R>>, Infallible>;

/// A response that admission control gives itself. Boxed, since it is large and rare.
type Refused<R> = Map<Ready<Box<Response<Bytes>>>, fn(Box<Response<Bytes>>) -> Answered<R>>;

impl<S, B, R> Service<Request<B>> for Triage<S>
where
    S: Service<Request<B>, Response = Response<LimitedBody<R>>, Error = Infallible>,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = Infallible;
    type Future = Either<S::Future, Refused<R>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        match self.bearings.look(&mut head) {
            Some(refused) => {
                let refused = ready(refused);
                Either::Right(refused.map(|refused| Ok(refused.map(LimitedBody::denial))))
            }
            None => Either::Left(self.inner.call(Request::from_parts(head, body))),
        }
    }
}

impl Bearings {
    /// Normalises `head`. Returns a response if the client has too many requests in flight, if the
    /// request is malformed, or if the upstream is at its concurrency limit.
    fn look(&self, head: &mut Parts) -> Option<Box<Response<Bytes>>> {
        let current = self.live.glance();
        let normalised = match head.extensions.get() {
            Some(Excess(most)) => Err(Refusal::ClientFull(*most)),
            None => normalise(head, &current, &self.forwarding),
        };
        if let Err(refusal) = normalised {
            self.live.rejected().count(refusal);
            let call = tidegate_http::grpc_call(&head.method, &head.headers);
            return Some(Box::new(refusal.whole_answer(call)));
        }
        // Fast path: most configurations have no adaptive limits.
        current.upstreams.capacities().next()?;
        self.tell_room(&current, head);
        // The forwarder answers requests that match no upstream.
        let upstream = current.upstreams.choose(head).ok()?;
        let capacity = upstream.capacity.as_ref()?;
        let looked = capacity.look(head, &self.layer, self.limiter.now());
        let mut refused = looked.err()?;
        refused.extensions_mut().insert(upstream.asked(None));
        Some(refused)
    }

    /// Adds an entry for each upstream that says whether it has headroom, if a rule looks at it.
    fn tell_room(&self, current: &Current, head: &mut Parts) {
        let rules = self.limiter.rules();
        for capacity in current.upstreams.capacities() {
            if rules.looks_at(&capacity.entry) {
                let told = if capacity.has_room() { "yes" } else { "no" };
                let known: Entries = head.extensions.remove().unwrap_or_default();
                head.extensions.insert(known.with(&capacity.entry, told));
            }
        }
    }
}
