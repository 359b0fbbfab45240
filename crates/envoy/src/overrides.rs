//! A cache of the limits that are built from limit overrides in descriptors. Building a limit takes
//! longer than a decision.

use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use tidegate_core::{Algorithm, Limit, LimitError, Limits, Window};
use tidegate_limiter::BuildCache;

use super::{
    LimitOverride,
    rules::{DeniedHits, RuleLimits},
};

/// The maximum number of cached limits. A typical Envoy configuration has only a few overrides.
/// Even overrides per tenant have few distinct values.
const CACHED_LIMITS: usize = 4_096;

/// A cache of limits. A cache key consists of the override and the setting for counting denied
/// hits.
#[derive(Debug)]
pub(super) struct OverrideCache(RwLock<BuildCache<(LimitOverride, DeniedHits), Arc<RuleLimits>>>);

impl Default for OverrideCache {
    fn default() -> Self {
        Self(RwLock::new(BuildCache::new(CACHED_LIMITS)))
    }
}

impl OverrideCache {
    /// Returns the limits for `limit_override`; `None` if its unit is unknown.
    pub(super) fn limits(
        &self,
        limit_override: LimitOverride,
        denied: DeniedHits,
    ) -> Option<Arc<RuleLimits>> {
        let key = (limit_override, denied);
        let cache = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(limits) = cache.get(&key) {
            return Some(Arc::clone(limits));
        }
        drop(cache);
        let built = Arc::new(fixed_window(limit_override, denied).ok()?);
        let mut cache = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(cache.insert(key, built)))
    }
}

/// Builds a limit as in envoyproxy/ratelimit: a number of hits in each fixed window, with windows
/// aligned to the Unix epoch.
pub(super) fn fixed_window(
    LimitOverride {
        requests_per_unit,
        unit,
    }: LimitOverride,
    denied: DeniedHits,
) -> Result<RuleLimits, LimitError> {
    // An unknown unit results in a window of length zero, which `Limit::new` rejects with a helpful
    // message.
    let span = unit.span().unwrap_or_default();
    let limit = Limit::new(Algorithm::FixedWindow {
        limit: requests_per_unit.into(),
        window: Window::Epoch(span),
    })?;
    let limit = match denied {
        DeniedHits::InFull => limit.counting_in_full()?,
        DeniedHits::NotCounted => limit,
    };
    Ok(RuleLimits {
        limits: Arc::new(Limits::new(vec![limit])?),
        shadow_limits: None,
        units: [unit].into(),
        window_seconds: span.as_secs_ceil(),
        variants: OnceLock::new(),
    })
}
