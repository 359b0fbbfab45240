//! A worker's buffers and the loop that answers commands (`Desk`).
//!
//! There is one `Desk` per worker, not per connection. A worker handles one batch at a time, so the
//! buffers stay in the CPU cache, and a waiting connection holds only its own few fields.

use std::sync::Arc;

use tidegate_core::{Outcome, Scratch, Timestamp};

use super::{
    bounds::{MAX_WAITING, OUTPUT_BYTES},
    command,
    limits_cache::LimitsCache,
    parse::Parser,
    reply::Reply,
    session::{Ending, Replies, Session},
    waiting::{Deciding, Waiting},
};
use crate::{limiter::Limiter, metrics::ListenerKind};

/// A worker's buffers for commands and replies.
#[derive(Debug, Default)]
pub(super) struct Desk {
    /// The replies to the current batch.
    pub(super) output: Vec<u8>,
    /// Decisions that Redis has to make before the batch is answered.
    waiting: Vec<Waiting>,
    parser: Parser,
    memory: Memory,
}

/// Buffers and caches that commands reuse.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) limits: LimitsCache,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) key: Vec<u8>,
    pub(super) scratch: Scratch,
}

/// Everything that a command needs to run.
#[derive(Debug)]
pub(super) struct Context<'c> {
    pub(super) limiter: &'c Limiter,
    pub(super) session: &'c mut Session,
    pub(super) memory: &'c mut Memory,
    /// Where a command puts a decision that needs Redis.
    pub(super) waiting: &'c mut Vec<Waiting>,
    /// The time at which the batch was read. All commands of a batch use the same time.
    pub(super) now: Timestamp,
}

/// How much of a batch has been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// The number of input bytes that have been consumed.
    pub(super) used: usize,
    /// Whether the rest may contain complete commands, which were left because the output limit was
    /// reached.
    pub(super) more: bool,
}

impl Progress {
    /// Marks all of `input` as consumed.
    fn all(input: &[u8]) -> Self {
        Self {
            used: input.len(),
            more: false,
        }
    }
}

impl Desk {
    /// Answers the complete commands in `input`, until [`OUTPUT_BYTES`] of replies are pending.
    pub(super) fn answer(
        &mut self,
        limiter: &Limiter,
        session: &mut Session,
        input: &[u8],
    ) -> Progress {
        // After a panic in a command, the next connection must not get the replies that it left
        // here.
        self.output.clear();
        self.waiting.clear();
        let now = limiter.now();
        let mut used = 0;
        while has_room(&self.output, &self.waiting) {
            let rest = &input[used..];
            let parsed = match self.parser.parse(rest) {
                Ok(0) => return Progress { used, more: false },
                Ok(parsed) => parsed,
                Err(error) => {
                    let mut reply = Reply {
                        out: &mut self.output,
                        protocol: session.protocol,
                    };
                    reply.error(format_args!("ERR Protocol error: {error}"));
                    limiter.metrics().count_bad_request(ListenerKind::Resp);
                    session.ending = Ending::Broken;
                    return Progress::all(input);
                }
            };
            let commands = (0..parsed).filter_map(|index| self.parser.command(index, rest));
            if parsed > 1 {
                let keys = commands
                    .clone()
                    .filter_map(|(arguments, _)| command::key(arguments));
                limiter.prefetch(keys);
            }
            let start = used;
            for (arguments, end) in commands {
                let context = Context {
                    limiter,
                    session,
                    memory: &mut self.memory,
                    waiting: &mut self.waiting,
                    now,
                };
                execute(context, arguments, &mut self.output);
                used = start + end;
                if session.ending != Ending::No {
                    return Progress::all(input);
                }
                if !has_room(&self.output, &self.waiting) {
                    break;
                }
            }
        }
        Progress { used, more: true }
    }

    /// Takes the decisions that Redis has to make and the replies so far, if there are any such
    /// decisions.
    pub(super) fn undecided(&mut self, limiter: &Arc<Limiter>) -> Option<Deciding> {
        (!self.waiting.is_empty()).then(|| {
            let waiting = std::mem::take(&mut self.waiting);
            let output = std::mem::take(&mut self.output);
            Deciding::new(Arc::clone(limiter), waiting, output)
        })
    }
}

/// Returns whether more commands may be answered before the pending replies are written.
fn has_room(output: &[u8], waiting: &[Waiting]) -> bool {
    output.len() < OUTPUT_BYTES && waiting.len() < MAX_WAITING
}

/// Runs one command, and discards its reply if the client has turned replies off.
fn execute(mut context: Context<'_>, arguments: super::parse::Arguments<'_>, out: &mut Vec<u8>) {
    if arguments.len() == 0 {
        return;
    }
    let waited = context.waiting.len();
    let (start, before) = (out.len(), context.session.replies);
    command::run(&mut context, arguments, out);
    let after = &mut context.session.replies;
    // The command itself may be a `CLIENT REPLY`, so the modes before and after it both count.
    let muted = match (before, *after) {
        (_, Replies::Off) => true,
        (Replies::SkipNext, _) => {
            *after = Replies::On;
            true
        }
        (_, Replies::SkipNext) => true,
        (Replies::On | Replies::Off, Replies::On) => false,
    };
    if muted {
        out.truncate(start);
        let mute = |waiting: &mut Waiting| waiting.place = None;
        context.waiting[waited..].iter_mut().for_each(mute);
    }
}
