//! The command table: looks up and runs commands.

mod check;
mod client;
mod connection;
mod context;
mod describe;
mod hello;
mod refusal;
mod reserve;
mod reset;
mod server;
mod throttle;
mod top;
mod transaction;

use std::{fmt, sync::Arc};

use tidegate::rate_limiter::CancelSignal;
use tidegate_limiter::{MAX_THROTTLE_KEY_BYTES, metrics::ListenerKind};

pub(super) use self::context::{CommandBuffers, Context};

use self::{
    check::PendingCheck, reserve::ReservationCommand, reset::PendingReset,
    throttle::PendingThrottle, top::PendingTop,
};
use super::{
    parse::Arguments,
    reply::{Reply, RespVersion},
};

/// A command whose reply depends on Redis, on another thread or on a concurrency slot.
#[derive(Debug)]
pub(super) enum PendingCommand {
    Check(PendingCheck),
    Reservation(ReservationCommand),
    Reset(PendingReset),
    Throttle(PendingThrottle),
    Top(PendingTop),
}

/// A pending decision, and the position of its reply.
#[derive(Debug)]
pub(super) struct PendingReply {
    pub(super) command: PendingCommand,
    pub(super) protocol: RespVersion,
    /// The byte offset of the reply in the batch's output; `None` if the client has turned replies
    /// off (`CLIENT REPLY`).
    pub(super) offset: Option<usize>,
}

impl PendingCommand {
    /// Returns the signal that cancels the command's wait for a concurrency slot. A check has no
    /// cancel signal, because a cancelled check has nothing to release.
    pub(super) fn signal(&self) -> Option<&Arc<CancelSignal>> {
        match self {
            Self::Reservation(reservation) => reservation.signal(),
            _ => None,
        }
    }

    /// Returns whether the command can wait for a concurrency slot.
    pub(super) fn can_wait(&self) -> bool {
        match self {
            Self::Check(check) => check.can_wait(),
            Self::Reservation(reservation) => reservation.can_wait(),
            Self::Reset(_) | Self::Throttle(_) | Self::Top(_) => false,
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Check(check) => check.heap_bytes(),
            Self::Reservation(reservation) => reservation.heap_bytes(),
            Self::Reset(reset) => reset.heap_bytes(),
            Self::Throttle(throttle) => throttle.heap_bytes(),
            Self::Top(top) => top.heap_bytes(),
        }
    }
}

impl PendingReply {
    /// Creates a pending decision. The reply will be inserted at the current end of `reply`.
    pub(super) fn new(command: PendingCommand, reply: &Reply<'_>) -> Self {
        Self {
            command,
            protocol: reply.protocol,
            offset: Some(reply.out.len()),
        }
    }
}

/// A supported command.
#[derive(Debug)]
struct Command {
    /// The name in lower case.
    name: &'static str,
    arity: Arity,
    flags: &'static [&'static str],
    keyed: bool,
    group: &'static str,
    summary: &'static str,
    run: fn(&mut Context<'_>, Arguments<'_>, &mut Reply<'_>),
}

impl Command {
    /// Returns whether this is the command `name`, ignoring case.
    fn has_name(&self, name: &[u8]) -> bool {
        // `eq_ignore_ascii_case` would also convert `self.name` to lower case.
        let is_equal = |(byte, lower): (&u8, u8)| byte.to_ascii_lowercase() == lower;
        name.len() == self.name.len() && name.iter().zip(self.name.bytes()).all(is_equal)
    }
}

/// The number of arguments that a command takes, including its name.
#[derive(Clone, Copy, Debug)]
enum Arity {
    Exactly(usize),
    AtLeast(usize),
    Between(usize, usize),
}

impl Arity {
    fn admits(self, count: usize) -> bool {
        match self {
            Self::Exactly(exact) => count == exact,
            Self::AtLeast(least) => count >= least,
            Self::Between(least, most) => (least..=most).contains(&count),
        }
    }

