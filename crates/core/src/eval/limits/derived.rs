//! Limits derived from other limits. Stretched limits are the raised form of elastic limits. A
//! share is the part of the limits that one node enforces while the store is unreachable. Former
//! limits are a rule's limits before the rules were changed. For reservations and for reports,
//! there is a copy of the limits that counts denied requests differently.

use std::sync::{Arc, OnceLock};

use super::{
    Limits,
    history::{self, TermsHistory},
    shares::ShareCache,
};
use crate::{
    algorithm::Terms,
    error::LimitError,
    eval::{DenialCounting, FallbackShare},
    limit::Limit,
};

impl Limits {
    /// Makes the limits elastic. A rule has headroom while its condition for spare capacity holds.
    /// While the rule has headroom, requests are charged to the [`Self::stretched`] limits. The
    /// stretched limits admit `percent` more units and mark the additional requests as over the
    /// limit. The original and the stretched limits share one state, so units admitted beyond the
    /// original limits still count after the headroom is gone.
    ///
    /// # Errors
    ///
    /// Returns an error for the field `elastic` if the percentage is invalid for a soft allowance.
    /// Limits that count denied requests are rejected, because their state does not keep units
    /// beyond the limit.
    pub fn stretching(mut self, percent: u32) -> Result<Self, LimitError> {
        if self
            .groups
            .iter()
            .any(|group| group.denials != DenialCounting::NotCounted)
        {
            let problem = "cannot be combined with count_denied; remove one of the two";
            return Err(LimitError::new("elastic", problem));
        }
        self.stretch = percent;
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        if percent > 0 {
            let stretched = self.build_stretched();
            let stretched = stretched.map_err(|error| LimitError::new("elastic", error.problem))?;
            self.stretched = OnceLock::from(Arc::new(stretched));
        }
        Ok(self)
    }

    /// Returns the stretched limits, which apply while there is headroom, or `None` if these limits
    /// are not elastic.
    #[must_use]
    pub fn stretched(&self) -> Option<&Self> {
        let build = || Arc::new(self.build_stretched().unwrap_or_else(|_| self.clone()));
        (self.stretch > 0).then(|| &**self.stretched.get_or_init(build))
    }

    /// Returns the percentage by which elastic limits are raised if there is headroom; 0 if the
    /// limits are not elastic.
    #[must_use]
    pub fn stretch(&self) -> u32 {
        self.stretch
    }

    /// Returns whether these limits are stretched limits.
    #[must_use]
    pub fn is_stretched(&self) -> bool {
        self.unstretched.is_some()
    }

    /// Returns the original limits, before stretching.
    #[must_use]
    pub fn unstretched(&self) -> &Self {
        self.unstretched.as_deref().unwrap_or(self)
    }

    /// Returns a copy of these limits that does not count denied requests. The limits and the copy
    /// share the state of each key. The copy is used for reservations: a denied reservation must
    /// not be counted, even if the limits count denied requests. In addition, most limits that
    /// count denied requests cannot refund a charge by its receipt.
    #[must_use]
    pub fn without_counting_denials(&self) -> Self {
        let mut limits = self.clone();
        for group in &mut limits.groups {
            group.denials = DenialCounting::NotCounted;
        }
        limits.skips_denials = true;
        limits.stretched = OnceLock::new();
        limits
    }

    /// Returns whether these limits are the result of [`Self::without_counting_denials`].
    #[must_use]
    pub fn skips_denials(&self) -> bool {
        self.skips_denials
    }

    /// Returns a copy of these limits that also counts denied costs. The copy is used for a cost
    /// that is known only after the request. The limits and the copy share the state of each key.
    /// If the rule's only limit is a fixed window, the copy counts the full cost, even beyond the
    /// limit. In all other rules, each limit counts the cost only up to the limit. Concurrency
    /// limits do not count denied requests. Elastic limits are not stretched.
    #[must_use]
    pub fn counting_all(&self) -> Self {
        let counting = |limit: &Limit| limit.clone().counting_denied(true);
        let limits = match self.limits.as_slice() {
            [limit] => vec![
                limit
                    .clone()
                    .counting_in_full()
                    .unwrap_or_else(|_| counting(limit)),
            ],
            limits => limits.iter().map(counting).collect(),
        };
        // The parameters come from valid limits, so `new` does not fail.
        let counting = Self::new(limits).unwrap_or_else(|_| self.clone());
        let counting = Self {
            name: self.name.clone(),
            shadow: self.shadow,
            service_wide: self.service_wide,
            unit: self.unit,
            on_failure: self.on_failure,
            ..counting
        };
        counting.joining(&self.history)
    }

    /// Makes these limits the successors of `old`. Units that a key spent under `old` still count
    /// when the key is next charged under these limits.
    ///
    /// Old and new limits are matched by algorithm and order. For example, the second fixed window
    /// of the new limits takes over the state of the second fixed window of the old limits.
    ///
    /// `old` can also take over states written under these limits, so that a key can be charged
    /// alternately under `old` and under these limits.
    #[must_use]
    pub fn inheriting_from(self, old: &Self) -> Self {
        old.history.add(old);
        self.joining(&old.history)
    }

