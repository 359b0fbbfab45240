//! The decision on a request's descriptors, and what is counted of it.

use std::{collections::HashMap, ops::Deref, sync::Arc};

use tidegate_core::{Charge, Cost, Decision, Effect, Outcome, Timestamp};

use super::{
    Counter, Ratio,
    counters::Counters,
    over_cache::OverCache,
    rules::{Rule, RuleLimits},
    service::Standing,
};
use crate::limiter::Limiter;

/// What a descriptor asks of its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    /// How it stands.
    None,
    /// So many hits.
    Taken(Cost),
    /// To take so many hits back.
    GivenBack(Cost),
}

/// Where the limits of a descriptor come from.
#[derive(Debug)]
pub(super) enum Source<'d> {
    Rule(&'d Rule, &'d RuleLimits),
    Request(Arc<RuleLimits>),
}

impl Deref for Source<'_> {
    type Target = RuleLimits;

    fn deref(&self) -> &RuleLimits {
        match self {
            Self::Rule(_, limits) => limits,
            Self::Request(limits) => limits,
        }
    }
}

/// A limit that applies to a descriptor, and what came of it.
#[derive(Debug)]
pub(super) struct Applied<'d> {
    pub(super) limits: Source<'d>,
    pub(super) key: Vec<u8>,
    pub(super) counters: Arc<Counters>,
    pub(super) hits: Hits,
    pub(super) judged: Judged,
}

/// What came of a descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Judged {
    /// Whether it is over, in shadow or not.
    pub(super) over: bool,
    /// Which of its limits speaks for it.
    pub(super) limit: usize,
    /// What that limit answered; `None` if it was not asked.
    pub(super) outcome: Option<Outcome>,
}

impl<'d> Applied<'d> {
    pub(super) fn rule(&self) -> Option<&'d Rule> {
        match self.limits {
            Source::Rule(rule, _) => Some(rule),
            Source::Request(_) => None,
        }
    }

    fn charge(&self, cost: Cost) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: &self.limits.limits,
            cost,
        }
    }
}

/// What decides, and at which instant.
#[derive(Debug)]
pub(super) struct Bench<'s> {
    pub(super) limiter: &'s Limiter,
    pub(super) over: Option<&'s OverCache>,
    pub(super) now: Timestamp,
    pub(super) near_limit_ratio: Ratio,
}

