//! Updates the metrics of a request's descriptors.

use super::{
    HitCounterKind, RlsError,
    applied_limit::DescriptorMatch,
    applied_limit::{AppliedLimit, Hits, LimitResult},
    evaluate::{Evaluator, applied_limits},
};

impl Evaluator<'_> {
    /// Updates the counters of each descriptor in `matches`. If the decision failed, only the
    /// number of requested hits is counted.
    pub(super) fn count(
        &self,
        matches: &mut [DescriptorMatch<'_>],
        decided: &Result<(), RlsError>,
    ) {
        for applied in applied_limits(matches) {
            let hits = match applied.hits {
                Hits::None => 0,
                Hits::Charge(cost) => cost.units(),
                Hits::Refund(cost) => {
                    let refunds = decided.as_ref().map_or(0, |()| cost.units());
                    applied
                        .counters
                        .add(HitCounterKind::TotalNegativeHits, refunds);
                    continue;
                }
            };
            applied.counters.add(HitCounterKind::TotalHits, hits);
            if decided.is_ok() {
                self.count_split(applied, hits);
            }
        }
    }

    fn count_split(&self, applied: &AppliedLimit<'_>, hits: u64) {
        let (counters, result) = (&applied.counters, &applied.result);
        let split = self.split(result, hits);
        counters.add(HitCounterKind::WithinLimit, split.within);
        counters.add(HitCounterKind::NearLimit, split.near);
        counters.add(HitCounterKind::OverLimit, split.over);
        if result.cached_until.is_some() {
            counters.add(HitCounterKind::OverLimitWithLocalCache, split.over);
        }
        if applied.rule().is_some_and(|rule| rule.shadow) {
            counters.add(HitCounterKind::ShadowMode, split.over);
        }
    }

    /// Splits `hits` by their position: within the limit, near the limit, and over the limit.
    ///
    /// ```text
    ///   0 ──────────── near ─────── limit ─────────▶ hits counted
    ///        before ├──────────────────────────┤ after
    ///                    ├─ near ──┼── over ───┤
    /// ```
    fn split(&self, result: &LimitResult, hits: u64) -> HitSplit {
        let Some(outcome) = result.outcome else {
            let over = if result.over { hits } else { 0 };
            return HitSplit {
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
        if !result.over {
            return HitSplit {
                within: hits,
                near: after.saturating_sub(near.max(before)),
                over: 0,
            };
        }
        // The hits of one denied request can be partly within and partly over the limit only if
        // denied hits are counted. If denied hits are not counted, all hits of a denied request are
        // over the limit.
        let counts_denied = outcome.excess > 0;
        if !counts_denied || before >= limit {
            return HitSplit {
                over: hits,
                ..HitSplit::default()
            };
        }
        HitSplit {
            within: 0,
            near: limit - near.max(before).min(limit),
            over: after - limit,
        }
    }
}

/// The hits of a request, split by their position relative to the limit.
#[derive(Clone, Copy, Debug, Default)]
struct HitSplit {
    within: u64,
    near: u64,
    over: u64,
}