    /// Returns the arity as `COMMAND` reports it, where a negative number means "at least".
    fn number(self) -> i64 {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        match self {
            Self::Exactly(exact) => number(exact),
            Self::AtLeast(least) | Self::Between(least, _) => -number(least),
        }
    }
}

const TRANSACTION: &[&str] = &["noscript", "loading", "stale", "fast"];
const CONNECTION: &[&str] = &["noscript", "loading", "stale", "fast", "no_auth"];

/// All commands. The commands on the hot path come first.
static COMMANDS: [Command; 26] = [
    Command {
        name: "cl.throttle",
        arity: Arity::Between(5, 6),
        flags: &["write", "fast"],
        keyed: true,
        group: "module",
        summary: "Checks a GCRA limit given in the command, as redis-cell does",
        run: throttle::cl_throttle,
    },
    Command {
        name: "throttle",
        arity: Arity::Between(5, 6),
        flags: &["write", "fast"],
        keyed: true,
        group: "module",
        summary: "Checks a token bucket given in the command, as throttlecrab does",
        run: throttle::throttle,
    },
    Command {
        name: "tidegate.check",
        arity: Arity::AtLeast(3),
        flags: &["write", "fast"],
        keyed: false,
        group: "module",
        summary: "Checks a request against the rules",
        run: check::check,
    },
    Command {
        name: "tidegate.reserve",
        arity: Arity::AtLeast(3),
        flags: &["write", "fast"],
        keyed: false,
        group: "module",
        summary: "Checks a request against the rules, and reserves its cost",
        run: reserve::reserve,
    },
    Command {
        name: "tidegate.settle",
        arity: Arity::Exactly(3),
        flags: &["write", "fast"],
        keyed: false,
        group: "module",
        summary: "Settles a reservation at its final cost",
        run: reserve::settle,
    },
    Command {
        name: "tidegate.renew",
        arity: Arity::Exactly(3),
        flags: &["write", "fast"],
        keyed: false,
        group: "module",
        summary: "Renews a reservation, so that it expires later",
        run: reserve::renew,
    },
    Command {
        name: "tidegate.reset",
        arity: Arity::AtLeast(2),
        flags: &["write"],
        keyed: true,
        group: "module",
        summary: "Resets the counters of keys for limits given in commands",
        run: reset::reset,
    },
    Command {
        name: "tidegate.top",
        arity: Arity::Between(1, 8),
        flags: &["admin", "readonly"],
        keyed: false,
        group: "module",
        summary: "Lists the keys with the most requests, denials or cost",
        run: top::top,
    },
    Command {
        name: "del",
        arity: Arity::AtLeast(2),
        flags: &["write"],
        keyed: true,
        group: "generic",
        summary: "Resets counters in the same way as TIDEGATE.RESET",
        run: reset::reset,
    },
    Command {
        name: "unlink",
        arity: Arity::AtLeast(2),
        flags: &["write"],
        keyed: true,
        group: "generic",
        summary: "Resets counters in the same way as TIDEGATE.RESET",
        run: reset::reset,
    },
    Command {
        name: "ping",
        arity: Arity::Between(1, 2),
        flags: &["fast"],
        keyed: false,
        group: "connection",
        summary: "Returns PONG, or the message",
        run: connection::ping,
    },
    Command {
        name: "echo",
        arity: Arity::Exactly(2),
        flags: &["loading", "stale", "fast"],
        keyed: false,
        group: "connection",
        summary: "Returns the message",
        run: connection::echo,
    },
    Command {
        name: "hello",
        arity: Arity::AtLeast(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Negotiates the protocol version",
        run: hello::hello,
    },
    Command {
        name: "auth",
        arity: Arity::AtLeast(2),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Authenticates the connection",
        run: hello::auth,
    },
    Command {
        name: "client",
        arity: Arity::AtLeast(2),
        flags: &["noscript", "loading", "stale"],
        keyed: false,
        group: "connection",
        summary: "Names, describes and configures the connection",
        run: client::client,
    },
    Command {
        name: "select",
        arity: Arity::Exactly(2),
        flags: &["loading", "stale", "fast"],
        keyed: false,
        group: "connection",
        summary: "Selects the database for keys of limits given in commands",
        run: connection::select,
    },
    Command {
        name: "quit",
        arity: Arity::AtLeast(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Closes the connection",
        run: connection::quit,
    },
    Command {
        name: "reset",
        arity: Arity::Exactly(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Resets the connection",
        run: connection::reset,
    },
    Command {
        name: "multi",
        arity: Arity::Exactly(1),
        flags: TRANSACTION,
        keyed: false,
        group: "transactions",
        summary: "Queues the following commands until EXEC",
        run: transaction::multi,
    },
    Command {
        name: "exec",
        arity: Arity::Exactly(1),
        flags: TRANSACTION,
        keyed: false,
        group: "transactions",
        summary: "Runs the commands queued since MULTI",
        run: transaction::exec,
    },
    Command {
        name: "discard",
        arity: Arity::Exactly(1),
        flags: TRANSACTION,
        keyed: false,
        group: "transactions",
        summary: "Discards the commands queued since MULTI",
        run: transaction::discard,
    },
    Command {
        name: "readonly",
        arity: Arity::Exactly(1),
        flags: &["loading", "stale", "fast"],
        keyed: false,
        group: "cluster",
        summary: "Returns OK",
        run: connection::readonly,
    },
    Command {
        name: "command",
        arity: Arity::AtLeast(1),
        flags: &["loading", "stale"],
        keyed: false,
        group: "server",
        summary: "Describes the commands",
        run: describe::command,
    },
    Command {
        name: "info",
        arity: Arity::AtLeast(1),
        flags: &["loading", "stale"],
        keyed: false,
        group: "server",
        summary: "Describes the server",
        run: server::info,
    },
    Command {
        name: "config",
        arity: Arity::AtLeast(2),
        flags: &["admin", "noscript", "loading", "stale"],
        keyed: false,
        group: "server",
        summary: "Returns that there is nothing to configure",
        run: server::config,
    },
    Command {
        name: "dbsize",
        arity: Arity::Exactly(1),
        flags: &["readonly", "fast"],
        keyed: false,
        group: "server",
        summary: "Counts the keys",
        run: server::dbsize,
    },
];

/// Looks up a command by name, ignoring case.
fn find(name: &[u8]) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.has_name(name))
}

/// Returns the key of a command so that the store can prefetch it. The result is only a hint,
/// because the command may still be rejected. In addition, the store has a few keys in an escaped
/// form, which this function does not return.
pub(super) fn key<'a>(arguments: Arguments<'a>) -> Option<&'a [u8]> {
    let name = arguments.get(0)?;
    let mut keyed = COMMANDS.iter().filter(|command| command.keyed);
    keyed.find(|command| command.has_name(name))?;
    let key = arguments.get(1)?;
    (key.len() <= MAX_THROTTLE_KEY_BYTES).then_some(key)
}

