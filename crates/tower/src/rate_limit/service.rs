//! The service created by the rate limit layer. The service gets a verdict (the limiter's decision)
//! for each request, and forwards admitted requests.

use std::{
    cell::RefCell,
    fmt,
    sync::{Arc, Once},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tidegate::{DecidedRequest, RateLimiter, rate_limiter::CancelSignal};
use tidegate_core::{Cost, MaybeReady, RequestError, RuleSet};
use tidegate_identity::RequestEntries;
use tower_service::Service;

use super::{
    LimitedBody, RateLimitLayer, ResponseFuture,
    action::{Action, ActionPolicy},
    admit::{self, Admission, Buffers, ChargeResult},
    body_costs::BodyCosts,
    pending_action::PendingAction,
    used_entries::{Few, used_entries},
};
use crate::denial::ResponseTarget;

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// A service behind a rate limiter.
pub struct RateLimit<S, L> {
    inner: S,
    layer: RateLimitLayer<L>,
}

impl<S, L> RateLimit<S, L> {
    pub(super) fn new(inner: S, layer: RateLimitLayer<L>) -> Self {
        Self { inner, layer }
    }

    /// Returns the inner service.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S: Clone, L> Clone for RateLimit<S, L> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.layer.clone())
    }
}

impl<S: fmt::Debug, L> fmt::Debug for RateLimit<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, L, B, R> Service<Request<B>> for RateLimit<S, L>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Body<Data = Bytes>,
    L: RateLimiter + 'static,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let action = self.layer.decide(&parts);
        let request = Request::from_parts(parts, body);
        match action {
            MaybeReady::Ready(action) => ResponseFuture::decided(action, request, &mut self.inner),
            MaybeReady::Pending(admission) => {
                ResponseFuture::admitting(admission, request, &mut self.inner)
            }
        }
    }
}

impl<L: RateLimiter + 'static> RateLimitLayer<L> {
    fn decide(&self, parts: &Parts) -> MaybeReady<Action, PendingAction> {
        let (limiter, settings) = (&self.limiter, &self.settings);
        let target = || ResponseTarget::of(parts, settings.policy.error_format);
        let now = limiter.now();
        let rules = limiter.rules();
        let request = RequestEntries::new(parts, &settings.sources);
        warn_of_gaps(&request, &rules);
        let values = match used_entries(&request, &rules) {
            Ok(values) => values,
            Err(ambiguous) => {
                return MaybeReady::Ready(ActionPolicy::refusal(&ambiguous, &target()));
            }
        };
        let entries: Few<(&str, &str)> = values
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        let cost = settings.cost.of(parts);
        let body_costs = BodyCosts::of(parts, &rules);
        let action = BUFFERS.with_borrow_mut(|buffers| {
            let described = tidegate_core::Request::new(&entries, cost)?;
            let described = described.with_body_costs(body_costs.as_slice());
            match admit::charge_now(self, &rules, buffers, &described, now)? {
                ChargeResult::Decided(admission) => {
                    let decided = DecidedRequest {
                        request: &described,
                        rules: &rules,
                        now,
                    };
                    limiter.observe(decided, &admission.verdict);
                    let action = settings.policy.action(admission, decided, target);
                    Ok(MaybeReady::Ready(action))
                }
                ChargeResult::Pending { reserves } => {
                    let detached = DetachedRequest {
                        entries: owned(&entries),
                        cost,
                        body_costs: body_costs.clone(),
                        target: target(),
                        rules: Arc::clone(&rules),
                    };
                    let signal = Arc::new(CancelSignal::default());
                    let action = self.clone().decide_detached(detached, Arc::clone(&signal));
                    let admission = PendingAction::new(action, reserves, signal);
                    Ok(MaybeReady::Pending(admission))
                }
            }
        });
        action.unwrap_or_else(|error: RequestError| {
            MaybeReady::Ready(settings.policy.uncounted(error, &target()))
        })
    }

    /// Decides a request if the store has to wait, or if the request waits for a concurrency slot.
    async fn decide_detached(self, request: DetachedRequest, signal: Arc<CancelSignal>) -> Action {
        let target = request.target;
        let action: Result<Action, RequestError> = async {
            let entries: Vec<(&str, &str)> = request
                .entries
                .iter()
                .map(|(name, value)| (&**name, &**value))
                .collect();
            let described = tidegate_core::Request::new(&entries, request.cost)?;
            let described = described.with_body_costs(request.body_costs.as_slice());
            let finish = |rules: &Arc<RuleSet>, admission: Admission<'_>| {
                let decided = DecidedRequest {
                    request: &described,
                    rules,
                    // Read the time again, because the request may have waited for a slot.
                    now: self.limiter.now(),
                };
                self.limiter.observe(decided, &admission.verdict);
                let target = || target.clone();
                self.settings.policy.action(admission, decided, target)
            };
            admit::charge_later(&self, &request.rules, &described, &signal, finish).await
        }
        .await;
        action.unwrap_or_else(|error| self.settings.policy.uncounted(error, &target))
    }
}

/// The request data needed for a decision, copied from the request.
struct DetachedRequest {
    entries: Vec<(Box<str>, Box<str>)>,
    cost: Cost,
    body_costs: BodyCosts,
    target: ResponseTarget,
    rules: Arc<RuleSet>,
}

fn owned(entries: &[(&str, &str)]) -> Vec<(Box<str>, Box<str>)> {
    let owned = |(name, value): &(&str, &str)| (Box::from(*name), Box::from(*value));
    entries.iter().map(owned).collect()
}

/// Logs an error once if rules are keyed by `ip` and the peer address of a request is unknown.
/// Without a peer address, these rules never match the request.
fn warn_of_gaps(request: &RequestEntries<'_>, rules: &RuleSet) {
    static NO_PEER: Once = Once::new();
    let counts_by_ip = || {
        rules
            .entry_names()
            .any(|name| matches!(name, "ip" | "ip.exact"))
    };
    if !NO_PEER.is_completed() && !request.has_peer() && counts_by_ip() {
        NO_PEER.call_once(|| {
            tracing::error!(
                "no-peer: rules use `ip`, but the peer address of a request is unknown, so these rules do not apply to the request; insert a `Peer` into the extensions of the request, or set the extension with `RateLimitLayer::peer`; logged once"
            );
        });
    }
}
