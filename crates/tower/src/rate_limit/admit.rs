//! Decides a request with a limiter, and charges it.

use std::sync::Arc;

use tidegate::{
    RateLimiter,
    rate_limiter::{CancelSignal, Receipts, SlotTurn, TurnBuffers, TurnResult, stretch},
};
use tidegate_core::{
    Charge, Effect, Outcome, Request, RequestError, RuleSet, Scratch, Store, Timestamp, Verdict,
};

use super::{RateLimitLayer, receipt_guard::ReceiptGuard, reservation::RequestReservation};

/// A decided request.
pub(super) struct Admission<'v> {
    pub(super) verdict: Verdict<'v>,
    /// The charges of the request that may be refunded.
    pub(super) reservation: RequestReservation,
}

/// The result of [`charge_now`].
pub(super) enum ChargeResult<'v> {
    /// The request is decided.
    Decided(Admission<'v>),
    /// The store has to wait for a reply, or the request has to wait for a slot. Nothing was
    /// charged, and the caller must call [`charge_later`].
    Pending {
        /// Whether charges of the request may be refunded later.
        reserves: bool,
    },
}

/// The buffers for keys and outcomes. All requests of a thread reuse the buffers.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    scratch: Scratch,
    outcomes: Vec<Outcome>,
}

/// Charges the request that arrived at `now`, with the settings of `layer`.
#[inline]
pub(super) fn charge_now<'a, L: RateLimiter + 'static>(
    layer: &RateLimitLayer<L>,
    rules: &'a Arc<RuleSet>,
    buffers: &'a mut Buffers,
    request: &Request<'_>,
    now: Timestamp,
) -> Result<ChargeResult<'a>, RequestError> {
    let Buffers { scratch, outcomes } = buffers;
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok(ChargeResult::Decided(Admission {
            verdict: Verdict::unlimited(),
            reservation: RequestReservation::default(),
        }));
    }
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
    let turn = SlotTurn::new(Effect::Charge, longest_wait).with_receipts(receipts);
    let limiter = &*layer.limiter;
    if stretch(limiter.store(), rules, &mut charges, now).is_none()
        && let Some(turn) = turn.decide_now(limiter, &mut charges, outcomes, now)
    {
        return Ok(ChargeResult::Decided(Admission {
            verdict: turn.verdict(&charges, outcomes),
            reservation: reserved(layer, rules, &charges, turn.receipt),
        }));
    }
    Ok(ChargeResult::Pending { reserves })
}

/// Charges a request that [`charge_now`] could not decide. Passes the rules and the admission to
/// `finish`. `signal` cancels the charge.
pub(super) async fn charge_later<L: RateLimiter + 'static, T>(
    layer: &RateLimitLayer<L>,
    rules: &Arc<RuleSet>,
    request: &Request<'_>,
    signal: &CancelSignal,
    finish: impl FnOnce(&Arc<RuleSet>, Admission<'_>) -> T,
) -> Result<T, RequestError> {
    let mut buffers = Buffers::default();
    let buffers = TurnBuffers {
        scratch: &mut buffers.scratch,
        outcomes: &mut buffers.outcomes,
    };
    let longest_wait = layer.settings.policy.longest_wait;
    let turn = SlotTurn::new(Effect::Charge, longest_wait)
        .with_longest_delay(longest_wait)
        .with_receipts(Receipts::IfSettled)
        .with_signal(Some(signal));
    let finish = |decided: TurnResult<'_, _>| {
        let TurnResult {
            rules,
            charges,
            verdict,
            receipt,
        } = decided;
        let reservation = reserved(layer, rules, charges, receipt);
        finish(
            rules,
            Admission {
                verdict,
                reservation,
            },
        )
    };
    turn.decide_request(&*layer.limiter, rules, request, buffers, finish)
        .await
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
