//! What a request was charged, until it is known what of it comes back.
//!
//! ```text
//! Waiting ──▶ Running ──▶ Answered ──▶ its body has ended, or is given up
//!    │           │            │                   │
//!    ▼           ▼            ▼                   ▼
//!  all of it   places      what the head        what all of the answer
//!  comes back  come back   leaves over          leaves over
//! ```
//!
//! A request may be given up at every stage, which is when its reservation is dropped: it is settled then, by what is known. A
//! store in this process is settled on the spot. A store elsewhere is settled by a task of its own on the runtime that the request
//! came on; where that is coming to its end the receipt is lost, which is safe: what was charged stays charged, and places
//! come back when their lease is over.

use std::{fmt, sync::Arc};

use http::Response;
use http_body::Body;
use tidegate_core::{
    Charge, Cost, Decided, Decision, Effect, Outcome, Question, Rule, RuleSet, Settlement, Store,
    Timestamp,
};
use tokio::runtime::Handle;

use super::{answer::Answer, lasting::Lasting};
use crate::Gate;

/// What a request was charged, until it is known what of it comes back. It is settled when it is dropped; the default is
/// nothing.
#[derive(Debug, Default)]
pub(super) struct Reservation(Option<Box<Owed>>);

/// What was charged, how it is settled, and how far the request has come.
struct Owed {
    charged: Charged,
    settle: Box<dyn FnOnce(Charged, Vec<u64>) + Send + Sync>,
    stage: Stage,
    /// What the answer goes on with after its body.
    lasting: Option<Lasting>,
}

#[derive(Debug)]
enum Stage {
    /// The service does not know of it.
    Waiting,
    /// The service has it.
    Running,
    /// The service has answered.
    Answered(Answer),
}

impl Reservation {
    /// What `gate` has charged under `rules`.
    pub(super) fn new<G: Gate + 'static>(
        gate: &Arc<G>,
        rules: &Arc<RuleSet>,
        charges: &[Charge<'_>],
        receipt: <G::Store as Store>::Receipt,
    ) -> Self {
        let gate = Arc::clone(gate);
        let runtime = Handle::try_current().ok();
        let settle = move |charged, due| settle(gate, runtime, receipt, (charged, due));
        Self(Some(Box::new(Owed {
            charged: Charged::new(rules, charges),
            settle: Box::new(settle),
            stage: Stage::Waiting,
            lasting: None,
        })))
    }

    /// The service has the request: it is not to be had for nothing any more.
    pub(super) fn begin(&mut self) {
        let Some(owed) = &mut self.0 else { return };
        owed.stage = Stage::Running;
        let depends = |rule: &Rule| rule.holds_places() || !rule.bill().is_settled();
        if !owed.charged.rules().any(depends) {
            // What only waits for its turn has had it.
            self.0 = None;
        }
    }

    /// The service has answered. What remains is to be kept until the body has ended.
    #[must_use]
    pub(super) fn answered<B: Body>(mut self, response: &Response<B>) -> Self {
        let Some(owed) = &mut self.0 else { return self };
        let names = owed.charged.names();
        let holds_places = owed.charged.rules().any(Rule::holds_places);
        let is_settled = !holds_places && names.iter().all(|name| Answer::is_of_head(name));
        let mut answer = Answer::of(response, &names);
        if response.body().is_end_stream() {
            answer.end();
        }
        owed.stage = Stage::Answered(answer);
        if holds_places {
            owed.lasting = response.extensions().get().cloned();
        }
        if is_settled { Self::default() } else { self }
    }

    /// What is known of the answer by now, once there is one.
    pub(super) fn answer(&mut self) -> Option<&mut Answer> {
        match &mut self.0.as_mut()?.stage {
            Stage::Answered(answer) => Some(answer),
            Stage::Waiting | Stage::Running => None,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Some(mut owed) = self.0.take() else {
            return;
        };
        if let Some(lasting) = owed.lasting.take() {
            return lasting.keep(Self(Some(owed)));
        }
        let due = owed.due();
        (owed.settle)(owed.charged, due);
    }
}

impl Owed {
    /// What of each charge is due by now.
    fn due(&self) -> Vec<u64> {
        let due = |(kept, rule): (&Kept, &Rule)| match &self.stage {
            Stage::Waiting => 0,
            Stage::Running => kept.cost.units(),
            Stage::Answered(answer) => answer.due(rule.bill(), kept.cost),
        };
        self.charged
            .kept
            .iter()
            .zip(self.charged.rules())
            .map(due)
            .collect()
    }
}

impl fmt::Debug for Owed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owed").field(&self.stage).finish()
    }
}

/// Charges that outlive the question in which they were asked for.
struct Charged {
    rules: Arc<RuleSet>,
    kept: Vec<Kept>,
}

/// One of them.
struct Kept {
    key: Box<[u8]>,
    cost: Cost,
    is_stretched: bool,
}

