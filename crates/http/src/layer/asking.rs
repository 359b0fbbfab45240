//! The question that a request is, to a gate.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate_core::{
    Charge, Effect, Outcome, Question, Request, RequestError, RuleSet, Scratch, Store, Timestamp,
    Verdict,
};
use tokio::runtime::Handle;

use super::{LimiterLayer, held::Held, reservation::Reservation, ruling::Ruling};
use crate::{
    Gate,
    gate::{Asks, stretch},
};

/// What came of a request.
pub(super) enum Asked<'v> {
    /// A verdict, and what it was charged, where something of that may come back.
    Decided(Verdict<'v>, Reservation),
    /// Nothing yet, and whether something of what is to be charged may come back.
    Open { reserves: bool },
}

/// What one request leaves for the next one of a thread: memory for its keys and outcomes.
#[derive(Debug, Default)]
pub(super) struct Desk {
    scratch: Scratch,
    outcomes: Vec<Outcome>,
}

/// Charges `request`, which came `now`, in the name of `layer`.
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

/// A verdict that is waited for.
///
/// A store elsewhere may charge what nobody waits for any more. Where something of that may come back, the question is followed to its end
/// on the runtime that it was asked on, and what it charged is given back.
pub(super) struct Asking {
    ruling: Option<Pin<Box<dyn Future<Output = Ruling> + Send>>>,
    reserves: bool,
    /// Where it is asked, once it has been.
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
    /// When it is polled after it was ready.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ruling> {
        if self.reserves && self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
        let asked = self.ruling.as_mut();
        let ruling = ready!(asked.expect("polled once more").as_mut().poll(context));
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
