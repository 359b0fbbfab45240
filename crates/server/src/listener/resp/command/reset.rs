//! `TIDEGATE.RESET`, `DEL` and `UNLINK` reset the counters of limits that clients send with their
//! requests.

use futures_util::future::join_all;
use tidegate_limiter::{ServerLimiter, overrides::StateMoved};
use tidegate_redis::StoreError;

use super::{
    super::{parse::Arguments, reply::Reply},
    Context, PendingCommand, PendingReply, refuse,
};

/// The maximum number of keys per command. With Redis, all keys are reset concurrently.
const MAX_KEYS: usize = 64;

/// Runs `TIDEGATE.RESET key [key …]` and replies with the number of keys that had a counter. The
/// command cannot reset keys of rules.
pub(super) fn reset(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let keys = arguments.skip(1);
    if keys.len() > MAX_KEYS {
        let count = keys.len();
        let error = format_args!("ERR {count} keys exceed the maximum of {MAX_KEYS}");
        return refuse(context, reply, error);
    }
    if context.limiter.has_moved() {
        // The new process would keep the counters.
        let error = format_args!("ERR {StateMoved}");
        return refuse(context, reply, error);
    }
    let database = context.session.database;
    let mut bytes: Vec<Box<[u8]>> = Vec::with_capacity(keys.len());
    for key in keys.iter() {
        match tidegate_limiter::throttle_key_in(database, key, &mut context.buffers.key) {
            Ok(key) => bytes.push(key.into()),
            Err(error) => return refuse(context, reply, format_args!("ERR {error}")),
        }
    }
    let mut count = 0;
    for key in &bytes {
        let Some(reset) = context.limiter.reset(key).ready() else {
            let later = PendingCommand::Reset(PendingReset { keys: bytes });
            context.pending.push(PendingReply::new(later, reply));
            return;
        };
        match reset {
            Ok(was_there) => count += u64::from(was_there),
            Err(error) => return fail(&error, reply),
        }
    }
    reply.count(count);
}

/// A reset of keys that are stored in Redis.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingReset {
    keys: Vec<Box<[u8]>>,
}

impl PendingReset {
    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        let keys = self.keys.iter().map(|key| key.len());
        size_of_val(self.keys.as_slice()) + keys.sum::<usize>()
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &ServerLimiter,
        reply: &mut Reply<'_>,
    ) {
        let resets = self.keys.iter().map(|key| limiter.reset(key).into_future());
        let mut count = 0;
        for reset in join_all(resets).await {
            match reset {
                Ok(was_there) => count += u64::from(was_there),
                Err(error) => return fail(&error, reply),
            }
        }
        reply.count(count);
    }
}

/// Writes an error reply, because Redis did not confirm the reset.
fn fail(error: &StoreError, reply: &mut Reply<'_>) {
    let error = error.to_string().replace(['\r', '\n'], " ");
    reply.error(format_args!("ERR {error}"));
}
