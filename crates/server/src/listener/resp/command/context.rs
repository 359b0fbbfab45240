//! The context in which a command runs, and the buffers that commands reuse.

use std::sync::Arc;

use tidegate_core::{Limits, Outcome, Scratch, Timestamp};
use tidegate_limiter::{BuildCache, ServerLimiter};

use super::{
    super::{limit_parameters::LimitParameters, session::RespSession},
    PendingReply,
};

/// The maximum number of parsed limits that each worker caches.
const CACHED_LIMITS: usize = 64;

/// Buffers and caches that commands reuse.
#[derive(Debug)]
pub(in crate::listener::resp) struct CommandBuffers {
    /// A cache of the parsed limits from commands. The cache is useful because applications use the
    /// same few limits repeatedly.
    pub(in crate::listener::resp) limits: BuildCache<LimitParameters, Arc<Limits>>,
    pub(in crate::listener::resp) outcomes: Vec<Outcome>,
    pub(in crate::listener::resp) key: Vec<u8>,
    pub(in crate::listener::resp) scratch: Scratch,
}

impl Default for CommandBuffers {
    fn default() -> Self {
        Self {
            limits: BuildCache::new(CACHED_LIMITS),
            outcomes: Vec::new(),
            key: Vec::new(),
            scratch: Scratch::default(),
        }
    }
}

/// Everything that a command needs to run.
#[derive(Debug)]
pub(in crate::listener::resp) struct Context<'c> {
    pub(in crate::listener::resp) limiter: &'c ServerLimiter,
    pub(in crate::listener::resp) session: &'c mut RespSession,
    pub(in crate::listener::resp) buffers: &'c mut CommandBuffers,
    /// The pending decisions of the current batch, for example decisions that need Redis.
    pub(in crate::listener::resp) pending: &'c mut Vec<PendingReply>,
    /// The time at which the batch was read. All commands of a batch use the same time.
    pub(in crate::listener::resp) now: Timestamp,
}
