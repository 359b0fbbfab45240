//! All-or-nothing charging: either all descriptors of a request are charged, or none of them.
//!
//! A quota is a rule in quota mode. Quotas deny a request only if all of the request's quotas are
//! over their limits. No store supports the condition that all quotas must be over their limits.
//! Therefore, one quota becomes the leading quota: the first quota with remaining capacity. The
//! leading quota can deny the request like any other rule. The other quotas only count hits.
//!
//! ```text
//! rules  ────────────────────────▶ deny ──┐
//! quotas ─┬─ first with capacity ▶ deny ──┼─▶ one decision
//!         └─ the others ─────────▶ count ─┘
//! ```
//!
//! If a request has only one quota, this quota is the leading quota, and finding the leading quota
//! takes no store query.
//!
//! Concurrent requests may exhaust the leading quota before the decision. If the leading quota is
//! exhausted, another quota becomes the leading quota. The service tries at most [`MAX_TURNS`]
//! leading quotas.

use std::collections::HashMap;

use futures_util::future::{join, join_all};
use tidegate_core::{Charge, Cost, Decision, Effect, Exactness, Limit, Limits, Outcome};

use super::{
    RlsError,
    applied_limit::{AppliedLimit, DescriptorMatch, Hits, LimitResult},
    evaluate::{Evaluator, applied_limits},
};

/// The maximum number of attempts with a leading quota. If concurrent requests exhaust the leading
/// quota in every attempt, all of the request's quotas are reported as over their limits.
const MAX_TURNS: usize = 4;

/// The descriptors of a request in two groups: those that are decided separately, and those that
/// are decided together.
#[derive(Debug, Default)]
struct GroupedDescriptors<'a, 'd> {
    alone: Vec<&'a mut AppliedLimit<'d>>,
    together: Vec<(&'a mut AppliedLimit<'d>, Cost)>,
    /// Whether the request is denied because, according to the cache, a rule is over its limit.
    one_is_cached: bool,
}

/// The combined result of the quotas that are not part of the all-or-nothing decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OtherQuotas {
    /// No quota is outside the all-or-nothing decision.
    None,
    /// At least one of these quotas has remaining capacity, so quotas do not deny the request.
    Pass,
    /// All of these quotas are over their limits.
    Over,
}

/// A charge to one counter. If a descriptor occurs twice in a request, the counter is charged once,
/// with the sum of the hits.
#[derive(Debug)]
struct SummedCharge<'a> {
    key: &'a [u8],
    limits: &'a Limits,
    /// The quota's limits in shadow mode, which are used unless this quota is the leading quota;
    /// `None` if the rule is not a quota.
    shadow_limits: Option<&'a Limits>,
    cost: Cost,
}

impl<'a> SummedCharge<'a> {
    fn charge(&self, limits: &'a Limits) -> Charge<'a> {
        Charge {
            key: self.key,
            limits,
            cost: self.cost,
            longest_wait: None,
            blocked: None,
        }
    }

    fn is_quota(&self) -> bool {
        self.shadow_limits.is_some()
    }

    /// Returns whether this counter denies the request on its own if it is over its limit.
    fn denies(&self) -> bool {
        !self.is_quota() && !self.limits.is_shadow()
    }

    /// Returns whether the counter is charged even if a quota denies the request. The counter is
    /// charged in this way if each of its limits counts denied hits, including hits that another
    /// limit has denied.
    fn counts_denied(&self) -> bool {
        let counts = |limit: &Limit| limit.count_denied() && !limit.counts_in_full();
        self.denies() && self.limits.iter().all(counts)
    }
}

/// The result of a charge to a counter, and whether the result is exact.
type CounterResult = (LimitResult, Exactness);

impl Evaluator<'_> {
    /// Decides all descriptors that charge hits in one decision. If the request is denied, none of
    /// these descriptors is charged, except that exceeded limits count the denied hits if they are
    /// configured to do so.
    ///
    /// # Errors
    ///
    /// Returns [`RlsError::Store`] under the conditions of [`Self::query_store`].
    pub(super) async fn evaluate_all_or_nothing(
        &self,
        matches: &mut [DescriptorMatch<'_>],
    ) -> Result<(), RlsError> {
        let GroupedDescriptors {
            mut alone,
            mut together,
            one_is_cached,
        } = self.group(matches);
        let decided = if one_is_cached {
            let (alone, together) = join(
                self.evaluate_separately(reborrowed(&mut alone)),
                self.query_each(&mut together),
            )
            .await;
            alone.and(together)
        } else if alone.iter().any(|applied| applied.is_quota()) {
            // Decide the separate descriptors first, because they also determine whether the quotas
            // deny the request.
            match self.evaluate_separately(reborrowed(&mut alone)).await {
                Ok(()) => {
                    let others = other_quotas(&alone, &together);
                    self.charge_together(&mut together, others).await
                }
                error => error,
            }
        } else {
            let others = other_quotas(&alone, &together);
            let (alone, together) = join(
                self.evaluate_separately(reborrowed(&mut alone)),
                self.charge_together(&mut together, others),
            )
            .await;
            alone.and(together)
        };
        self.count(matches, &decided);
        decided
    }

    fn group<'a, 'd>(&self, matches: &'a mut [DescriptorMatch<'d>]) -> GroupedDescriptors<'a, 'd> {
        let mut grouped = GroupedDescriptors::default();
        for applied in applied_limits(matches) {
            let cached_until = self.cached_over_until(applied);
            match (applied.hits, cached_until) {
                (Hits::Charge(_), Some(until)) => {
                    // Record the cached result now, because the cache entry may expire before this
                    // descriptor is decided. All other descriptors must be decided with the same
                    // result.
                    applied.result = LimitResult::cached(until);
                    // A rule in shadow mode never denies, and a quota does not deny on its own.
                    grouped.one_is_cached |= !applied.limits().is_shadow() && !applied.is_quota();
                    grouped.alone.push(applied);
                }
                // Decide this descriptor separately, because one decision cannot charge the same
                // key under two different limits.
                (Hits::Charge(_), None)
                    if grouped
                        .together
                        .iter()
                        .any(|(other, _)| have_conflicting_limits(other, applied)) =>
                {
                    grouped.alone.push(applied);
                }
                (Hits::Charge(cost), None) => grouped.together.push((applied, cost)),
                (Hits::None | Hits::Refund(_), _) => grouped.alone.push(applied),
            }
        }
        grouped
    }

