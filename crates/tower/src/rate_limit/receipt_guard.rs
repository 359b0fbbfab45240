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

use tidegate::{
    RateLimiter,
    rate_limiter::{OwnedCharges, charge_excess, excess_costs, release_slots},
};
use tidegate_core::{Charge, Renewal, RuleSet, Settlement, Store, Timestamp};
use tokio::runtime::Handle;

/// The charges of a request. The trait hides the type of the limiter.
pub(super) trait ChargeGuard: Send + Sync {
    /// Returns the charges.
    fn charges(&self) -> &OwnedCharges;

    /// Settles the charges. `final_charges` contains the final amount of each charge.
    fn release(self: Arc<Self>, final_charges: Vec<u64>);

    /// Renews the leases of the concurrency slots, unless the request has ended.
    fn renew(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Charges made by `limiter`, with their receipt.
pub(super) struct ReceiptGuard<L: RateLimiter> {
    limiter: Arc<L>,
    runtime: Option<Handle>,
    charges: OwnedCharges,
    /// The time at which the request acquired its slots.
    since: Timestamp,
    receipt: Mutex<ReceiptState<ReceiptOf<L>>>,
}

type ReceiptOf<L> = <<L as RateLimiter>::Store as Store>::Receipt;

/// Where the receipt is, and whether the request has ended.
enum ReceiptState<R> {
    /// The guard has the receipt.
    Present(R),
    /// The store is using the receipt to renew the leases.
    Renewing,
    /// The store is using the receipt to renew the leases, but the request has ended. The value
    /// contains the final amounts. The charges are settled when the store returns the receipt.
    Ended(Vec<u64>),
    /// The charges are settled or being settled.
    Settled,
}

impl<L: RateLimiter + 'static> ReceiptGuard<L> {
    /// Creates a guard for the charges that `limiter` made under `rules`, with their `receipt`.
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
            since: limiter.now(),
            receipt: Mutex::new(ReceiptState::Present(receipt)),
        })
    }

    fn receipt(&self) -> MutexGuard<'_, ReceiptState<ReceiptOf<L>>> {
        self.receipt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles the charges. `final_charges` contains the final amount of each charge. If the final
    /// amount is less than the cost, the difference is refunded. If the final amount is more than
    /// the cost, the difference is charged.
    fn settle(self: Arc<Self>, receipt: ReceiptOf<L>, final_charges: &[u64]) {
        let now = self.limiter.now();
        let costs = self.charges.list().iter().map(|charge| charge.cost.units());
        let settlements: Vec<Settlement> = costs
            .zip(final_charges)
            .map(|(cost, final_charge)| Settlement {
                unused: cost.saturating_sub(*final_charge),
            })
            .collect();
        let (store, charges) = (self.limiter.store(), self.charges.as_charges());
        let mut receipt = Some(receipt);
        let is_settled = store
            .settle(&charges, &mut receipt, &settlements, now)
            .is_ready();
        let mut excess = excess_costs(&charges, final_charges);
        let held = Some(now.since(self.since));
        if is_settled {
            release_slots(self.limiter.wait_queues(), &self.charges, held);
            excess.retain(|(at, cost)| {
                let excess = Charge {
                    cost: *cost,
                    ..charges[*at]
                };
                !charge_excess(store, excess, now).is_ready()
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
            // The call does nothing if the charges were already settled.
            store
                .settle(&charges, &mut receipt, &settlements, now)
                .await;
            if !is_settled {
                release_slots(self.limiter.wait_queues(), &self.charges, held);
            }
            for (at, cost) in excess {
                let excess = Charge {
                    cost,
                    ..charges[at]
                };
                charge_excess(store, excess, now).await;
            }
        });
    }
}

impl<L: RateLimiter + 'static> ChargeGuard for ReceiptGuard<L> {
    fn charges(&self) -> &OwnedCharges {
        &self.charges
    }

    fn release(self: Arc<Self>, final_charges: Vec<u64>) {
        let mut receipt = self.receipt();
        match mem::replace(&mut *receipt, ReceiptState::Settled) {
            ReceiptState::Present(found) => {
                drop(receipt);
                self.settle(found, &final_charges);
            }
            ReceiptState::Renewing => *receipt = ReceiptState::Ended(final_charges),
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

/// A receipt that the store is using for a renewal. Dropping this value returns the receipt to its
/// guard, or settles the charges if the request has ended.
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
        if let ReceiptState::Ended(final_charges) =
            mem::replace(&mut *receipt, ReceiptState::Settled)
        {
            drop(receipt);
            return Arc::clone(&self.guard).settle(back, &final_charges);
        }
        *receipt = ReceiptState::Present(back);
    }
}
