//! Decides a request with a limiter, and charges it.

use std::sync::Arc;

use tidegate::{
    RateLimiter,
    rate_limiter::{CancelSignal, Receipts, SlotTurn, stretch},
};
use tidegate_core::{
    CacheSearch, Charge, Effect, MaybeReady, Outcome, Request, RequestError, RuleSet, Scratch,
    Store, Timestamp, Verdict,
};

use super::{RateLimitLayer, receipt_guard::ReceiptGuard, reservation::RequestReservation};

/// A decided request.
pub(super) struct Admission<'v> {
    pub(super) verdict: Verdict<'v>,
    /// The charges of the request that may be refunded.
    pub(super) reservation: RequestReservation,
}

/// A request that is not decided yet, because the store has to wait for a reply.
pub(super) struct PendingAdmission<F> {
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

/// Charges the request that arrived at `now`, with the settings of `layer`. `signal` cancels a
/// pending charge.
#[inline]
pub(super) fn charge<'a, L: RateLimiter + 'static>(
    layer: &RateLimitLayer<L>,
    rules: &'a Arc<RuleSet>,
    buffers: &'a mut Buffers,
    request: &Request<'_>,
    now: Timestamp,
    signal: Option<&'a CancelSignal>,
) -> MaybeReady<
    Result<Admission<'a>, RequestError>,
    PendingAdmission<impl Future<Output = Admission<'a>> + Send>,
> {
    let Buffers { scratch, outcomes } = buffers;
    let mut charges = match rules.charges(request, now, scratch) {
        Ok(charges) if charges.is_empty() => {
            return MaybeReady::Ready(Ok(Admission {
                verdict: Verdict::unlimited(),
                reservation: RequestReservation::default(),
            }));
        }
        Ok(charges) => charges,
        Err(error) => return MaybeReady::Ready(Err(error)),
    };
    let longest_wait = layer.settings.policy.longest_wait;
    for charge in &mut charges {
        charge.longest_wait = Some(longest_wait);
    }
    let reserves = rules.wants_receipt(&charges);
    let receipts = if reserves {
        Receipts::Wanted
    } else {
        Receipts::Unwanted
    };
    let turn = SlotTurn::new(Effect::Charge, longest_wait)
        .with_receipts(receipts)
        .with_signal(signal);
    let limiter = &*layer.limiter;
    let pending_stretch = stretch(limiter.store(), rules, &mut charges, now);
    if pending_stretch.is_none()
        && let Some(turn) = turn.decide_now(limiter, &mut charges, outcomes, now)
    {
        return MaybeReady::Ready(Ok(Admission {
            verdict: turn.verdict(&charges, outcomes),
            reservation: reserved(layer, rules, &charges, turn.receipt),
        }));
    }
    let admission = async move {
        let cache_search = match pending_stretch {
            Some(pending) => {
                pending.finish(limiter.store(), &mut charges).await;
                CacheSearch::Due
            }
            None => CacheSearch::Skip,
        };
        let turn = turn
            .decide(limiter, &mut charges, outcomes, cache_search)
            .await;
        Admission {
            verdict: turn.verdict(&charges, outcomes),
            reservation: reserved(layer, rules, &charges, turn.receipt),
        }
    };
    MaybeReady::Pending(PendingAdmission {
        reserves,
        admission,
    })
}

fn reserved<L: RateLimiter + 'static>(
    layer: &RateLimitLayer<L>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    receipt: Option<<L::Store as Store>::Receipt>,
) -> RequestReservation {
    let reserved = receipt.map(|receipt| {
        let guard = ReceiptGuard::new(&layer.limiter, rules, charges, receipt);
        RequestReservation::new(guard, &layer.keepalive)
    });
    reserved.unwrap_or_default()
}
