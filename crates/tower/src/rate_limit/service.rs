//! The service that the layer creates. It asks for a verdict and forwards admitted requests.

use std::{
    borrow::Cow,
    cell::RefCell,
    fmt,
    sync::{Arc, Once},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, request::Parts};
use http_body::Body;
use smallvec::SmallVec;
use tidegate::{
    Gate,
    gate::{ANSWERED, AtOnce, Patient, at_once},
};
use tidegate_core::{Cost, RequestError, RuleSet};
use tidegate_identity::{AmbiguousRequest, RequestEntries};
use tower_service::Service;

use super::{
    LimitedBody, LimiterLayer, ResponseFuture,
    action::{Ruling, Terms},
    admit::{self, Asked, Asking, Desk},
};
use crate::denial::grpc_call;

thread_local! {
    static DESK: RefCell<Desk> = RefCell::default();
}

/// A service behind a rate limiter.
pub struct Limited<S, G> {
    inner: S,
    layer: LimiterLayer<G>,
}

/// The result of the first attempt to decide a request.
enum Known {
    Ruled(Ruling),
    Asking(Asking),
}

impl<S, G> Limited<S, G> {
    pub(super) fn new(inner: S, layer: LimiterLayer<G>) -> Self {
        Self { inner, layer }
    }

    /// Returns the inner service.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S: Clone, G> Clone for Limited<S, G> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.layer.clone())
    }
}

impl<S: fmt::Debug, G> fmt::Debug for Limited<S, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limited")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, G, B, R> Service<Request<B>> for Limited<S, G>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Body<Data = Bytes>,
    G: Gate + 'static,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let asked = self.layer.ask(&parts);
        let request = Request::from_parts(parts, body);
        match asked {
            Known::Ruled(ruling) => ResponseFuture::ruled(ruling, request, &mut self.inner),
            Known::Asking(asking) => ResponseFuture::asking(asking, request, &mut self.inner),
        }
    }
}

impl<G: Gate + 'static> LimiterLayer<G> {
    fn ask(&self, parts: &Parts) -> Known {
        let (gate, settings) = (&self.gate, &self.settings);
        let call = grpc_call(&parts.method, &parts.headers);
        let now = gate.now();
        let rules = gate.rules();
        let request = RequestEntries::new(parts, &settings.sources);
        warn_of_gaps(&request, &rules);
        let found = match used_entries(&request, &rules) {
            Ok(found) => found,
            Err(ambiguous) => return Known::Ruled(Terms::refusal(&ambiguous, call)),
        };
        let entries: Few<(&str, &str)> = found
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        let cost = settings.cost.of(parts);
        let known = DESK.with_borrow_mut(|desk| {
            let described = tidegate_core::Request::new(&entries, cost)?;
            let asked = admit::charge(AtOnce, self, &rules, desk, (&described, now));
            let asked = at_once(asked)?;
            Ok(match asked {
                Asked::Decided(verdict, reservation) => {
                    gate.observe(&verdict);
                    let decided = (&verdict, reservation);
                    Known::Ruled(settings.terms.ruling(decided, now, call))
                }
                Asked::Open { reserves } => {
                    let owned = Owned {
                        entries: owned(&entries),
                        cost,
                        call: call.cloned(),
                        rules: Arc::clone(&rules),
                    };
                    Known::Asking(Asking::new(self.clone().ask_later(owned), reserves))
                }
            })
        });
        known.unwrap_or_else(|error: RequestError| {
            Known::Ruled(settings.terms.uncounted(error, call))
        })
    }

    /// Decides a request for which the store has to be waited for.
    async fn ask_later(self, asked: Owned) -> Ruling {
        let (gate, call) = (&self.gate, asked.call.as_ref());
        let now = gate.now();
        let verdict: Result<Ruling, RequestError> = async {
            let entries: Vec<(&str, &str)> = asked
                .entries
                .iter()
                .map(|(name, value)| (&**name, &**value))
                .collect();
            let described = tidegate_core::Request::new(&entries, asked.cost)?;
            let mut desk = Desk::default();
            let terms = &self.settings.terms;
            let asking = (&described, now);
            let charged = admit::charge(Patient, &self, &asked.rules, &mut desk, asking);
            let Asked::Decided(verdict, reservation) = charged.await? else {
                unreachable!("{ANSWERED}");
            };
            gate.observe(&verdict);
            Ok(terms.ruling((&verdict, reservation), now, call))
        }
        .await;
        verdict.unwrap_or_else(|error| self.settings.terms.uncounted(error, call))
    }
}

/// The data of a pending request, detached from the request itself.
struct Owned {
    entries: Vec<(Box<str>, Box<str>)>,
    cost: Cost,
    call: Option<HeaderValue>,
    rules: Arc<RuleSet>,
}

fn owned(entries: &[(&str, &str)]) -> Vec<(Box<str>, Box<str>)> {
    let owned = |(name, value): &(&str, &str)| (Box::from(*name), Box::from(*value));
    entries.iter().map(owned).collect()
}

/// A list with inline capacity for the number of entries that rules usually use.
type Few<T> = SmallVec<[T; 4]>;

/// Returns the entries of `request` that `rules` use.
fn used_entries<'n, 'r>(
    request: &'r RequestEntries<'_>,
    rules: &'n RuleSet,
) -> Result<Few<(&'n str, Cow<'r, str>)>, AmbiguousRequest> {
    let mut found = Few::new();
    for name in rules.entry_names() {
        if let Some(value) = request.entry(name)? {
            found.push((name, value));
        }
    }
    Ok(found)
}

/// Logs an error once if rules are keyed by `ip` and the peer address of a request is unknown. Such
/// rules never match the request.
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
                "no-peer: rules use `ip`, but the peer address of a request is unknown, so they do not apply to it; insert a `Peer` into its extensions, or set the extension with `LimiterLayer::peer`; logged once"
            );
        });
    }
}
