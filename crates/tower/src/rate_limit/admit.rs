//! Decides a request with a limiter, and charges it.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate::{RateLimiter, rate_limiter::stretch};
use tidegate_core::{
    CacheSearch, Charge, Effect, MaybeReady, Outcome, Request, RequestError, RuleSet, Scratch,
    Store, StoreRequest, Timestamp, Verdict,
};
use tokio::runtime::Handle;

use super::{
    RateLimitLayer, action::Action, receipt_guard::ReceiptGuard, reservation::Reservation,
};

/// A decided request.
pub(super) struct Admission<'v> {
    pub(super) verdict: Verdict<'v>,
    /// The charges of the request that may be refunded.
    pub(super) reservation: Reservation,
}

/// A request that is not decided yet, because the store needs to wait for a reply.
pub(super) struct PendingCharge<F> {
    /// Whether charges of the request may be refunded later.
    pub(super) reserves: bool,
    /// The future that resolves to the [`Admission`].
    pub(super) admission: F,
}

/// The buffers for keys and outcomes. They are reused for all requests of a thread.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    scratch: Scratch,
    outcomes: Vec<Outcome>,
}

/// Charges the request that arrived at `now`, with the settings of `layer`.
#[inline]
pub(super) fn charge<'a, L: RateLimiter + 'static>(
    layer: &RateLimitLayer<L>,
    rules: &'a Arc<RuleSet>,
    buffers: &'a mut Buffers,
    request: &Request<'_>,
    now: Timestamp,
) -> MaybeReady<
    Result<Admission<'a>, RequestError>,
    PendingCharge<impl Future<Output = Admission<'a>> + Send>,
> {
    let Buffers { scratch, outcomes } = buffers;
    let store = layer.limiter.store();
    let mut charges = match rules.charges(request, now, scratch) {
        Ok(charges) if charges.is_empty() => {
            return MaybeReady::Ready(Ok(Admission {
                verdict: Verdict::unlimited(),
                reservation: Reservation::default(),
            }));
        }
        Ok(charges) => charges,
        Err(error) => return MaybeReady::Ready(Err(error)),
    };
    for charge in &mut charges {
        charge.longest_wait = Some(layer.settings.policy.longest_wait);
    }
    let reserves = rules.wants_receipt(&charges);
    let pending_stretch = stretch(store, rules, &mut charges, now);
    if pending_stretch.is_none() {
        let store_request = StoreRequest::new(&mut charges, now, Effect::Charge);
        let decided = if reserves {
            store.reserve(store_request, outcomes).ready()
        } else {
            let decided = store.decide(store_request, outcomes).ready();
            decided.map(|decided| (decided, None))
        };
        if let Some((decided, receipt)) = decided {
            return MaybeReady::Ready(Ok(Admission {
                verdict: decided.verdict(&charges, outcomes),
                reservation: reserved(layer, rules, &charges, receipt),
            }));
        }
    }
    let admission = async move {
        let cache_search = match pending_stretch {
            Some(pending) => {
                pending.finish(store, &mut charges).await;
                CacheSearch::Due
            }
            None => CacheSearch::Skip,
        };
        let store_request = StoreRequest {
            cache_search,
            ..StoreRequest::new(&mut charges, now, Effect::Charge)
        };
        let (decided, receipt) = if reserves {
            store.reserve(store_request, outcomes).await
        } else {
            (store.decide(store_request, outcomes).await, None)
        };
        Admission {
            verdict: decided.verdict(&charges, outcomes),
            reservation: reserved(layer, rules, &charges, receipt),
        }
    };
    MaybeReady::Pending(PendingCharge {
        reserves,
        admission,
    })
}

fn reserved<L: RateLimiter + 'static>(
    layer: &RateLimitLayer<L>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    receipt: Option<<L::Store as Store>::Receipt>,
) -> Reservation {
    let reserved = receipt.map(|receipt| {
        let guard = ReceiptGuard::new(&layer.limiter, rules, charges, receipt);
        Reservation::new(guard, &layer.keepalive)
    });
    reserved.unwrap_or_default()
}

/// A pending decision of a store that has to wait.
///
/// A remote store may charge a request that was cancelled. If the charge can be refunded, the
/// decision is completed in the background, on the runtime of the request. Then the charge is
/// refunded.
pub(super) struct PendingAdmission {
    action: Option<Pin<Box<dyn Future<Output = Action> + Send>>>,
    reserves: bool,
    /// The tokio runtime on which the request was first polled.
    runtime: Option<Handle>,
}

impl PendingAdmission {
    pub(super) fn new(
        action: impl Future<Output = Action> + Send + 'static,
        reserves: bool,
    ) -> Self {
        Self {
            action: Some(Box::pin(action)),
            reserves,
            runtime: None,
        }
    }

    /// # Panics
    ///
    /// Panics if polled after completion.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Action> {
        if self.reserves && self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
        let action = ready!(
            self.action
                .as_mut()
                .expect("polled after completion")
                .as_mut()
                .poll(context)
        );
        self.action = None;
        Poll::Ready(action)
    }
}

impl Drop for PendingAdmission {
    fn drop(&mut self) {
        if let (Some(action), Some(runtime)) = (self.action.take(), self.runtime.take()) {
            runtime.spawn(async move { drop(action.await) });
        }
    }
}
