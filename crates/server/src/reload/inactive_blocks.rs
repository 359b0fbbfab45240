//! Reports blocks that the active rules do not enforce, because an operator who renames a rule does
//! not expect that its blocks are lifted.

use tidegate_limiter::{Limiter, blocks::InactiveBlocks};
use tidegate_redis::StoreError;

use super::LOG_TARGET;

/// The blocks could not be read, so some may be inactive.
#[derive(Debug, thiserror::Error)]
#[error("cannot tell whether each block belongs to an active rule: {0}")]
pub struct UnknownBlocks(StoreError);

/// Finds the blocks that the active rules do not enforce, and logs them.
///
/// # Errors
///
/// Fails if the blocks are in Redis and Redis cannot be queried. That is logged too.
pub async fn report_inactive_blocks(limiter: &Limiter) -> Result<InactiveBlocks, UnknownBlocks> {
    let found = limiter.inactive_blocks().await.map_err(UnknownBlocks);
    match found.as_ref().map(InactiveBlocks::advice) {
        Ok(Some(advice)) => tracing::warn!(target: LOG_TARGET, "{advice}"),
        Ok(None) => {}
        Err(error) => tracing::info!(target: LOG_TARGET, "{error}"),
    }
    found
}
