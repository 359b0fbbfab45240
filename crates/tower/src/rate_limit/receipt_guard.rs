//! The receipt of a request's charges. The store issues the receipt, and needs it to renew leases
//! and to settle the charges. Settling a charge refunds its unused part and releases its slots.
//!
//! ```text
//! Present ──▶ Renewing: the store renews the leases ──▶ Present
//!   │           │ the request ends during the renewal
//!   ▼           ▼
//! Settled ◀── Ended
//! ```

use std::{
    mem,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tidegate_core::{
    Charge, Cost, Decision, MaybeReady, Outcome, Renewal, Rule, RuleSet, Settlement, Span, Store,
    StoreDecision, StoreRequest, Timestamp,
};
use tokio::runtime::Handle;

use tidegate::RateLimiter;

/// The charges of a request. This trait hides the type of the limiter.
pub(super) trait ChargeGuard: Send + Sync {
    /// Returns the charges.
    fn charges(&self) -> &OwnedCharges;

    /// Settles the charges. `due` contains the final amount of each charge.
    fn release(self: Arc<Self>, due: Vec<u64>);

    /// Renews the leases of the concurrency slots, unless the request has ended.
    fn renew(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The charges that `limiter` has made, with their receipt.
pub(super) struct ReceiptGuard<L: RateLimiter> {
    limiter: Arc<L>,
    runtime: Option<Handle>,
    charges: OwnedCharges,
    receipt: Mutex<ReceiptState<ReceiptOf<L>>>,
}

type ReceiptOf<L> = <<L as RateLimiter>::Store as Store>::Receipt;

/// The state of the receipt in the layer.
enum ReceiptState<R> {
    Present(R),
    /// The store is using the receipt to renew the leases.
    Renewing,
    /// The store is using the receipt to renew the leases, but the request has ended. The value
    /// contains the final amounts. The charges are settled when the store returns the receipt.
    Ended(Vec<u64>),
    Settled,
}

impl<L: RateLimiter + 'static> ReceiptGuard<L> {
    /// Creates a guard of the charges that `limiter` made under `rules`, with their `receipt`.
    pub(super) fn new(
        limiter: &Arc<L>,
        rules: &Arc<RuleSet>,
        charges: &[Charge<'_>],
        receipt: ReceiptOf<L>,
    ) -> Arc<Self> {
        Arc::new(Self {
            limiter: Arc::clone(limiter),
            runtime: Handle::try_current().ok(),
            charges: OwnedCharges::new(rules, charges),
            receipt: Mutex::new(ReceiptState::Present(receipt)),
        })
    }

    fn receipt(&self) -> MutexGuard<'_, ReceiptState<ReceiptOf<L>>> {
        self.receipt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles the charges. `due` contains the final amount of each charge. If the final amount is
    /// less than the cost, the difference is refunded. If it is more, the difference is charged.
    fn settle(self: Arc<Self>, receipt: ReceiptOf<L>, due: &[u64]) {
        let now = self.limiter.now();
        let costs = self.charges.list.iter().map(|charge| charge.cost.units());
        let settlements: Vec<Settlement> = costs
            .zip(due)
            .map(|(cost, due)| Settlement {
                unused: cost.saturating_sub(*due),
            })
            .collect();
        let (store, charges) = (self.limiter.store(), self.charges.as_charges());
        let mut receipt = Some(receipt);
        let is_settled = store
            .settle(&charges, &mut receipt, &settlements, now)
            .is_ready();
        let mut excess = excess(&charges, due);
        if is_settled {
            excess.retain(|(at, cost)| {
                !charge_excess(store, with(charges[*at], *cost), now).is_ready()
            });
            if excess.is_empty() {
                return;
            }
        }
        drop(charges);
        let Some(runtime) = self.runtime.clone() else {
            tracing::debug!(
                "unused units stay charged, because there is no Tokio runtime to refund them"
            );
            return;
        };
        runtime.spawn(async move {
            let (store, charges) = (self.limiter.store(), self.charges.as_charges());
            // If the charges were already settled, this call does nothing.
            store
                .settle(&charges, &mut receipt, &settlements, now)
                .await;
            for (at, cost) in excess {
                charge_excess(store, with(charges[at], cost), now).await;
            }
        });
    }
}

impl<L: RateLimiter + 'static> ChargeGuard for ReceiptGuard<L> {
    fn charges(&self) -> &OwnedCharges {
        &self.charges
    }

    fn release(self: Arc<Self>, due: Vec<u64>) {
        let mut receipt = self.receipt();
        match mem::replace(&mut *receipt, ReceiptState::Settled) {
            ReceiptState::Present(found) => {
                drop(receipt);
                self.settle(found, &due);
            }
            ReceiptState::Renewing => *receipt = ReceiptState::Ended(due),
            ReceiptState::Ended(_) | ReceiptState::Settled => {}
        }
    }

    fn renew(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let Some(mut loan) = ReceiptLoan::take(&self) else {
                return;
            };
            let Some(receipt) = &mut loan.receipt else {
                return;
            };
            let (charges, now) = (self.charges.as_charges(), self.limiter.now());
            let renewal = self.limiter.store().renew(&charges, receipt, now).await;
            if renewal == Renewal::Lost {
                tracing::debug!(
                    "a request ran longer than its lease and lost its concurrency slot"
                );
            }
        })
    }
}

