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

use super::{LimiterLayer, action::Ruling, receipt_guard::Held, reservation::Reservation};
use tidegate::Gate;

/// The result of deciding a request.
pub(super) enum Asked<'v> {
    /// A verdict, and the charges that may be refunded.
    Decided(Verdict<'v>, Reservation),
    /// Not decided, because the store has to be waited for. `reserves` says whether charges may be
    /// refunded.
    Open { reserves: bool },
}

/// Buffers for keys and outcomes, reused for all requests of a thread.
#[derive(Debug, Default)]
pub(super) struct Desk {
    scratch: Scratch,
    outcomes: Vec<Outcome>,
}

/// Charges `request`, which arrived at `now`, with the settings of `layer`.
pub(super) async fn charge<'a, A: Asks, G: Gate + 'static>(
    asks: A,
    layer: &LimiterLayer<G>,
    rules: &'a Arc<RuleSet>,
    desk: &'a mut Desk,
    (request, now): (&Request<'_>, Timestamp),
) -> Result<Asked<'a>, RequestError> {
    let Desk { scratch, outcomes } = desk;
    let store = layer.gate.store();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok(Asked::Decided(Verdict::unlimited(), Reservation::default()));
    }
    let reserves = rules.wants_receipt(&charges);
    if stretch(asks, (store, rules), &mut charges, now)
        .await
        .is_none()
    {
        return Ok(Asked::Open { reserves });
    }
    for charge in &mut charges {
        charge.longest_wait = Some(layer.settings.terms.longest_wait);
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
        return Ok(Asked::Open { reserves });
    };
    let reserved = reserved(layer, rules, &charges, receipt);
    Ok(Asked::Decided(
        decided.verdict(&charges, outcomes),
        reserved,
    ))
}

fn reserved<G: Gate + 'static>(
    layer: &LimiterLayer<G>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    receipt: Option<<G::Store as Store>::Receipt>,
) -> Reservation {
    let reserved = receipt.map(|receipt| {
        let held = Held::new(&layer.gate, rules, charges, receipt);
        Reservation::new(held, &layer.renewals)
    });
    reserved.unwrap_or_default()
}

/// A pending decision.
///
/// A remote store may charge a request that has been cancelled. If such a charge may be refunded,
/// the decision runs to its end on the runtime of the request, and the charge is then refunded.
pub(super) struct Asking {
    ruling: Option<Pin<Box<dyn Future<Output = Ruling> + Send>>>,
    reserves: bool,
    /// The runtime on which the request was first polled.
    runtime: Option<Handle>,
}

impl Asking {
    pub(super) fn new(
        ruling: impl Future<Output = Ruling> + Send + 'static,
        reserves: bool,
    ) -> Self {
        Self {
            ruling: Some(Box::pin(ruling)),
            reserves,
            runtime: None,
        }
    }

    /// # Panics
    ///
    /// Panics if polled after completion.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ruling> {
        if self.reserves && self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
        let asked = self.ruling.as_mut();
        let ruling = ready!(
            asked
                .expect("polled after completion")
                .as_mut()
                .poll(context)
        );
        self.ruling = None;
        Poll::Ready(ruling)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let (Some(ruling), Some(runtime)) = (self.ruling.take(), self.runtime.take()) {
            runtime.spawn(async move { drop(ruling.await) });
        }
    }
}
