//! Updates the metrics of a request's descriptors.

use super::{
    Counter, RateLimitError,
    decide::{Applied, Bench, Hits, Judged, limited},
    service::Standing,
};

impl Bench<'_> {
    /// Updates the counters of each descriptor in `standings`. If the decision failed, only the
    /// requested hits are counted.
    pub(super) fn count(
        &self,
        standings: &mut [Standing<'_>],
        decided: &Result<(), RateLimitError>,
    ) {
        for applied in limited(standings) {
            let hits = match applied.hits {
                Hits::None => 0,
                Hits::Taken(cost) => cost.units(),
                Hits::GivenBack(cost) => {
                    let given_back = decided.as_ref().map_or(0, |()| cost.units());
                    applied.counters.add(Counter::TotalNegativeHits, given_back);
                    continue;
                }
            };
            applied.counters.add(Counter::TotalHits, hits);
            if decided.is_ok() {
                self.count_share(applied, hits);
            }
        }
    }

    fn count_share(&self, applied: &Applied<'_>, hits: u64) {
        let (counters, judged) = (&applied.counters, &applied.judged);
        let share = self.share(judged, hits);
        counters.add(Counter::WithinLimit, share.within);
        counters.add(Counter::NearLimit, share.near);
        counters.add(Counter::OverLimit, share.over);
        if judged.was_known {
            counters.add(Counter::OverLimitWithLocalCache, share.over);
        }
        if applied.rule().is_some_and(|rule| rule.shadow) {
            counters.add(Counter::ShadowMode, share.over);
        }
    }

    /// Splits `hits` into those within the limit, near it and over it.
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
        // One request can only be on both sides of the limit if denied hits are counted.
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

/// The hits of a request, split by their position relative to the limit.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    within: u64,
    near: u64,
    over: u64,
}
