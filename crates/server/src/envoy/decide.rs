//! The decision on a request's descriptors.

use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Deref,
    sync::Arc,
    time::Duration,
};

use futures_util::future::{join, join_all};
use tidegate_core::{
    Charge, Cost, Decided, Decision, Effect, Exactness, Limits, Outcome, Timestamp,
};

use super::{
    RateLimitError, Ratio, StoreFailure,
    counters::Counters,
    over_cache::OverCache,
    rules::{Rule, RuleLimits},
    service::Standing,
};
use crate::limiter::{Asked, Limiter};

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
    /// Whether that was known without asking.
    pub(super) was_known: bool,
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

    fn limits(&self) -> &Limits {
        &self.limits.limits
    }

    fn charge(&self, cost: Cost) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: self.limits(),
            cost,
        }
    }
}

/// What decides, and at which instant.
#[derive(Debug)]
pub(super) struct Bench<'s> {
    pub(super) limiter: &'s Limiter,
    pub(super) store_failure: StoreFailure,
    pub(super) over: Option<&'s OverCache>,
    pub(super) now: Timestamp,
    pub(super) within: Option<Duration>,
    pub(super) near_limit_ratio: Ratio,
}

impl Bench<'_> {
    /// Decides every descriptor on its own: what one of them came to does not matter to the others.
    ///
    /// # Errors
    ///
    /// [`RateLimitError::Store`]; see [`Self::ask`].
    pub(super) async fn decide_each(
        &self,
        standings: &mut [Standing<'_>],
    ) -> Result<(), RateLimitError> {
        let decided = self.decide_alone(limited(standings)).await;
        self.count(standings, &decided);
        decided
    }

    /// Decides those descriptors together that take hits: if any is over, the others are not charged, and whether
    /// it is itself is for its limits to say.
    ///
    /// # Errors
    ///
    /// [`RateLimitError::Store`]; see [`Self::ask`].
    pub(super) async fn decide_together(
        &self,
        standings: &mut [Standing<'_>],
    ) -> Result<(), RateLimitError> {
        let mut alone: Vec<&mut Applied<'_>> = Vec::new();
        let mut together: Vec<(&mut Applied<'_>, Cost)> = Vec::new();
        let mut one_is_known = false;
        for applied in limited(standings) {
            match applied.hits {
                Hits::Taken(_) if self.is_known_over(applied) => {
                    // What only counts denies nothing.
                    one_is_known |= !applied.limits().shadow();
                    alone.push(applied);
                }
                // One count under two limits cannot be charged at once.
                Hits::Taken(_) if together.iter().any(|(other, _)| clash(other, applied)) => {
                    alone.push(applied);
                }
                Hits::Taken(cost) => together.push((applied, cost)),
                Hits::None | Hits::GivenBack(_) => alone.push(applied),
            }
        }
        let charged = async {
            if one_is_known {
                self.look_at_each(&mut together).await
            } else {
                self.charge_together(&mut together).await
            }
        };
        let (alone, together) = join(self.decide_alone(alone.into_iter()), charged).await;
        let decided = alone.and(together);
        self.count(standings, &decided);
        decided
    }

    /// Decides each of `descriptors` on its own, those of one key in their order. Elsewhere they are asked about at the
    /// same time, so that their questions travel together; in memory there is nothing to wait for.
    async fn decide_alone<'a, 'd: 'a>(
        &self,
        descriptors: impl Iterator<Item = &'a mut Applied<'d>>,
    ) -> Result<(), RateLimitError> {
        if self.limiter.fleet().is_none() {
            for applied in descriptors {
                self.decide_one(applied).await?;
            }
            return Ok(());
        }
        let mut keys: HashMap<Vec<u8>, usize> = HashMap::new();
        let mut of_one_key: Vec<Vec<&mut Applied<'d>>> = Vec::new();
        for applied in descriptors {
            let next = of_one_key.len();
            match keys.entry(applied.key.clone()) {
                Entry::Occupied(known) => of_one_key[*known.get()].push(applied),
                Entry::Vacant(new) => {
                    new.insert(next);
                    of_one_key.push(vec![applied]);
                }
            }
        }
        let each = of_one_key.into_iter().map(|descriptors| async move {
            for applied in descriptors {
                self.decide_one(applied).await?;
            }
            Ok(())
        });
        join_all(each).await.into_iter().collect()
    }

    /// Takes nothing from any of `together`, because another descriptor of the request is over.
    async fn look_at_each(
        &self,
        together: &mut [(&mut Applied<'_>, Cost)],
    ) -> Result<(), RateLimitError> {
        let each = together.iter_mut().map(|(applied, cost)| async move {
            let (_, outcomes) = self.ask(&[applied.charge(*cost)], Effect::Look).await?;
            applied.judged = Judged::looking(&outcomes);
            Ok(())
        });
        join_all(each).await.into_iter().collect()
    }

    async fn charge_together(
        &self,
        together: &mut [(&mut Applied<'_>, Cost)],
    ) -> Result<(), RateLimitError> {
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
            return Ok(());
        }
        let (decided, outcomes) = self.ask(&charges, Effect::Charge).await?;
        let mut first = 0;
        let judged: Vec<Judged> = charges
            .iter()
            .map(|charge| {
                let own = outcomes.get(first..first + charge.limits.len());
                first += charge.limits.len();
                Judged::taking(&decided.decision, own.unwrap_or_default())
            })
            .collect();
        for ((applied, _), number) in together.iter_mut().zip(charge_of) {
            applied.judged = judged[number];
            self.remember(applied, decided.exactness);
        }
        Ok(())
    }

    async fn decide_one(&self, applied: &mut Applied<'_>) -> Result<(), RateLimitError> {
        let mut exactness = Exactness::Exact;
        applied.judged = match applied.hits {
            Hits::None | Hits::Taken(_) if self.is_known_over(applied) => Judged {
                over: true,
                was_known: true,
                ..Judged::default()
            },
            Hits::None => {
                let (decided, outcomes) =
                    self.ask(&[applied.charge(Cost::ONE)], Effect::Look).await?;
                exactness = decided.exactness;
                Judged::looking(&outcomes)
            }
            Hits::Taken(cost) => {
                let (decided, outcomes) = self.ask(&[applied.charge(cost)], Effect::Charge).await?;
                exactness = decided.exactness;
                Judged::taking(&decided.decision, &outcomes)
            }
            Hits::GivenBack(cost) => {
                let (_, outcomes) = self.ask(&[applied.charge(cost)], Effect::Refund).await?;
                self.over.inspect(|cache| cache.forget(&applied.key));
                Judged {
                    over: false,
                    ..Judged::looking(&outcomes)
                }
            }
        };
        self.remember(applied, exactness);
        Ok(())
    }

    /// # Errors
    ///
    /// [`RateLimitError::Store`] if the store is out of reach and the settings want an error then.
    async fn ask(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
    ) -> Result<(Decided, Vec<Outcome>), RateLimitError> {
        let (limiter, mut outcomes) = (self.limiter, Vec::new());
        let asked = Asked {
            charges,
            now: self.now,
            effect,
            within: self.within,
        };
        let decided = match self.store_failure {
            StoreFailure::Answer => limiter.decide(asked, &mut outcomes).await,
            StoreFailure::Error => {
                let decided = limiter.decide_or_fail(asked, &mut outcomes).await;
                decided.map_err(|_| RateLimitError::Store)?
            }
        };
        Ok((decided, outcomes))
    }

    fn is_known_over(&self, applied: &Applied<'_>) -> bool {
        self.over
            .is_some_and(|cache| cache.is_over(&applied.key, self.now))
    }

    /// Remembers what no hit can pass before its window ends: where more than the limit is counted, and not only more than
    /// this node's share of it.
    fn remember(&self, applied: &Applied<'_>, exactness: Exactness) {
        if let (Some(cache), Some(outcome)) = (self.over, &applied.judged.outcome)
            && applied.judged.over
            && exactness == Exactness::Exact
            && outcome.excess > 0
        {
            cache.remember(&applied.key, self.now.after(outcome.reset_after));
        }
    }
}

/// Whether two descriptors count under one key, but not under the same limits.
fn clash(one: &Applied<'_>, other: &Applied<'_>) -> bool {
    one.key == other.key && !std::ptr::eq(one.limits(), other.limits())
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
            was_known: false,
            limit,
            outcome: outcomes.get(limit).copied(),
        }
    }
}

/// Those descriptors to which a limit applies.
pub(super) fn limited<'s, 'd>(
    standings: &'s mut [Standing<'d>],
) -> impl Iterator<Item = &'s mut Applied<'d>> {
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
