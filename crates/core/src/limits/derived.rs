//! The limits that are made of others: wider ones where there is room, one node's share, and what they were before.

use std::sync::{Arc, OnceLock};

use super::{Limits, shares::Shares};
use crate::{
    failure::Share,
    limit::{Limit, LimitError},
    member::Denials,
};

impl Limits {
    /// How many sets of former limits are remembered, so that states left under them are taken over exactly.
    const MAX_FORMER: usize = 4;

    /// Lets the limits stretch: so many percent more are admitted, marked, of requests that are charged under
    /// [`Self::stretched`]. Both keep one state, so that what was admitted beyond the limits while there was room counts
    /// once there is none.
    ///
    /// # Errors
    ///
    /// Names `elastic`: refuses what a soft allowance of so much would be refused, and limits that count what they
    /// deny, which would forget what lies beyond them.
    pub fn stretching(mut self, percent: u32) -> Result<Self, LimitError> {
        if self
            .members
            .iter()
            .any(|member| member.denials != Denials::Forgotten)
        {
            let problem = "does not go with count_denied; remove one of the two";
            return Err(LimitError::new("elastic", problem));
        }
        self.stretch = percent;
        self.shares = Shares::default();
        self.stretched = OnceLock::new();
        if percent > 0 {
            let stretched = self.build_stretched();
            let stretched = stretched.map_err(|error| LimitError::new("elastic", error.problem))?;
            self.stretched = OnceLock::from(Arc::new(stretched));
        }
        Ok(self)
    }

    /// The limits where there is room, if they stretch.
    #[must_use]
    pub fn stretched(&self) -> Option<&Self> {
        let build = || Arc::new(self.build_stretched().unwrap_or_else(|_| self.clone()));
        (self.stretch > 0).then(|| &**self.stretched.get_or_init(build))
    }

    /// By how many percent the limits stretch where there is room.
    #[must_use]
    pub fn stretch(&self) -> u32 {
        self.stretch
    }

    /// Whether these are stretched limits.
    #[must_use]
    pub fn is_stretched(&self) -> bool {
        self.unstretched.is_some()
    }

    /// Makes these limits the successors of `old`: a key whose state was left under `old` keeps what it has
    /// spent when it is next charged under the new numbers.
    ///
    /// Limits are matched by algorithm and order: the second fixed window takes over from the second fixed window.
    #[must_use]
    pub fn succeeding(mut self, old: &Arc<Self>) -> Self {
        self.formerly = Some(Arc::new(old.truncated(Self::MAX_FORMER)));
        self.shares = Shares::default();
        self.stretched = OnceLock::new();
        self
    }

    /// What one node may admit by itself: every limit's share, built when it is first asked for.
    #[must_use]
    pub fn share(&self, share: Share) -> Arc<Self> {
        self.shares.get(share, || self.build_share(share))
    }

    /// The same limits with a wider allowance. They know the states of these, and the other way round.
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
            formerly: self.formerly.clone(),
            on_failure: self.on_failure,
            unstretched: Some(Arc::new(Self {
                stretched: OnceLock::new(),
                ..self.clone()
            })),
            ..Self::new(limits?)?
        })
    }

    fn build_share(&self, share: Share) -> Self {
        if let Some(unstretched) = &self.unstretched {
            let scaled = unstretched.build_share(share);
            return scaled.build_stretched().unwrap_or(scaled);
        }
        let limits = self.limits.iter().map(|limit| share.of(limit)).collect();
        // A share of sound limits is as many sound limits.
        let scaled = Self::new(limits).unwrap_or_else(|_| self.clone());
        let scaled = Self {
            name: self.name.clone(),
            shadow: self.shadow,
            stretch: self.stretch,
            ..scaled
        };
        match &self.formerly {
            Some(old) => scaled.succeeding(&old.share(share)),
            None => scaled,
        }
    }

    pub(super) fn former(&self, fingerprint: u32) -> Option<&Self> {
        let mut limits = Some(self);
        while let Some(candidate) = limits {
            if candidate.fingerprint == fingerprint {
                return Some(candidate);
            }
            limits = candidate.formerly.as_deref();
        }
        None
    }

    /// A copy that remembers at most `generations` former sets, itself included, and nothing that was built from it, which would
    /// remember all of them.
    fn truncated(&self, generations: usize) -> Self {
        let formerly = self.formerly.as_ref().filter(|_| generations > 1);
        Self {
            formerly: formerly.map(|old| Arc::new(old.truncated(generations - 1))),
            shares: Shares::default(),
            stretched: OnceLock::new(),
            ..self.clone()
        }
    }
}
