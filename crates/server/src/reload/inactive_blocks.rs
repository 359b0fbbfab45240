//! Reports blocks that the active rules do not enforce. Renaming a rule makes its blocks inactive,
//! which the operator may not expect.

use tidegate_limiter::{ServerLimiter, blocks::InactiveBlocks};
use tidegate_redis::StoreError;

use super::LOG_TARGET;

/// The blocks could not be read, so it is unknown whether any blocks are inactive.
#[derive(Debug, thiserror::Error)]
#[error("cannot check whether each block belongs to an active rule: {0}")]
pub struct UnknownBlocks(StoreError);

/// Finds the blocks that the active rules do not enforce, and logs them.
///
/// # Errors
///
/// Fails if the blocks are in Redis and Redis cannot be queried. This error is also logged.
pub async fn report_inactive_blocks(
    limiter: &ServerLimiter,
) -> Result<InactiveBlocks, UnknownBlocks> {
    let inactive = limiter.inactive_blocks().await.map_err(UnknownBlocks);
    match inactive.as_ref().map(InactiveBlocks::advice) {
        Ok(Some(advice)) => tracing::warn!(target: LOG_TARGET, "{advice}"),
        Ok(None) => {}
        Err(error) => tracing::info!(target: LOG_TARGET, "{error}"),
    }
    inactive
}
