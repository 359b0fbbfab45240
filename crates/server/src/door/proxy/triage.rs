//! Before the limits are asked: the head is normalised, what an upstream cannot bear is turned away uncharged, and rules are
//! told where there is room.
//!
//! Whoever passes here has no place yet. That he gets when he is passed on, since a queue may hold him back until then; and he
//! has it while it is the upstream's turn, so that the time that is measured is the upstream's alone.

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

/// What is the same for all requests of a connection.
#[derive(Debug)]
pub(super) struct Bearings {
    pub(super) live: Arc<Live>,
    pub(super) forwarding: Arc<Forwarding>,
    pub(super) limiter: Arc<Limiter>,
    /// Who knows what requests are.
    pub(super) layer: LimiterLayer<ProxyGate>,
}

/// A service, and limits around it, that are asked only by whom the upstream has a place for.
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

/// An answer that is given here. It is kept apart, since it is large and seldom.
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
    /// Normalises `head`, and answers the request if its client has too many in flight, if it is malformed, or if its
    /// upstream has no room for it.
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
        // Most upstreams have no limit to learn.
        current.upstreams.capacities().next()?;
        self.tell_room(&current, head);
        // What nothing is for is refused later.
        let upstream = current.upstreams.choose(head).ok()?;
        let capacity = upstream.capacity.as_ref()?;
        let looked = capacity.look(head, &self.layer, self.limiter.now());
        let mut refused = looked.err()?;
        refused.extensions_mut().insert(upstream.asked(None));
        Some(refused)
    }

    /// Tells rules where there is room, if they want to know.
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
