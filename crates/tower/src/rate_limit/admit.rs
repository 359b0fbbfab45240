//! Decides a request with a gate.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate::gate::{Asks, stretch};
use tidegate_core::{
    Charge, Effect, Outcome, Question, Request, RequestError, RuleSet, Scratch, Store, Timestamp,
    Verdict,
};
use tokio::runtime::Handle;

use super::{
    RateLimitLayer, action::Action, receipt_guard::ReceiptGuard, reservation::Reservation,
};
use tidegate::Gate;

/// The result of deciding a request.
pub(super) enum Admission<'v> {
    /// A verdict, and the charges that may be refunded.
    Decided(Verdict<'v>, Reservation),
    /// Not decided yet, because the store requires waiting. `reserves` is whether charges may be
    /// refunded.
    Pending { reserves: bool },
}

/// Buffers for keys and outcomes, reused for all requests of a thread.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    scratch: Scratch,
    outcomes: Vec<Outcome>,
}

/// Charges `request`, which arrived at `now`, with the settings of `layer`.
pub(super) async fn charge<'a, A: Asks, G: Gate + 'static>(
    asks: A,
    layer: &RateLimitLayer<G>,
    rules: &'a Arc<RuleSet>,
    buffers: &'a mut Buffers,
    (request, now): (&Request<'_>, Timestamp),
) -> Result<Admission<'a>, RequestError> {
    let Buffers { scratch, outcomes } = buffers;
    let store = layer.gate.store();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok(Admission::Decided(
            Verdict::unlimited(),
            Reservation::default(),
        ));
    }
    let reserves = rules.wants_receipt(&charges);
    if stretch(asks, (store, rules), &mut charges, now)
        .await
        .is_none()
    {
        return Ok(Admission::Pending { reserves });
    }
    for charge in &mut charges {
        charge.longest_wait = Some(layer.settings.policy.longest_wait);
    }
    let mut question = Question {
        charges: &mut charges,
        now,
        effect: Effect::Charge,
        within: None,
    };
    let decided = if reserves {
        asks.reserve(store, &mut question, outcomes).await
    } else {
        let decided = asks.decide(store, question, outcomes).await;
        decided.map(|decided| (decided, None))
    };
    let Some((decided, receipt)) = decided else {
        return Ok(Admission::Pending { reserves });
    };
    let reserved = reserved(layer, rules, &charges, receipt);
    Ok(Admission::Decided(
        decided.verdict(&charges, outcomes),
        reserved,
    ))
}

fn reserved<G: Gate + 'static>(
    layer: &RateLimitLayer<G>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    receipt: Option<<G::Store as Store>::Receipt>,
) -> Reservation {
    let reserved = receipt.map(|receipt| {
        let guard = ReceiptGuard::new(&layer.gate, rules, charges, receipt);
        Reservation::new(guard, &layer.keepalive)
    });
    reserved.unwrap_or_default()
}

/// A pending decision.
///
/// A remote store may charge a request that has been cancelled. If that charge can be refunded, the
/// decision is completed in the background on the runtime of the request, and the charge is then
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
        let asked = self.action.as_mut();
        let action = ready!(
            asked
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