/// Returns the neighbouring arguments of a request for the rules, which include the names and the
/// values of its entries, so that the limiter can prefetch the overrides. The result is only a
/// hint, as in [`key`].
pub(super) fn pairs<'a>(
    arguments: Arguments<'a>,
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
    let name = arguments.get(0).unwrap_or_default();
    let is_request = ["tidegate.check", "tidegate.reserve"]
        .iter()
        .any(|request| name.eq_ignore_ascii_case(request.as_bytes()));
    let last = if is_request {
        arguments.len().saturating_sub(1)
    } else {
        0
    };
    (1..last).filter_map(move |at| Some((arguments.get(at)?, arguments.get(at + 1)?)))
}

/// Runs the command whose name is the first argument. If a transaction is open, queues the command
/// instead.
pub(super) fn run(context: &mut Context<'_>, arguments: Arguments<'_>, out: &mut Vec<u8>) {
    let mut reply = Reply {
        out,
        protocol: context.session.protocol,
    };
    let name = arguments.get(0).unwrap_or_default();
    let Some(command) = find(name) else {
        spoil(context);
        return unknown(context, arguments, &mut reply);
    };
    if !command.arity.admits(arguments.len()) {
        spoil(context);
        return match command.name {
            "cl.throttle" => throttle::usage(context, &mut reply),
            name => wrong_number(context, name, &mut reply),
        };
    }
    if !context.session.is_authenticated() && !command.flags.contains(&"no_auth") {
        return reply.error(format_args!("NOAUTH Authentication required."));
    }
    match &mut context.session.transaction {
        Some(open) if !transaction::is_immediate(command) => {
            transaction::queue(open, command, arguments, &mut reply);
        }
        _ => (command.run)(context, arguments, &mut reply),
    }
}

