//! The limits that came with descriptors lately: building one takes longer than deciding on it.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

use tidegate_core::{Algorithm, Limit, LimitError, Limits, Window};

use super::{LimitOverride, rules::RuleLimits};

/// How many are kept. A proxy's configuration has a handful; where tenants bring their own, these are still few numbers.
const KEPT: usize = 4_096;

/// Limits by what was asked for.
#[derive(Debug, Default)]
pub(super) struct Overrides(RwLock<HashMap<(LimitOverride, Denied), Arc<RuleLimits>>>);

impl Overrides {
    /// The limits of `asked`; `None` if its unit is unknown.
    pub(super) fn limits(&self, asked: LimitOverride, denied: Denied) -> Option<Arc<RuleLimits>> {
        let known = self
            .0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(asked, denied))
            .cloned();
        if known.is_some() {
            return known;
        }
        let built = Arc::new(fixed_window(asked, denied).ok()?);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert((asked, denied), Arc::clone(&built));
        Some(built)
    }
}

/// What a window does with what it denies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Denied {
    /// Counts it.
    InFull,
    /// Forgets it.
    Forgotten,
}

/// The limit of envoyproxy/ratelimit: so many in each unit since the epoch.
pub(super) fn fixed_window(
    LimitOverride {
        requests_per_unit,
        unit,
    }: LimitOverride,
    denied: Denied,
) -> Result<RuleLimits, LimitError> {
    // Without a length the window is refused by the limit itself, which says so best.
    let span = unit.span().unwrap_or_default();
    let limit = Limit::new(Algorithm::FixedWindow {
        limit: requests_per_unit.into(),
        window: Window::Epoch(span),
    })?;
    let limit = match denied {
        Denied::InFull => limit.counting_in_full()?,
        Denied::Forgotten => limit,
    };
    Ok(RuleLimits {
        limits: Arc::new(Limits::new(vec![limit])?),
        yielding: None,
        units: [unit].into(),
        window_seconds: span.as_secs_ceil(),
    })
}
