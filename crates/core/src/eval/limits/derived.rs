//! Limits that are derived from other limits. Stretched limits are elastic limits while they are
//! raised. A share is the part of the limits that one node enforces while the store is unreachable.
//! Former limits are the limits before a change of the rules.

use std::sync::{Arc, OnceLock};

use super::{Limits, shares::ShareCache};
use crate::{
    error::LimitError,
    eval::{DenialCounting, FallbackShare},
    limit::Limit,
};

impl Limits {
    /// The number of former sets of limits that are kept. States that were written under a kept set
    /// can be converted exactly.
    const MAX_FORMER: usize = 4;

    /// Makes the limits elastic. While there is headroom (the rule's condition for spare capacity
    /// holds), requests are charged with [`Self::stretched`] limits. The stretched limits admit
    /// `percent` more units and mark the additional requests. The original and the stretched limits
    /// share one state, so units that were admitted beyond the original limits still count when
    /// there is no more headroom.
    ///
    /// # Errors
    ///
    /// Returns an error for the field `elastic` if the percentage is invalid for a soft allowance.
    /// Limits that count denied requests are rejected, because their state drops units beyond the
    /// limits.
    pub fn stretching(mut self, percent: u32) -> Result<Self, LimitError> {
        if self
            .groups
            .iter()
            .any(|group| group.denials != DenialCounting::Forgotten)
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

    /// Returns the percentage by which elastic limits are raised while there is headroom; 0 if the
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

    /// Makes these limits the successors of `old`. If the state of a key was written under `old`,
    /// the spent units stay spent when the key is next charged under the new limits.
    ///
    /// Old and new limits are matched by algorithm and order. For example, the second fixed window
    /// of the new limits takes over the state of the second fixed window of the old limits.
    #[must_use]
    pub fn inheriting_from(mut self, old: &Arc<Self>) -> Self {
        self.predecessor = Some(Arc::new(old.truncated(Self::MAX_FORMER)));
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Returns one node's share of every limit, for local decisions while the store is unreachable.
    /// The share is built on first use.
    #[must_use]
    pub fn share(&self, share: FallbackShare) -> Arc<Self> {
        self.shares.get(share, || self.build_share(share))
    }

    /// Builds the stretched limits, which are the same limits with a larger soft allowance. The
    /// states of the original and the stretched limits are compatible.
    fn build_stretched(&self) -> Result<Self, LimitError> {
        let wider = |limit: &Limit| {
            let percent = limit.soft_percent().saturating_add(self.stretch);
            limit.clone().with_soft_percent(percent)
        };
        let limits: Result<Vec<Limit>, _> = self.limits.iter().map(wider).collect();
        Ok(Self {
            name: self.name.clone(),
            shadow: self.shadow,
            fingerprint: self.fingerprint,
            predecessor: self.predecessor.clone(),
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
        // A share of valid limits is valid and contains the same number of limits, so `new` does
        // not fail.
        let scaled = Self::new(limits).unwrap_or_else(|_| self.clone());
        let scaled = Self {
            name: self.name.clone(),
            shadow: self.shadow,
            stretch: self.stretch,
            ..scaled
        };
        match &self.predecessor {
            Some(old) => scaled.inheriting_from(&old.share(share)),
            None => scaled,
        }
    }

    /// Returns the current or former limits with this `fingerprint`, or `None` if no known limits
    /// have this fingerprint.
    pub(super) fn former(&self, fingerprint: u32) -> Option<&Self> {
        let mut limits = Some(self);
        while let Some(candidate) = limits {
            if candidate.fingerprint == fingerprint {
                return Some(candidate);
            }
            limits = candidate.predecessor.as_deref();
        }
        None
    }

    /// Copies these limits and their former sets, at most `generations` sets in total. Cached
    /// shares and stretched limits are not copied, because they refer to all former sets.
    fn truncated(&self, generations: usize) -> Self {
        let predecessor = self.predecessor.as_ref().filter(|_| generations > 1);
        Self {
            predecessor: predecessor.map(|old| Arc::new(old.truncated(generations - 1))),
            shares: ShareCache::default(),
            stretched: OnceLock::new(),
            ..self.clone()
        }
    }
}