/// A receipt that the store is using for a renewal. When this value is dropped, the receipt is
/// returned to its guard. If the request has ended, the charges are settled instead.
struct ReceiptLoan<L: RateLimiter + 'static> {
    guard: Arc<ReceiptGuard<L>>,
    receipt: Option<ReceiptOf<L>>,
}

impl<L: RateLimiter + 'static> ReceiptLoan<L> {
    fn take(guard: &Arc<ReceiptGuard<L>>) -> Option<Self> {
        let mut receipt = guard.receipt();
        match mem::replace(&mut *receipt, ReceiptState::Renewing) {
            ReceiptState::Present(found) => Some(Self {
                guard: Arc::clone(guard),
                receipt: Some(found),
            }),
            other => {
                *receipt = other;
                None
            }
        }
    }
}

impl<L: RateLimiter + 'static> Drop for ReceiptLoan<L> {
    fn drop(&mut self) {
        let Some(back) = self.receipt.take() else {
            return;
        };
        let mut receipt = self.guard.receipt();
        if let ReceiptState::Ended(due) = mem::replace(&mut *receipt, ReceiptState::Settled) {
            drop(receipt);
            return Arc::clone(&self.guard).settle(back, &due);
        }
        *receipt = ReceiptState::Present(back);
    }
}

/// Charges that own their data, so that they outlive the decision that made them.
pub(super) struct OwnedCharges {
    rules: Arc<RuleSet>,
    list: Vec<OwnedCharge>,
}

/// One charge in [`OwnedCharges`].
pub(super) struct OwnedCharge {
    key: Box<[u8]>,
    pub(super) cost: Cost,
    is_stretched: bool,
}

impl OwnedCharges {
    fn new(rules: &Arc<RuleSet>, charges: &[Charge<'_>]) -> Self {
        let own = |charge: &Charge<'_>| OwnedCharge {
            key: charge.key.into(),
            cost: charge.cost,
            is_stretched: charge.limits.is_stretched(),
        };
        Self {
            rules: Arc::clone(rules),
            list: charges.iter().map(own).collect(),
        }
    }

    pub(super) fn rules(&self) -> impl Iterator<Item = &Rule> {
        const OWN: &str = "the key of a charge belongs to a rule of the same rule set";
        let rule = |charge: &OwnedCharge| self.rules.rule_of(&charge.key).expect(OWN);
        self.list.iter().map(rule)
    }

    /// Returns the names of the response entries on which the final charges of the rules depend.
    pub(super) fn names(&self) -> Vec<&str> {
        let rules = self.rules();
        rules
            .flat_map(|rule| rule.response_cost().entry_names())
            .collect()
    }

    pub(super) fn list(&self) -> &[OwnedCharge] {
        &self.list
    }

    /// Returns the duration of the shortest lease among the concurrency slots, if there are any.
    pub(super) fn lease(&self) -> Option<Span> {
        self.rules().filter_map(|rule| rule.limits().lease()).min()
    }

    fn as_charges(&self) -> Vec<Charge<'_>> {
        self.list
            .iter()
            .zip(self.rules())
            .map(|(charge, rule)| charge.as_charge(rule))
            .collect()
    }
}

impl OwnedCharge {
    fn as_charge<'a>(&'a self, rule: &'a Rule) -> Charge<'a> {
        let limits = rule.limits();
        let stretched = limits.stretched().filter(|_| self.is_stretched);
        Charge {
            key: &self.key,
            limits: stretched.unwrap_or(limits),
            cost: self.cost,
            longest_wait: None,
        }
    }
}

/// Returns the index of each charge whose final amount in `due` exceeds its cost, with the
/// difference.
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

/// Charges the part of a request's cost that exceeds the reserved amount. If the limits do not
/// admit this part completely, charges as much of it as they admit. The cost of `charge` is this
/// part.
pub fn charge_excess<S: Store>(
    store: &S,
    charge: Charge<'_>,
    now: Timestamp,
) -> MaybeReady<(), impl Future<Output = ()> + Send> {
    let mut outcomes = Vec::new();
    let mut charges = vec![charge];
    let request = StoreRequest::excess(&mut charges, now);
    let decided = store.decide(request, &mut outcomes).ready();
    let is_charged = match decided.map(|decided| room(&decided, &outcomes)) {
        None => false,
        Some(None) => true,
        Some(Some(room)) => {
            charges = vec![with(charge, room)];
            let request = StoreRequest::excess(&mut charges, now);
            store.decide(request, &mut outcomes).is_ready()
        }
    };
    if is_charged {
        return MaybeReady::Ready(());
    }
    MaybeReady::Pending(async move {
        let mut charges = vec![charge];
        let request = StoreRequest::excess(&mut charges, now);
        let decided = store.decide(request, &mut outcomes).await;
        if let Some(room) = room(&decided, &outcomes) {
            charges = vec![with(charge, room)];
            let request = StoreRequest::excess(&mut charges, now);
            store.decide(request, &mut outcomes).await;
        }
    })
}

/// Returns the number of units that the denying limits would still admit. Returns `None` if it is
/// zero or if no limit denied the charge.
fn room(decided: &StoreDecision, outcomes: &[Outcome]) -> Option<Cost> {
    if decided.decision != Decision::Limited {
        return None;
    }
    let least = outcomes.iter().map(|outcome| outcome.remaining).min();
    Cost::new(least?).ok()
}
