//! `TIDEGATE.RESET`, `DEL` and `UNLINK`: reset the counters of limits that are sent with the
//! request.

use futures_util::future::join_all;
use tidegate_limiter::Limiter;

use super::{
    super::{
        parse::Arguments,
        pending::{PendingCommand, PendingReply},
        reply::Reply,
        worker::Context,
    },
    refuse,
};

/// The maximum number of keys per command. With Redis they are all reset concurrently.
const MAX_KEYS: usize = 64;

/// Runs `TIDEGATE.RESET key [key …]` and replies with the number of keys that had a counter. It
/// cannot reset keys of rules.
pub(super) fn reset(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let keys = arguments.skip(1);
    if keys.len() > MAX_KEYS {
        let count = keys.len();
        let error = format_args!("ERR {count} keys are over the maximum of {MAX_KEYS}");
        return refuse(context, reply, error);
    }
    let database = context.session.database;
    let mut bytes: Vec<Box<[u8]>> = Vec::with_capacity(keys.len());
    for key in keys.iter() {
        match Limiter::throttle_key_in(database, key, &mut context.buffers.key) {
            Ok(key) => bytes.push(key.into()),
            Err(error) => return refuse(context, reply, format_args!("ERR {error}")),
        }
    }
    let mut count = 0;
    for key in &bytes {
        let Some(was_there) = context.limiter.reset_now(key) else {
            let later = PendingCommand::Reset(PendingReset { keys: bytes });
            context.pending.push(PendingReply::new(later, reply));
            return;
        };
        count += u64::from(was_there);
    }
    reply.count(count);
}

/// Keys that have to be reset in Redis.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingReset {
    keys: Vec<Box<[u8]>>,
}

impl PendingReset {
    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        let keys = self.keys.iter().map(|key| key.len());
        size_of_val(self.keys.as_slice()) + keys.sum::<usize>()
    }

    pub(in crate::listener::resp) async fn answer(self, limiter: &Limiter, reply: &mut Reply<'_>) {
        let resets = join_all(self.keys.iter().map(|key| limiter.reset(key))).await;
        let mut count = 0;
        for reset in resets {
            match reset {
                Ok(was_there) => count += u64::from(was_there),
                Err(error) => {
                    let error = error.to_string().replace(['\r', '\n'], " ");
                    reply.error(format_args!("ERR {error}"));
                    return;
                }
            }
        }
        reply.count(count);
    }
}
