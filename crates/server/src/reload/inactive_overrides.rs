//! Reports overrides that do not apply under the active rules. Renaming a rule makes its overrides
//! inactive, which the operator may not expect.

use std::sync::Arc;

use tidegate_limiter::{ServerLimiter, overrides::InactiveOverrides};

use super::LOG_TARGET;

/// Finds the overrides that do not apply under the active rules, and logs them. The search runs on
/// another thread, because it visits all overrides.
pub async fn report_inactive_overrides(limiter: &Arc<ServerLimiter>) -> InactiveOverrides {
    let limiter = Arc::clone(limiter);
    let inactive = tokio::task::spawn_blocking(move || limiter.inactive_overrides()).await;
    // The task fails only if the server is shutting down.
    let inactive = inactive.unwrap_or_default();
    if let Some(advice) = inactive.advice() {
        tracing::warn!(target: LOG_TARGET, "{advice}");
    }
    inactive
}
