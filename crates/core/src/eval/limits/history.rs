//! The units of measure ([`Terms`]) of a rule's states, under its current limits and its former
//! limits.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::Limits;
use crate::{
    algorithm::{Kernel, Terms},
    limit::bounds,
};

/// The [`Terms`] (the units of measure of the states) of all current and former limits of a rule,
/// by fingerprint. All limits of a rule share one history: its current limits, its former limits,
/// the limits of its plans and overrides, and one node's shares of these limits.
///
/// The history is read only if a state has to be converted. A full history drops its oldest terms.
/// If the terms of a state have been dropped, the store converts the state as if its limits were
/// unknown.
#[derive(Debug, Default)]
pub(super) struct TermsHistory(Mutex<VecDeque<FormerTerms>>);

#[derive(Clone, Debug)]
struct FormerTerms {
    fingerprint: u32,
    terms: Arc<[Terms]>,
}

impl TermsHistory {
    /// Adds the terms of `limits`.
    pub(super) fn add(&self, limits: &Limits) {
        let fingerprint = limits.fingerprint;
        let mut known = self.lock();
        if known.iter().any(|former| former.fingerprint == fingerprint) {
            return;
        }
        if known.len() >= bounds::MAX_FORMER_LIMITS {
            known.pop_front();
        }
        let terms = terms(limits);
        known.push_back(FormerTerms { fingerprint, terms });
    }

    /// Returns the terms of the limits with this `fingerprint`, if they are in the history.
    pub(super) fn terms(&self, fingerprint: u32) -> Option<Arc<[Terms]>> {
        let known = self.lock();
        let mut newest_first = known.iter().rev();
        let former = newest_first.find(|former| former.fingerprint == fingerprint)?;
        Some(Arc::clone(&former.terms))
    }

    /// Poisoning is ignored: no operation leaves the list in an inconsistent state, even if it
    /// panics.
    fn lock(&self) -> MutexGuard<'_, VecDeque<FormerTerms>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the terms of the states of `limits`, one for each limit group.
pub(super) fn terms(limits: &Limits) -> Arc<[Terms]> {
    let kernels = limits.groups.iter().map(|group| &group.kernel);
    kernels.map(Kernel::terms).collect()
}
