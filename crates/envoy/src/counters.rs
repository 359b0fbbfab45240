//! Per-rule metrics. A rule is identified by its domain and descriptor path.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The maximum number of descriptor paths with their own counters. All further paths share the
/// counters of the path `other`. Without a maximum, clients could exhaust memory or flood a
/// dashboard, because a path may contain values from requests.
pub const MAX_PATHS: usize = 4_096;

/// The maximum length of a path with its own counters, in bytes. The path of a limit override
/// contains values from the request.
const MAX_PATH_BYTES: usize = 512;

/// The path of the shared counters.
pub(super) const OTHER: &str = "other";

/// The numbers of successful and of failed loads of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigLoads {
    /// The number of loads that made the new configuration active.
    pub succeeded: u64,
    /// The number of loads that were rejected.
    pub failed: u64,
}

/// A kind of counter. Every kind counts hits of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "each variant has the name of a counter of envoyproxy/ratelimit"
)]
pub enum HitCounterKind {
    TotalHits,
    WithinLimit,
    NearLimit,
    OverLimit,
    OverLimitWithLocalCache,
    ShadowMode,
    TotalNegativeHits,
}

impl HitCounterKind {
    /// All kinds of counters, each with the name of the equivalent counter in envoyproxy/ratelimit.
    pub const ALL: [(&'static str, Self); 7] = [
        ("total_hits", Self::TotalHits),
        ("within_limit", Self::WithinLimit),
        ("near_limit", Self::NearLimit),
        ("over_limit", Self::OverLimit),
        ("over_limit_with_local_cache", Self::OverLimitWithLocalCache),
        ("shadow_mode", Self::ShadowMode),
        ("total_negative_hits", Self::TotalNegativeHits),
    ];

    const fn index(self) -> usize {
        match self {
            Self::TotalHits => 0,
            Self::WithinLimit => 1,
            Self::NearLimit => 2,
            Self::OverLimit => 3,
            Self::OverLimitWithLocalCache => 4,
            Self::ShadowMode => 5,
            Self::TotalNegativeHits => 6,
        }
    }
}

/// The counters of one descriptor path.
#[derive(Debug, Default)]
pub(crate) struct DescriptorCounters([AtomicU64; HitCounterKind::ALL.len()]);

impl DescriptorCounters {
    pub(super) fn add(&self, counter: HitCounterKind, hits: u64) {
        if hits > 0 {
            self.0[counter.index()].fetch_add(hits, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self, counter: HitCounterKind) -> u64 {
        self.0[counter.index()].load(Ordering::Relaxed)
    }
}

/// The counters of all domains and descriptor paths. The counters keep their values across reloads.
#[derive(Debug, Default)]
pub(super) struct CounterRegistry(RwLock<BTreeMap<DomainAndPath, Arc<DescriptorCounters>>>);

pub(super) type DomainAndPath = (Arc<str>, Arc<str>);

impl CounterRegistry {
    /// Returns the counters of the descriptor path `path` in `domain`.
    pub(super) fn counters(&self, domain: &Arc<str>, path: &str) -> Arc<DescriptorCounters> {
        let path = if path.len() > MAX_PATH_BYTES {
            OTHER
        } else {
            path
        };
        let key = (Arc::clone(domain), Arc::from(path));
        self.known(&key).unwrap_or_else(|| {
            let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
            let key = if known.len() < MAX_PATHS || known.contains_key(&key) {
                key
            } else {
                (OTHER.into(), OTHER.into())
            };
            Arc::clone(known.entry(key).or_default())
        })
    }

    /// Returns the counters of `key`. If they do not exist, and the maximum number of paths is
    /// reached, returns the shared counters.
    fn known(&self, key: &DomainAndPath) -> Option<Arc<DescriptorCounters>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let others = || known.get(&(OTHER.into(), OTHER.into()));
        let is_full = known.len() >= MAX_PATHS;
        known
            .get(key)
            .or_else(|| is_full.then(others).flatten())
            .cloned()
    }

    /// Returns every domain and path with its counters, in sorted order. The lock is released
    /// before the caller reads the counters, so that decisions do not have to wait.
    pub(super) fn all(&self) -> Vec<(DomainAndPath, Arc<DescriptorCounters>)> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let entries = known.iter();
        entries
            .map(|(path, counters)| (path.clone(), Arc::clone(counters)))
            .collect()
    }
}

/// The number of descriptors in requests for each unknown domain. A typo in a domain name silently
/// disables all limits of the domain, and the metric reveals the typo.
#[derive(Debug, Default)]
pub(super) struct UnknownDomains(Mutex<BTreeMap<Box<str>, u64>>);

impl UnknownDomains {
    /// The maximum number of domains that are counted separately. Clients choose the domain names,
    /// so their number must be bounded.
    const MOST: usize = 256;

    pub(super) fn count(&self, domain: &str, descriptors: usize) {
        let mut known = self.lock();
        let descriptors = u64::try_from(descriptors).unwrap_or(u64::MAX);
        if let Some(count) = known.get_mut(domain) {
            *count = count.saturating_add(descriptors);
            return;
        }
        let name = if known.len() < Self::MOST {
            domain
        } else {
            OTHER
        };
        let count = known.entry(name.into()).or_default();
        *count = count.saturating_add(descriptors);
    }

    /// Returns every unknown domain and its count, in sorted order.
    pub(super) fn all(&self) -> BTreeMap<Box<str>, u64> {
        self.lock().clone()
    }

    pub(super) fn count_of(&self, domain: &str) -> u64 {
        self.lock().get(domain).copied().unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Box<str>, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_beyond_the_maximum_share_counters() {
        let registry = CounterRegistry::default();
        let domain: Arc<str> = "d".into();
        for number in 0..MAX_PATHS + 10 {
            registry
                .counters(&domain, &format!("user_{number}"))
                .add(HitCounterKind::TotalHits, 1);
        }
        let (mut paths, mut hits) = (0, 0);
        for ((_, path), counters) in registry.all() {
            paths += 1;
            hits += counters.read(HitCounterKind::TotalHits);
            assert_eq!(
                &*path == OTHER,
                counters.read(HitCounterKind::TotalHits) == 10,
                "{path}"
            );
        }
        assert_eq!((paths, hits), (MAX_PATHS + 1, MAX_PATHS as u64 + 10));
    }
}
