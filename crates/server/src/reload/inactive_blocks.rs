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
/// Fails if the blocks are in Redis and Redis cannot be queried. A Redis error is also logged.
pub async fn report_inactive_blocks(
    limiter: &ServerLimiter,
) -> Result<InactiveBlocks, UnknownBlocks> {
    if let Some(advice) = inactive_entry_blocks_advice(limiter.inactive_entry_blocks()) {
        tracing::warn!(target: LOG_TARGET, "{advice}");
    }
    let inactive = limiter.inactive_blocks().await.map_err(UnknownBlocks);
    match inactive.as_ref().map(InactiveBlocks::advice) {
        Ok(Some(advice)) => tracing::warn!(target: LOG_TARGET, "{advice}"),
        Ok(None) => {}
        Err(error) => tracing::info!(target: LOG_TARGET, "{error}"),
    }
    inactive
}

/// Describes `count` inactive blocks by entries, and explains what to do about them. Returns `None`
/// if `count` is 0.
pub fn inactive_entry_blocks_advice(count: usize) -> Option<String> {
    let blocks = match count {
        0 => return None,
        1 => "1 block by entries is".to_owned(),
        count => format!("{count} blocks by entries are"),
    };
    Some(format!(
        "{blocks} inactive, because the rule no longer exists, or because no rule uses an entry of the block; \
         list blocks with `tidegate blocks`, and lift them with `tidegate unblock --entry`, or restore the rule"
    ))
}