impl Charged {
    fn new(rules: &Arc<RuleSet>, charges: &[Charge<'_>]) -> Self {
        let kept = |charge: &Charge<'_>| Kept {
            key: charge.key.into(),
            cost: charge.cost,
            is_stretched: charge.limits.is_stretched(),
        };
        Self {
            rules: Arc::clone(rules),
            kept: charges.iter().map(kept).collect(),
        }
    }

    fn rules(&self) -> impl Iterator<Item = &Rule> {
        const OWN: &str = "a charge has the key of a rule of its set";
        let rule = |kept: &Kept| self.rules.rule_of(&kept.key).expect(OWN);
        self.kept.iter().map(rule)
    }

    /// The entries of the answer that bills look at.
    fn names(&self) -> Vec<&str> {
        let rules = self.rules();
        rules.flat_map(|rule| rule.bill().entry_names()).collect()
    }

    fn charges(&self) -> Vec<Charge<'_>> {
        self.kept
            .iter()
            .zip(self.rules())
            .map(|(kept, rule)| kept.charge(rule))
            .collect()
    }
}

impl Kept {
    fn charge<'a>(&'a self, rule: &'a Rule) -> Charge<'a> {
        let limits = rule.limits();
        let stretched = limits.stretched().filter(|_| self.is_stretched);
        Charge {
            key: &self.key,
            limits: stretched.unwrap_or(limits),
            cost: self.cost,
        }
    }
}

/// Settles what `gate` has charged, of which so much is due of each charge.
fn settle<G: Gate + 'static>(
    gate: Arc<G>,
    runtime: Option<Handle>,
    receipt: <G::Store as Store>::Receipt,
    (charged, due): (Charged, Vec<u64>),
) {
    let now = gate.now();
    let costs = charged.kept.iter().map(|kept| kept.cost.units());
    let settlements: Vec<Settlement> = costs
        .zip(&due)
        .map(|(cost, due)| Settlement {
            unused: cost.saturating_sub(*due),
        })
        .collect();
    let charges = charged.charges();
    let left = gate
        .store()
        .settle_now(&charges, receipt, &settlements, now);
    let mut excess = excess(&charges, &due);
    if left.is_ok() {
        excess.retain(|(at, cost)| !charge_now(gate.store(), with(charges[*at], *cost), now));
        if excess.is_empty() {
            return;
        }
    }
    let Some(runtime) = runtime else {
        tracing::debug!(
            "what was not needed stays charged: there is no runtime to give it back on"
        );
        return;
    };
    drop(charges);
    runtime.spawn(async move {
        let charges = charged.charges();
        if let Err(receipt) = left {
            let settled = gate.store().settle(&charges, receipt, &settlements, now);
            settled.await;
        }
        for (at, cost) in excess {
            charge_later(gate.store(), with(charges[at], cost), now).await;
        }
    });
}

/// Which of `charges` were charged less than is `due` of them, and by how much.
fn excess(charges: &[Charge<'_>], due: &[u64]) -> Vec<(usize, Cost)> {
    let excess = |(at, (charge, due)): (usize, (&Charge<'_>, &u64))| {
        let more = due.saturating_sub(charge.cost.units());
        Some((at, Cost::new(more).ok()?))
    };
    charges
        .iter()
        .zip(due)
        .enumerate()
        .filter_map(excess)
        .collect()
}

fn with(charge: Charge<'_>, cost: Cost) -> Charge<'_> {
    Charge { cost, ..charge }
}

/// Charges what a request has cost beyond what was reserved: all of it, or what the limits have room for. False if that has to
/// be waited for.
fn charge_now<S: Store>(store: &S, charge: Charge<'_>, now: Timestamp) -> bool {
    let mut outcomes = Vec::new();
    let mut ask = |charge| {
        store
            .decide_now(&mut question(&mut vec![charge], now), &mut outcomes)
            .map(|decided| room(&decided, &outcomes))
    };
    match ask(charge) {
        None => false,
        Some(None) => true,
        Some(Some(room)) => ask(with(charge, room)).is_some(),
    }
}

/// [`charge_now`], where it has to be waited for.
async fn charge_later<S: Store>(store: &S, charge: Charge<'_>, now: Timestamp) {
    let mut outcomes = Vec::new();
    let decided = store
        .decide(question(&mut vec![charge], now), &mut outcomes)
        .await;
    if let Some(room) = room(&decided, &outcomes) {
        let mut charges = vec![with(charge, room)];
        store
            .decide(question(&mut charges, now), &mut outcomes)
            .await;
    }
}

fn question<'q, 'c>(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Question<'q, 'c> {
    Question {
        charges,
        now,
        effect: Effect::Charge,
        within: None,
    }
}

/// What limits that have denied have room for, if anything.
fn room(decided: &Decided, outcomes: &[Outcome]) -> Option<Cost> {
    if decided.decision != Decision::Limited {
        return None;
    }
    let least = outcomes.iter().map(|outcome| outcome.remaining).min();
    Cost::new(least?).ok()
}