    /// Queries the status of each descriptor in `together`, and charges nothing. Callers use this
    /// method for a request that is already known to be denied.
    async fn query_each(
        &self,
        together: &mut [(&mut AppliedLimit<'_>, Cost)],
    ) -> Result<(), RlsError> {
        let each = together.iter_mut().map(|(applied, cost)| async move {
            let (_, outcomes) = self
                .query_store(&[applied.charge(*cost)], Effect::Look)
                .await?;
            applied.result = LimitResult::of_query(&outcomes);
            Ok(())
        });
        join_all(each).await.into_iter().collect()
    }

    async fn charge_together(
        &self,
        together: &mut [(&mut AppliedLimit<'_>, Cost)],
        others: OtherQuotas,
    ) -> Result<(), RlsError> {
        let (counts, count_of) = counts(together);
        if counts.is_empty() {
            return Ok(());
        }
        if others == OtherQuotas::Over && !counts.iter().any(SummedCharge::is_quota) {
            return self.query_each(together).await;
        }
        let results = self.charge_counts(&counts, others).await?;
        for ((applied, _), number) in together.iter_mut().zip(count_of) {
            let (result, exactness) = results[number];
            applied.result = result;
            self.cache_over_limit(applied, exactness);
        }
        Ok(())
    }

    /// Charges all counters in `counts`, or none of them. Returns the result of each counter.
    async fn charge_counts(
        &self,
        counts: &[SummedCharge<'_>],
        others: OtherQuotas,
    ) -> Result<Vec<CounterResult>, RlsError> {
        let mut results = vec![CounterResult::default(); counts.len()];
        let mut open: Vec<usize> = (0..counts.len()).collect();
        for _ in 0..MAX_TURNS {
            let lead = self.lead(counts, &open, others).await?;
            let decision = self.charge_under(lead, counts, &open, &mut results).await?;
            let is_over = |number: &&usize| results[**number].0.over;
            let denied_by_lead = decision == Decision::Limited
                && lead.is_some()
                && !open
                    .iter()
                    .filter(is_over)
                    .any(|number| counts[*number].denies());
            let another_has_room = open
                .iter()
                .any(|number| counts[*number].is_quota() && !is_over(&number));
            if !(denied_by_lead && another_has_room) {
                return Ok(results);
            }
            // The leading quota is exhausted, so the other counters are charged again with another
            // leading quota. Counters whose limits have all counted the denial are not charged
            // again. If only some of a descriptor's limits count denials, those limits count the
            // denial twice.
            open.retain(|number| Some(*number) != lead && !counts[*number].counts_denied());
        }
        for number in open.iter().filter(|number| counts[**number].is_quota()) {
            results[*number].0.over = true;
        }
        Ok(results)
    }

    /// Charges all of the `open` counters or none, with `lead` as the leading quota. Stores the
    /// results in `found`. `lead` and `open` are indices in `counts`.
    async fn charge_under(
        &self,
        lead: Option<usize>,
        counts: &[SummedCharge<'_>],
        open: &[usize],
        found: &mut [CounterResult],
    ) -> Result<Decision, RlsError> {
        let charge = |number: &usize| {
            let count = &counts[*number];
            let shadow_limits = count.shadow_limits.filter(|_| lead != Some(*number));
            count.charge(shadow_limits.unwrap_or(count.limits))
        };
        let charges: Vec<Charge<'_>> = open.iter().map(charge).collect();
        let (decided, outcomes) = self.query_store(&charges, Effect::Charge).await?;
        for (number, own) in open.iter().zip(split_by_charge(&charges, &outcomes)) {
            found[*number] = (
                LimitResult::of_charge(&decided.decision, own),
                decided.exactness,
            );
        }
        Ok(decided.decision)
    }

    /// Returns the leading quota among the `open` counters. The leading quota is the first quota
    /// with remaining capacity or, if all quotas are exhausted, the first quota. Returns `None` if
    /// there are no quotas, or if the quotas cannot deny the request.
    async fn lead(
        &self,
        counts: &[SummedCharge<'_>],
        open: &[usize],
        others: OtherQuotas,
    ) -> Result<Option<usize>, RlsError> {
        if others == OtherQuotas::Pass {
            return Ok(None);
        }
        let is_quota = |number: &&usize| counts[**number].is_quota();
        let quotas: Vec<usize> = open.iter().filter(is_quota).copied().collect();
        let first = quotas.first().copied();
        if quotas.len() < 2 {
            return Ok(first);
        }
        let charges: Vec<Charge<'_>> = quotas
            .iter()
            .map(|number| &counts[*number])
            .map(|count| count.charge(count.shadow_limits.unwrap_or(count.limits)))
            .collect();
        let (_, outcomes) = self.query_store(&charges, Effect::Peek).await?;
        let mut with_room = quotas
            .iter()
            .zip(split_by_charge(&charges, &outcomes))
            .filter(|(_, own)| own.iter().all(|outcome| outcome.allowed))
            .map(|(number, _)| *number);
        Ok(with_room.next().or(first))
    }
}

/// Returns the counters charged by `together`, and the counter index of each descriptor.
fn counts<'a>(
    together: &'a [(&mut AppliedLimit<'_>, Cost)],
) -> (Vec<SummedCharge<'a>>, Vec<usize>) {
    let mut numbers: HashMap<&[u8], usize> = HashMap::new();
    let (mut counts, mut count_of) = (Vec::<SummedCharge<'_>>::new(), Vec::new());
    for (applied, cost) in together {
        let number = *numbers.entry(&applied.key).or_insert(counts.len());
        count_of.push(number);
        match counts.get_mut(number) {
            Some(count) => count.cost = plus(count.cost, *cost),
            None => counts.push(SummedCharge {
                key: &applied.key,
                limits: applied.limits(),
                shadow_limits: applied.limits.shadow_limits.as_deref(),
                cost: *cost,
            }),
        }
    }
    (counts, count_of)
}

/// Returns the combined result of the quotas that are decided separately or are in shadow mode.
fn other_quotas(
    alone: &[&mut AppliedLimit<'_>],
    together: &[(&mut AppliedLimit<'_>, Cost)],
) -> OtherQuotas {
    let in_shadow = |applied: &AppliedLimit<'_>| applied.is_quota() && applied.limits().is_shadow();
    let mut quotas = alone.iter().filter(|applied| applied.is_quota()).peekable();
    let has_some = quotas.peek().is_some();
    if quotas.any(|applied| !applied.result.over || in_shadow(applied))
        || together.iter().any(|(applied, _)| in_shadow(applied))
    {
        OtherQuotas::Pass
    } else if has_some {
        OtherQuotas::Over
    } else {
        OtherQuotas::None
    }
}

/// Returns the outcomes of each charge in `charges`. The slices are empty if the store was not
/// queried.
pub(super) fn split_by_charge<'o>(
    charges: &[Charge<'_>],
    mut outcomes: &'o [Outcome],
) -> impl Iterator<Item = &'o [Outcome]> {
    let sizes: Vec<usize> = charges.iter().map(|charge| charge.limits.len()).collect();
    sizes.into_iter().map(move |size| {
        let (own, rest) = outcomes.split_at(size.min(outcomes.len()));
        outcomes = rest;
        own
    })
}

fn reborrowed<'b, 'd>(
    descriptors: &'b mut [&mut AppliedLimit<'d>],
) -> impl Iterator<Item = &'b mut AppliedLimit<'d>> {
    descriptors.iter_mut().map(|applied| &mut **applied)
}

/// Returns whether two descriptors have the same key but different limits.
fn have_conflicting_limits(one: &AppliedLimit<'_>, other: &AppliedLimit<'_>) -> bool {
    one.key == other.key && !std::ptr::eq(one.limits(), other.limits())
}

/// Returns the sum of two costs, capped at the maximum cost.
fn plus(one: Cost, other: Cost) -> Cost {
    let most = tidegate_core::bounds::MAX_COUNT;
    Cost::new(one.units().saturating_add(other.units()).min(most)).unwrap_or(one)
}