impl Bench<'_> {
    /// Decides every descriptor on its own, in order: what one of them came to does not matter to the others.
    pub(super) async fn decide_each(&self, standings: &mut [Standing<'_>]) {
        for applied in limited(standings) {
            self.decide_one(applied).await;
            self.count(applied);
        }
    }

    /// Decides those descriptors together that take hits: if any is over, the others are not charged, and whether
    /// it is itself is for its limits to say.
    pub(super) async fn decide_together(&self, standings: &mut [Standing<'_>]) {
        let mut together = Vec::new();
        let mut one_is_known = false;
        for applied in limited(standings) {
            match applied.hits {
                Hits::Taken(_) if self.is_known_over(applied) => {
                    one_is_known = true;
                    self.decide_one(applied).await;
                }
                Hits::Taken(cost) => together.push((applied, cost)),
                Hits::None | Hits::GivenBack(_) => self.decide_one(applied).await,
            }
        }
        if one_is_known {
            for (applied, cost) in &mut together {
                let (_, outcomes) = self.ask(&[applied.charge(*cost)], Effect::Look).await;
                applied.judged = Judged::looking(&outcomes);
            }
        } else {
            self.charge_together(&mut together).await;
        }
        for applied in limited(standings) {
            self.count(applied);
        }
    }

    async fn charge_together(&self, together: &mut [(&mut Applied<'_>, Cost)]) {
        // A descriptor that stands twice in the request is charged once, with the hits of both.
        let mut numbers: HashMap<&[u8], usize> = HashMap::new();
        let mut charges: Vec<Charge<'_>> = Vec::with_capacity(together.len());
        let mut charge_of = Vec::with_capacity(together.len());
        for (applied, cost) in together.iter() {
            let number = *numbers.entry(&applied.key).or_insert(charges.len());
            charge_of.push(number);
            match charges.get_mut(number) {
                Some(charge) => charge.cost = plus(charge.cost, *cost),
                None => charges.push(applied.charge(*cost)),
            }
        }
        if charges.is_empty() {
            return;
        }
        let (decision, outcomes) = self.ask(&charges, Effect::Charge).await;
        let mut first = 0;
        let judged: Vec<Judged> = charges
            .iter()
            .map(|charge| {
                let own = outcomes.get(first..first + charge.limits.len());
                first += charge.limits.len();
                Judged::taking(&decision, own.unwrap_or_default())
            })
            .collect();
        for ((applied, _), number) in together.iter_mut().zip(charge_of) {
            applied.judged = judged[number];
            self.remember(applied);
        }
    }

    async fn decide_one(&self, applied: &mut Applied<'_>) {
        applied.judged = match applied.hits {
            Hits::None | Hits::Taken(_) if self.is_known_over(applied) => Judged {
                over: true,
                ..Judged::default()
            },
            Hits::None => {
                Judged::looking(&self.ask(&[applied.charge(Cost::ONE)], Effect::Look).await.1)
            }
            Hits::Taken(cost) => {
                let (decision, outcomes) = self.ask(&[applied.charge(cost)], Effect::Charge).await;
                Judged::taking(&decision, &outcomes)
            }
            Hits::GivenBack(cost) => {
                let (_, outcomes) = self.ask(&[applied.charge(cost)], Effect::Refund).await;
                self.over.inspect(|cache| cache.forget(&applied.key));
                Judged {
                    over: false,
                    ..Judged::looking(&outcomes)
                }
            }
        };
        self.remember(applied);
    }

    async fn ask(&self, charges: &[Charge<'_>], effect: Effect) -> (Decision, Vec<Outcome>) {
        let mut outcomes = Vec::new();
        let decided = self
            .limiter
            .decide(charges, self.now, effect, &mut outcomes)
            .await;
        (decided.decision, outcomes)
    }

    fn is_known_over(&self, applied: &Applied<'_>) -> bool {
        self.over
            .is_some_and(|cache| cache.is_over(&applied.key, self.now))
    }

    /// Remembers what no hit can pass before its window ends: where more than the limit is counted.
    fn remember(&self, applied: &Applied<'_>) {
        if let (Some(cache), Some(outcome)) = (self.over, &applied.judged.outcome)
            && applied.judged.over
            && outcome.excess > 0
        {
            cache.remember(&applied.key, self.now.after(outcome.reset_after));
        }
    }

    fn count(&self, applied: &Applied<'_>) {
        let counters = &applied.counters;
        let hits = match applied.hits {
            Hits::None => 0,
            Hits::Taken(cost) => cost.units(),
            Hits::GivenBack(cost) => return counters.add(Counter::TotalNegativeHits, cost.units()),
        };
        counters.add(Counter::TotalHits, hits);
        let share = self.share(&applied.judged, hits);
        counters.add(Counter::WithinLimit, share.within);
        counters.add(Counter::NearLimit, share.near);
        counters.add(Counter::OverLimit, share.over);
        if applied.judged.over && applied.judged.outcome.is_none() && self.over.is_some() {
            counters.add(Counter::OverLimitWithLocalCache, share.over);
        }
        if applied.rule().is_some_and(|rule| rule.shadow) {
            counters.add(Counter::ShadowMode, share.over);
        }
    }

    /// How many of `hits` were within the limit, near it and over it.
    ///
    /// ```text
    ///   0 ──────────── near ─────── limit ─────────▶ hits counted
    ///        before ├──────────────────────────┤ after
    ///                    ├─ near ──┼── over ───┤
    /// ```
    fn share(&self, judged: &Judged, hits: u64) -> Share {
        let Some(outcome) = judged.outcome else {
            let over = if judged.over { hits } else { 0 };
            return Share {
                over,
                within: hits - over,
                near: 0,
            };
        };
        let limit = outcome.limit;
        let after = limit
            .saturating_sub(outcome.remaining)
            .saturating_add(outcome.excess);
        let before = after.saturating_sub(hits);
        let near = self.near_limit_ratio.of(limit);
        if !judged.over {
            return Share {
                within: hits,
                near: after.saturating_sub(near.max(before)),
                over: 0,
            };
        }
        // Only where what is denied is counted can a request lie on both sides of the limit.
        let counts_denied = outcome.excess > 0;
        if !counts_denied || before >= limit {
            return Share {
                over: hits,
                ..Share::default()
            };
        }
        Share {
            within: 0,
            near: limit - near.max(before).min(limit),
            over: after - limit,
        }
    }
}

/// How a request's hits lie about the limit.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    within: u64,
    near: u64,
    over: u64,
}

impl Judged {
    /// Where nothing was taken: over if more than the limit is counted.
    fn looking(outcomes: &[Outcome]) -> Self {
        let over = outcomes.iter().position(|outcome| outcome.excess > 0);
        Self::led_by(over, outcomes)
    }

    /// Where hits were taken: over if any limit denied them, or the store could not take them in.
    fn taking(decision: &Decision, outcomes: &[Outcome]) -> Self {
        if let Decision::Full { .. } | Decision::Blocked { .. } = decision {
            return Self {
                over: true,
                ..Self::default()
            };
        }
        let denying = outcomes
            .iter()
            .enumerate()
            .filter(|(_, outcome)| !outcome.allowed);
        let longest = denying.max_by_key(|(_, outcome)| outcome.retry_after);
        Self::led_by(longest.map(|(at, _)| at), outcomes)
    }

    fn led_by(over: Option<usize>, outcomes: &[Outcome]) -> Self {
        let tightest = || {
            let least = outcomes
                .iter()
                .enumerate()
                .min_by_key(|(_, outcome)| outcome.remaining);
            least.map_or(0, |(at, _)| at)
        };
        let limit = over.unwrap_or_else(tightest);
        Self {
            over: over.is_some(),
            limit,
            outcome: outcomes.get(limit).copied(),
        }
    }
}

fn limited<'s, 'd>(standings: &'s mut [Standing<'d>]) -> impl Iterator<Item = &'s mut Applied<'d>> {
    standings.iter_mut().filter_map(|standing| match standing {
        Standing::Limited(applied) => Some(applied),
        Standing::NoLimit | Standing::Unlimited(_) => None,
    })
}

/// The sum of two costs, or the most that a cost can be.
fn plus(one: Cost, other: Cost) -> Cost {
    let most = tidegate_core::bounds::MAX_COUNT;
    Cost::new(one.units().saturating_add(other.units()).min(most)).unwrap_or(one)
}
