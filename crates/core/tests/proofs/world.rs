//! The reference model of a whole store, with several rules, several keys and one clock.

use std::collections::BTreeMap;

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, RetryAfter,
    Timestamp,
};

use crate::twin::Twin;

/// Creates a store with one shard, so that it has a single clock, like the model.
pub(crate) fn one_shard() -> MemoryStore {
    MemoryStore::new(MemoryBounds {
        max_keys: 1_000,
        ..MemoryBounds::default()
    })
}

/// A rule with its own key.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) key: Vec<u8>,
    pub(crate) limits: Limits,
}

impl Rule {
    pub(crate) fn new(key: &[u8], limits: Vec<Limit>, shadow: bool) -> Self {
        let limits = Limits::new(limits).expect("a rule has from 1 to 16 limits");
        Self {
            key: key.to_vec(),
            limits: limits.in_shadow(shadow),
        }
    }

    pub(crate) fn charge(&self, cost: u64) -> Charge<'_> {
        let cost = Cost::new(cost).expect("a cost from 1 to the maximum");
        Charge::new(&self.key, &self.limits, cost).expect("a key of a few bytes")
    }
}

#[derive(Debug, Default)]
pub(crate) struct World {
    latest: u64,
    keys: BTreeMap<Vec<u8>, Vec<Twin>>,
    blocks: BTreeMap<Vec<u8>, u64>,
}

/// A charge that is being decided by the model.
struct Pending {
    before: Vec<Twin>,
    after: Vec<Twin>,
    cost: u64,
    charged: bool,
}

impl World {
    pub(crate) fn check(
        &mut self,
        asks: &[(&Rule, u64)],
        now: u64,
        effect: Effect,
    ) -> (Decision, Vec<Outcome>) {
        self.latest = self.latest.max(now);
        let now = self.latest;
        // Blocks affect neither looks ([`Effect::Look`]) nor refunds.
        let blocked = self.blocked(asks, now);
        if let Some(blocked) =
            blocked.filter(|_| effect != Effect::Look && effect != Effect::Refund)
        {
            return (blocked, Vec::new());
        }
        let mut pending: Vec<Pending> = asks
            .iter()
            .map(|(rule, cost)| self.open(rule, *cost, effect))
            .collect();
        let denies = |pending: &Pending| {
            let mut twins = pending.before.iter();
            twins.any(|twin| !twin.admits(now, pending.cost))
        };
        let admitted = asks
            .iter()
            .zip(&pending)
            .all(|((rule, _), pending)| rule.limits.is_shadow() || !denies(pending));
        if let Effect::Charge | Effect::Peek = effect {
            for ((rule, _), pending) in asks.iter().zip(&mut pending) {
                pending.charged = admitted && !denies(pending);
                let counts = admitted == rule.limits.is_shadow();
                for (before, twin) in pending.before.iter().zip(&mut pending.after) {
                    let in_full = twin.in_full && !before.admits(now, pending.cost);
                    let counted = if twin.in_full {
                        in_full
                    } else {
                        twin.count_denied
                    };
                    if pending.charged || counts && counted {
                        twin.spend(now, pending.cost);
                    }
                }
            }
        }
        if effect == Effect::Refund {
            for ((_, units), pending) in asks.iter().zip(&mut pending) {
                for twin in &mut pending.after {
                    twin.refund(now, *units);
                }
            }
        }
        let outcomes = pending
            .iter()
            .flat_map(|pending| pending.outcomes(now))
            .collect();
        if let Effect::Charge | Effect::Refund = effect {
            for ((rule, _), pending) in asks.iter().zip(pending) {
                self.keys.insert(rule.key.clone(), pending.after);
            }
        }
        let decision = if admitted {
            Decision::Admitted
        } else {
            Decision::Limited
        };
        (decision, outcomes)
    }

    pub(crate) fn reset(&mut self, key: &[u8]) {
        self.keys.remove(key);
    }

    pub(crate) fn block(&mut self, key: &[u8], micros: u64, now: u64) {
        self.latest = self.latest.max(now);
        self.blocks.insert(key.to_vec(), self.latest + micros);
    }

    pub(crate) fn unblock(&mut self, key: &[u8], now: u64) {
        self.latest = self.latest.max(now);
        self.blocks.remove(key);
    }

    fn open(&self, rule: &Rule, cost: u64, effect: Effect) -> Pending {
        let fresh = || rule.limits.iter().map(Twin::new).collect();
        let before = self.keys.get(&rule.key).cloned().unwrap_or_else(fresh);
        Pending {
            after: before.clone(),
            before,
            cost: if let Effect::Look | Effect::Refund = effect {
                0
            } else {
                cost
            },
            charged: false,
        }
    }

    /// Returns the decision for the block that ends last. If several blocks end at the same time,
    /// the first of these blocks is used.
    fn blocked(&self, asks: &[(&Rule, u64)], now: u64) -> Option<Decision> {
        let blocks = asks.iter().map(|(rule, _)| self.blocks.get(&rule.key));
        let standing = blocks.map(|until| until.copied().filter(|until| *until > now));
        let longest = standing.clone().flatten().max()?;
        let charge = standing
            .into_iter()
            .position(|until| until == Some(longest))?;
        let until = Timestamp::from_micros(longest);
        Some(Decision::Blocked {
            charge,
            until: Some(until),
            retry_after: RetryAfter::After(until.since(Timestamp::from_micros(now))),
        })
    }
}

impl Pending {
    fn outcomes(&self, now: u64) -> Vec<Outcome> {
        let twins = self.before.iter().zip(&self.after);
        twins
            .map(|(before, after)| after.outcome(before, now, self.cost, self.charged))
            .collect()
    }
}