    /// Replaces the history of these limits with `history`, and adds these limits to it.
    fn joining(mut self, history: &Arc<TermsHistory>) -> Self {
        history.add(&self);
        self.history = Arc::clone(history);
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Returns one node's share of every limit, for local decisions while the store is unreachable.
    /// The share is compiled on first use.
    #[must_use]
    pub fn share(&self, share: FallbackShare) -> Arc<Self> {
        self.shares.get(share, || self.build_share(share))
    }

    /// Builds the stretched limits: the same limits with a larger soft allowance. The states of the
    /// stretched limits are compatible with the states of the original limits.
    fn build_stretched(&self) -> Result<Self, LimitError> {
        let wider = |limit: &Limit| {
            let percent = limit.soft_percent().saturating_add(self.stretch);
            limit.clone().with_soft_percent(percent)
        };
        let limits: Result<Vec<Limit>, _> = self.limits.iter().map(wider).collect();
        Ok(Self {
            name: self.name.clone(),
            shadow: self.shadow,
            service_wide: self.service_wide,
            unit: self.unit,
            fingerprint: self.fingerprint,
            history: Arc::clone(&self.history),
            on_failure: self.on_failure,
            unstretched: Some(Arc::new(Self {
                stretched: OnceLock::new(),
                ..self.clone()
            })),
            ..Self::new(limits?)?
        })
    }

    fn build_share(&self, share: FallbackShare) -> Self {
        if let Some(unstretched) = &self.unstretched {
            let scaled = unstretched.build_share(share);
            return scaled.build_stretched().unwrap_or(scaled);
        }
        let limits = self.limits.iter().map(|limit| share.of(limit)).collect();
        // A share of valid limits is valid, and has the same number of limits, so `new` does not
        // fail.
        let scaled = Self::new(limits).unwrap_or_else(|_| self.clone());
        let scaled = Self {
            name: self.name.clone(),
            shadow: self.shadow,
            service_wide: self.service_wide,
            unit: self.unit,
            stretch: self.stretch,
            ..scaled
        };
        let scaled = scaled.joining(&self.history);
        if self.skips_denials {
            scaled.without_counting_denials()
        } else {
            scaled
        }
    }

    /// Returns the terms of the limits with this `fingerprint`; `None` if the history contains no
    /// such limits.
    pub(super) fn former_terms(&self, fingerprint: u32) -> Option<Arc<[Terms]>> {
        if fingerprint == self.fingerprint {
            return Some(history::terms(self));
        }
        self.history.terms(fingerprint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, MemoryBounds, MemoryStore,
        Settlement, Timestamp, notation,
    };

    const NOW: Timestamp = Timestamp::from_micros(60_000_000);

    fn limits(texts: &[(&str, AlgorithmName)]) -> Limits {
        let limit = |(text, algorithm): &(&str, AlgorithmName)| {
            LimitSpec::shorthand(notation::rate(text).unwrap(), *algorithm)
                .build()
                .unwrap()
        };
        Limits::new(texts.iter().map(limit).collect()).unwrap()
    }

    fn in_full(text: &str) -> Limits {
        let limits = limits(&[(text, AlgorithmName::FixedWindow)]);
        let limit = limits.first().clone();
        Limits::from(limit.counting_in_full().unwrap())
    }

    fn charge<'c>(limits: &'c Limits, units: u64) -> Charge<'c> {
        Charge::new(b"key", limits, Cost::new(units).unwrap()).unwrap()
    }

    /// Charges `units`, and returns whether they were admitted.
    fn spend(store: &MemoryStore, limits: &Limits, units: u64) -> bool {
        let decided = store.check(
            &[charge(limits, units)],
            NOW,
            Effect::Charge,
            &mut Vec::new(),
        );
        decided == Decision::Admitted
    }

    /// Returns the remaining units of each limit, and by how many the count exceeds the limit.
    fn state(store: &MemoryStore, limits: &Limits) -> Vec<(u64, u64)> {
        let mut outcomes = Vec::new();
        store.check(&[charge(limits, 1)], NOW, Effect::Look, &mut outcomes);
        let outcomes = outcomes.iter();
        outcomes
            .map(|outcome| (outcome.remaining, outcome.excess))
            .collect()
    }

    #[test]
    fn limits_without_denial_counting_share_the_state_and_can_be_refunded() {
        let original = in_full("100/min");
        let uncounted = original.without_counting_denials();
        let store = MemoryStore::new(MemoryBounds::default());
        let held = [charge(&uncounted, 60)];
        let (decision, receipt) = store.reserve(&held, NOW, &mut Vec::new());
        assert_eq!(decision, Decision::Admitted);
        assert!(!spend(&store, &uncounted, 41));
        assert_eq!(state(&store, &original), [(40, 0)]);
        assert!(!spend(&store, &original, 50), "counted in full");
        assert_eq!(state(&store, &original), [(0, 10)]);
        store.settle(&held, receipt, &[Settlement { unused: 55 }], NOW);
        assert_eq!(state(&store, &original), [(45, 0)]);
    }

    #[test]
    fn a_share_of_limits_without_denial_counting_does_not_count_denials() {
        let uncounted = in_full("100/min").without_counting_denials();
        let share = uncounted.share(FallbackShare::one_of(2).unwrap());
        let store = MemoryStore::new(MemoryBounds::default());
        assert!(!spend(&store, &share, 51));
        assert_eq!(state(&store, &share), [(50, 0)]);
    }

    #[test]
    fn limits_that_count_all_count_what_they_deny() {
        let original = limits(&[("100/min", AlgorithmName::FixedWindow)]);
        let store = MemoryStore::new(MemoryBounds::default());
        assert!(spend(&store, &original, 70));
        assert!(!spend(&store, &original.counting_all(), 50));
        assert_eq!(state(&store, &original), [(0, 20)]);

        let several = [
            ("100/min", AlgorithmName::SlidingWindowLog),
            ("30/s", AlgorithmName::TokenBucket),
        ];
        let several = limits(&several);
        let store = MemoryStore::new(MemoryBounds::default());
        assert!(!spend(&store, &several, 40));
        assert!(!spend(&store, &several.counting_all(), 40));
        assert_eq!(state(&store, &several), [(60, 0), (0, 0)]);
    }
}
