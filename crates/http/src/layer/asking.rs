//! The question that a request is, to a gate.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate_core::{
    Algorithm, Charge, Effect, Limit, Question, Reason, Request, RequestError, RuleSet, Scratch,
    Span, Store, Timestamp, Verdict,
};
use tokio::runtime::Handle;

use super::{LimiterLayer, held::Held, reservation::Reservation, ruling::Ruling};
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

/// Charges `request` in the name of `layer`, if nothing has to be waited for.
pub(super) fn charge_now<'a, G: Gate + 'static>(
    layer: &LimiterLayer<G>,
    rules: &'a Arc<RuleSet>,
    scratch: &'a mut Scratch,
    request: &Request<'_>,
) -> Result<Asked<'a>, RequestError> {
    let (gate, longest) = (&layer.gate, layer.settings.terms.longest_wait);
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
    if may_wait_for_longer(&charges, longest) {
        let mut peeked = charges.clone();
        let mut peek = peek(&mut peeked, now);
        let Some(decided) = gate.store().decide_now(&mut peek, &mut outcomes) else {
            return Ok(Asked::Open { reserves });
        };
        let foretold = decided.verdict(&peeked, &outcomes);
        if is_final(&foretold, longest) {
            let foretold = foretold.waiting_at_most(longest);
            return Ok(Asked::Decided(foretold, Reservation::default()));
        }
        outcomes.clear();
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
    let reserved = reserved(layer, rules, &charges, receipt);
    let verdict = decided.verdict(&charges, &outcomes);
    Ok(Asked::Decided(verdict.waiting_at_most(longest), reserved))
}

/// Charges `request` in the name of `layer`, and waits if need be.
pub(super) async fn charge<'a, G: Gate + 'static>(
    layer: &LimiterLayer<G>,
    rules: &'a Arc<RuleSet>,
    scratch: &'a mut Scratch,
    request: &Request<'_>,
) -> Result<Decided<'a>, RequestError> {
    let (gate, longest) = (&layer.gate, layer.settings.terms.longest_wait);
    let now = gate.now();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok((Verdict::unlimited(), Reservation::default()));
    }
    let reserves = rules.wants_receipt(&charges);
    let mut outcomes = Vec::new();
    stretch(gate.store(), rules, &mut charges, now).await;
    if may_wait_for_longer(&charges, longest) {
        let mut peeked = charges.clone();
        let peek = peek(&mut peeked, now);
        let decided = gate.store().decide(peek, &mut outcomes).await;
        let foretold = decided.verdict(&peeked, &outcomes);
        if is_final(&foretold, longest) {
            let foretold = foretold.waiting_at_most(longest);
            return Ok((foretold, Reservation::default()));
        }
        outcomes.clear();
    }
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
    let reserved = reserved(layer, rules, &charges, receipt);
    let verdict = decided.verdict(&charges, &outcomes);
    Ok((verdict.waiting_at_most(longest), reserved))
}

/// Whether one of the queues among `charges` may have requests wait for longer than `longest`.
///
/// Such a one is asked before it is charged. What is charged and then denied leaves the line only if nobody has come behind
/// it, so that the line would fill with requests that are gone; now those only stay that others overtook between question and charge.
fn may_wait_for_longer(charges: &[Charge<'_>], longest: Span) -> bool {
    let may = |limit: &Limit| {
        let queues = matches!(
            limit.algorithm(),
            Algorithm::LeakyBucket { queue: true, .. }
        );
        queues && limit.window() > longest
    };
    let enforced = |charge: &&Charge<'_>| !charge.limits.shadow();
    let mut enforced = charges.iter().filter(enforced);
    enforced.any(|charge| charge.limits.iter().any(may))
}

fn peek<'q, 'c>(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Question<'q, 'c> {
    Question {
        charges,
        now,
        effect: Effect::Peek,
        within: None,
    }
}

/// Whether a request of which this is foretold is not to be charged: it would wait for too long, or the store cannot decide.
fn is_final(foretold: &Verdict<'_>, longest: Span) -> bool {
    foretold.delay > longest || foretold.reason == Some(Reason::Store)
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
