//! `CommandExecutor`: a worker's buffers, and the loop that handles commands.
//!
//! Each worker has one `CommandExecutor`, which all its connections share. A worker handles one
//! batch at a time, so these buffers stay in the CPU cache. A connection needs no buffers of its
//! own between batches, and therefore little memory.

use std::sync::Arc;

use tidegate_limiter::{ServerLimiter, metrics::ListenerKind};

use super::{
    bounds::{MAX_WAITING, OUTPUT_BYTES},
    command::{self, CommandBuffers, Context, PendingReply},
    parse::Parser,
    pending::PendingBatch,
    reply::Reply,
    session::{CloseAfterReply, ReplyMode, RespSession},
};

/// A worker's buffers for commands and replies.
#[derive(Debug, Default)]
pub(super) struct CommandExecutor {
    /// The replies to the current batch.
    pub(super) output: Vec<u8>,
    /// Pending decisions, for example decisions that Redis has to make. The replies to the batch
    /// are complete when all of these decisions are made.
    pending: Vec<PendingReply>,
    parser: Parser,
    buffers: CommandBuffers,
}

/// How far a batch has been handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchProgress {
    /// The number of input bytes that have been consumed.
    pub(super) used: usize,
    /// Whether the remaining input may contain complete commands, because the batch stopped at
    /// [`OUTPUT_BYTES`] or at [`MAX_WAITING`].
    pub(super) more: bool,
}

impl BatchProgress {
    /// Marks all of `input` as consumed.
    fn all(input: &[u8]) -> Self {
        Self {
            used: input.len(),
            more: false,
        }
    }
}

impl CommandExecutor {
    /// Runs the complete commands in `input` and writes their replies to `output`, until there are
    /// [`OUTPUT_BYTES`] of replies or [`MAX_WAITING`] pending decisions.
    pub(super) fn answer(
        &mut self,
        limiter: &ServerLimiter,
        session: &mut RespSession,
        input: &[u8],
    ) -> BatchProgress {
        // The buffers are cleared first, because after a panic, they may still contain replies for
        // another connection.
        self.output.clear();
        self.pending.clear();
        let now = limiter.now();
        let mut used = 0;
        while has_room(&self.output, &self.pending) {
            let rest = &input[used..];
            let parsed = match self.parser.parse(rest) {
                Ok(0) => return BatchProgress { used, more: false },
                Ok(parsed) => parsed,
                Err(error) => {
                    let mut reply = Reply {
                        out: &mut self.output,
                        protocol: session.protocol,
                    };
                    reply.error(format_args!("ERR Protocol error: {error}"));
                    limiter.metrics().count_bad_request(ListenerKind::Resp);
                    session.close = CloseAfterReply::Broken;
                    return BatchProgress::all(input);
                }
            };
            let commands = (0..parsed).filter_map(|index| self.parser.command(index, rest));
            if parsed > 1 {
                let keys = commands
                    .clone()
                    .filter_map(|(arguments, _)| command::key(arguments));
                limiter.prefetch(keys);
                let pairs = commands.clone();
                let pairs = pairs.flat_map(|(arguments, _)| command::pairs(arguments));
                limiter.prefetch_overrides(pairs);
            }
            let start = used;
            for (arguments, end) in commands {
                let context = Context {
                    limiter,
                    session,
                    buffers: &mut self.buffers,
                    pending: &mut self.pending,
                    now,
                };
                execute(context, arguments, &mut self.output);
                used = start + end;
                if session.close != CloseAfterReply::No {
                    return BatchProgress::all(input);
                }
                if !has_room(&self.output, &self.pending) {
                    break;
                }
            }
        }
        BatchProgress { used, more: true }
    }

    /// Takes the pending decisions, together with the replies that have been written so far.
    /// Returns `None` if no decision is pending.
    pub(super) fn take_pending(&mut self, limiter: &Arc<ServerLimiter>) -> Option<PendingBatch> {
        (!self.pending.is_empty()).then(|| {
            let pending = std::mem::take(&mut self.pending);
            let output = std::mem::take(&mut self.output);
            PendingBatch::new(Arc::clone(limiter), pending, output)
        })
    }
}

/// Returns whether more commands may be run before the pending replies are sent.
fn has_room(output: &[u8], pending: &[PendingReply]) -> bool {
    output.len() < OUTPUT_BYTES && pending.len() < MAX_WAITING
}

/// Runs one command, and discards the reply if the client has turned replies off.
fn execute(mut context: Context<'_>, arguments: super::parse::Arguments<'_>, out: &mut Vec<u8>) {
    if arguments.len() == 0 {
        return;
    }
    let earlier = context.pending.len();
    let (start, before) = (out.len(), context.session.replies);
    command::run(&mut context, arguments, out);
    let after = &mut context.session.replies;
    // The command itself may be `CLIENT REPLY`, so the mode before the command and the mode after
    // the command determine whether the reply is discarded.
    let muted = match (before, *after) {
        (_, ReplyMode::Off) => true,
        (ReplyMode::SkipNext, _) => {
            *after = ReplyMode::On;
            true
        }
        (_, ReplyMode::SkipNext) => true,
        (ReplyMode::On | ReplyMode::Off, ReplyMode::On) => false,
    };
    if muted {
        out.truncate(start);
        let mute = |pending: &mut PendingReply| pending.offset = None;
        context.pending[earlier..].iter_mut().for_each(mute);
    }
}