/// If a transaction is open, marks it as failed, because one of its commands cannot run.
fn spoil(context: &mut Context<'_>) {
    if let Some(open) = &mut context.session.transaction {
        open.spoil();
    }
}

/// Writes an error, and counts a bad request.
fn refuse(context: &mut Context<'_>, reply: &mut Reply<'_>, error: fmt::Arguments<'_>) {
    context
        .limiter
        .metrics()
        .count_bad_request(ListenerKind::Resp);
    reply.error(error);
}

fn wrong_number(context: &mut Context<'_>, name: &str, reply: &mut Reply<'_>) {
    let error = format_args!("ERR wrong number of arguments for '{name}' command");
    refuse(context, reply, error);
}

fn unknown_subcommand(subcommand: &[u8], command: &str, reply: &mut Reply<'_>) {
    reply.error(format_args!(
        "ERR unknown subcommand '{}' of '{command}'",
        quoted(subcommand)
    ));
}

/// Replies to an unknown command with the same error message as Redis, because clients detect
/// missing features by this message.
fn unknown(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let name = arguments.get(0).unwrap_or_default();
    let mut beginning = String::new();
    for argument in arguments.skip(1).iter() {
        beginning.push_str(&format!("'{}' ", quoted(argument)));
        if beginning.len() > QUOTED_BYTES {
            break;
        }
    }
    let error = format_args!(
        "ERR unknown command '{}', with args beginning with: {beginning}",
        quoted(name)
    );
    refuse(context, reply, error);
}

/// An error message quotes at most this number of bytes of an argument.
const QUOTED_BYTES: usize = 128;

/// Returns the first bytes of an argument, for use in an error.
fn quoted(argument: &[u8]) -> impl fmt::Display {
    String::from_utf8_lossy(&argument[..argument.len().min(QUOTED_BYTES)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{super::parse::Parser, *};

    #[test]
    fn the_pairs_of_a_request_include_its_entries() {
        let pairs_of = |command: &str| {
            let words: Vec<&str> = command.split(' ').collect();
            let words = words
                .iter()
                .map(|word| format!("${}\r\n{word}\r\n", word.len()));
            let words: Vec<String> = words.collect();
            let input = format!("*{}\r\n{}", words.len(), words.concat());
            let mut parser = Parser::default();
            assert_eq!(parser.parse(input.as_bytes()).ok(), Some(1));
            let (arguments, _) = parser.command(0, input.as_bytes()).unwrap();
            let pairs = pairs(arguments).map(|(name, value)| (name.to_vec(), value.to_vec()));
            pairs.collect::<Vec<_>>()
        };
        for name in ["TIDEGATE.CHECK", "tidegate.reserve"] {
            let pairs = pairs_of(&format!("{name} COST 3 user u1 path /"));
            for (name, value) in [("user", "u1"), ("path", "/")] {
                assert!(pairs.contains(&(name.into(), value.into())), "{pairs:?}");
            }
        }
        assert!(pairs_of("THROTTLE user 1 2 3").is_empty());
    }
}
