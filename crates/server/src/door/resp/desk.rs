//! The desk at which a worker decides: everything that commands need and that outlives none of them.
//!
//! There is one for each worker, not one for each connection: a worker serves one batch at a time, so its
//! buffers stay warm, and a connection that waits holds no memory but its own few fields.

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
use crate::{limiter::Limiter, metrics::Door};

/// A worker's memory for commands and answers.
#[derive(Debug, Default)]
pub(super) struct Desk {
    /// The answers to the batch at hand.
    pub(super) output: Vec<u8>,
    /// What another server is to decide before the batch is answered.
    waiting: Vec<Waiting>,
    parser: Parser,
    memory: Memory,
}

/// What commands use and leave for the next one.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) limits: LimitsCache,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) key: Vec<u8>,
    pub(super) scratch: Scratch,
}

/// What a command works with.
#[derive(Debug)]
pub(super) struct Context<'c> {
    pub(super) limiter: &'c Limiter,
    pub(super) session: &'c mut Session,
    pub(super) memory: &'c mut Memory,
    /// Where a command puts what it cannot decide at once.
    pub(super) waiting: &'c mut Vec<Waiting>,
    /// When the batch arrived: what was read together is decided at one instant.
    pub(super) now: Timestamp,
}

/// How far a batch was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// How many bytes are dealt with.
    pub(super) used: usize,
    /// Whether the rest may hold whole commands, left there because enough answers are waiting.
    pub(super) more: bool,
}

impl Progress {
    /// Nothing of `input` is to be read any more.
    fn all(input: &[u8]) -> Self {
        Self {
            used: input.len(),
            more: false,
        }
    }
}

impl Desk {
    /// Answers the commands that have arrived whole, until [`OUTPUT_BYTES`] are waiting to be written.
    pub(super) fn answer(
        &mut self,
        limiter: &Limiter,
        session: &mut Session,
        input: &[u8],
    ) -> Progress {
        // Were a command ever to panic, its connection ends, and no other may get what it left here.
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
                    limiter.metrics().count_bad_request(Door::Resp);
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

    /// What is still to be decided before the batch is answered, and the answers so far.
    pub(super) fn undecided(&mut self, limiter: &Arc<Limiter>) -> Option<Deciding> {
        (!self.waiting.is_empty()).then(|| {
            let waiting = std::mem::take(&mut self.waiting);
            let output = std::mem::take(&mut self.output);
            Deciding::new(Arc::clone(limiter), waiting, output)
        })
    }
}

/// Whether more commands may be answered before these answers are written.
fn has_room(output: &[u8], waiting: &[Waiting]) -> bool {
    output.len() < OUTPUT_BYTES && waiting.len() < MAX_WAITING
}

/// Runs one command and keeps quiet about it if the client wished so.
fn execute(mut context: Context<'_>, arguments: super::parse::Arguments<'_>, out: &mut Vec<u8>) {
    if arguments.len() == 0 {
        return;
    }
    let waited = context.waiting.len();
    let (start, before) = (out.len(), context.session.replies);
    command::run(&mut context, arguments, out);
    let after = &mut context.session.replies;
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
