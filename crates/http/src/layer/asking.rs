//! The question that a request is, to a gate.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate_core::{
    Charge, Effect, Question, Request, RequestError, RuleSet, Scratch, Store, Verdict,
};
use tokio::runtime::Handle;

use super::{reservation::Reservation, ruling::Ruling};
use crate::{
    Gate,
    gate::{stretch, stretch_now},
};

/// A verdict, and what the request was charged, where something of that may come back.
pub(super) type Decided<'v> = (Verdict<'v>, Reservation);

/// What could be decided at once.
pub(super) enum Asked<'v> {
    Decided(Verdict<'v>, Reservation),
    /// Nothing, and whether something of what is to be charged may come back.
    Open {
        reserves: bool,
    },
}

/// Charges `request`, if nothing has to be waited for.
pub(super) fn charge_now<'a, G: Gate + 'static>(
    gate: &Arc<G>,
    rules: &'a Arc<RuleSet>,
    scratch: &'a mut Scratch,
    request: &Request<'_>,
) -> Result<Asked<'a>, RequestError> {
    let now = gate.now();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok(Asked::Decided(Verdict::unlimited(), Reservation::default()));
    }
    let reserves = rules.wants_receipt(&charges);
    let mut outcomes = Vec::new();
    if stretch_now(gate.store(), rules, &mut charges, now).is_none() {
        return Ok(Asked::Open { reserves });
    }
    let mut question = Question {
        charges: &mut charges,
        now,
        effect: Effect::Charge,
        within: None,
    };
    let decided = if reserves {
        gate.store().reserve_now(&mut question, &mut outcomes)
    } else {
        let decided = gate.store().decide_now(&mut question, &mut outcomes);
        decided.map(|decided| (decided, None))
    };
    let Some((decided, receipt)) = decided else {
        return Ok(Asked::Open { reserves });
    };
    let reserved = reserved(gate, rules, &charges, receipt);
    Ok(Asked::Decided(
        decided.verdict(&charges, &outcomes),
        reserved,
    ))
}

/// Charges `request`, and waits if need be.
pub(super) async fn charge<'a, G: Gate + 'static>(
    gate: &Arc<G>,
    rules: &'a Arc<RuleSet>,
    scratch: &'a mut Scratch,
    request: &Request<'_>,
) -> Result<Decided<'a>, RequestError> {
    let now = gate.now();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok((Verdict::unlimited(), Reservation::default()));
    }
    let reserves = rules.wants_receipt(&charges);
    let mut outcomes = Vec::new();
    stretch(gate.store(), rules, &mut charges, now).await;
    let mut question = Question {
        charges: &mut charges,
        now,
        effect: Effect::Charge,
        within: None,
    };
    let (decided, receipt) = if reserves {
        gate.store().reserve(&mut question, &mut outcomes).await
    } else {
        (gate.store().decide(question, &mut outcomes).await, None)
    };
    let reserved = reserved(gate, rules, &charges, receipt);
    Ok((decided.verdict(&charges, &outcomes), reserved))
}

fn reserved<G: Gate + 'static>(
    gate: &Arc<G>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    receipt: Option<<G::Store as Store>::Receipt>,
) -> Reservation {
    let reserved = receipt.map(|receipt| Reservation::new(gate, rules, charges, receipt));
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
