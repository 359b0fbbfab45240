//! The commands: their table, and how one is found and run.

mod check;
mod client;
mod connection;
mod describe;
mod hello;
mod refusal;
mod server;
mod throttle;

use super::{desk::Context, parse::Arguments, reply::Reply};

/// A command that we answer.
#[derive(Debug)]
struct Command {
    /// In lower case.
    name: &'static str,
    arity: Arity,
    flags: &'static [&'static str],
    keyed: bool,
    group: &'static str,
    summary: &'static str,
    run: fn(&mut Context<'_>, Arguments<'_>, &mut Reply<'_>),
}

/// How many arguments a command takes, its name included.
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

    /// As `COMMAND` tells it: negative is "at least".
    fn number(self) -> i64 {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        match self {
            Self::Exactly(exact) => number(exact),
            Self::AtLeast(least) | Self::Between(least, _) => -number(least),
        }
    }
}

const CONNECTION: &[&str] = &["noscript", "loading", "stale", "fast", "no_auth"];

/// Every command, those of the hot path first.
static COMMANDS: [Command; 16] = [
    Command {
        name: "cl.throttle",
        arity: Arity::Between(5, 6),
        flags: &["write", "fast"],
        keyed: true,
        group: "module",
        summary: "Decides a GCRA limit that comes with the request, as redis-cell does",
        run: throttle::cl_throttle,
    },
    Command {
        name: "throttle",
        arity: Arity::Between(5, 6),
        flags: &["write", "fast"],
        keyed: true,
        group: "module",
        summary: "Decides a token bucket that comes with the request, as throttlecrab does",
        run: throttle::throttle,
    },
    Command {
        name: "tidegate.check",
        arity: Arity::AtLeast(3),
        flags: &["write", "fast"],
        keyed: false,
        group: "module",
        summary: "Decides a request under the rules",
        run: check::check,
    },
    Command {
        name: "ping",
        arity: Arity::Between(1, 2),
        flags: &["fast"],
        keyed: false,
        group: "connection",
        summary: "Answers PONG, or the message",
        run: connection::ping,
    },
    Command {
        name: "echo",
        arity: Arity::Exactly(2),
        flags: &["loading", "stale", "fast"],
        keyed: false,
        group: "connection",
        summary: "Answers the message",
        run: connection::echo,
    },
    Command {
        name: "hello",
        arity: Arity::AtLeast(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Agrees on the version of the protocol",
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
        summary: "Selects database 0, the only one",
        run: connection::select,
    },
    Command {
        name: "quit",
        arity: Arity::AtLeast(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Ends the connection",
        run: connection::quit,
    },
    Command {
        name: "reset",
        arity: Arity::Exactly(1),
        flags: CONNECTION,
        keyed: false,
        group: "connection",
        summary: "Makes the connection as good as new",
        run: connection::reset,
    },
    Command {
        name: "readonly",
        arity: Arity::Exactly(1),
        flags: &["loading", "stale", "fast"],
        keyed: false,
        group: "cluster",
        summary: "Answers OK",
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
        summary: "Answers that there is nothing to configure",
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

/// The command of this name, in whatever case.
fn find(name: &[u8]) -> Option<&'static Command> {
    COMMANDS
        .iter()
        .find(|command| command.name.as_bytes().eq_ignore_ascii_case(name))
}

/// Runs the command that the first argument names.
pub(super) fn run(context: &mut Context<'_>, arguments: Arguments<'_>, out: &mut Vec<u8>) {
    let mut reply = Reply {
        out,
        protocol: context.session.protocol,
    };
    let name = arguments.get(0).unwrap_or_default();
    match find(name) {
        None => unknown(name, arguments.skip(1), &mut reply),
        Some(command) if command.arity.admits(arguments.len()) => {
            (command.run)(context, arguments, &mut reply)
        }
        Some(command) if command.name == "cl.throttle" => throttle::usage(&mut reply),
        Some(command) => wrong_number(command.name, &mut reply),
    }
}

fn wrong_number(name: &str, reply: &mut Reply<'_>) {
    reply.error(format_args!(
        "ERR wrong number of arguments for '{name}' command"
    ));
}

fn unknown_subcommand(subcommand: &[u8], command: &str, reply: &mut Reply<'_>) {
    reply.error(format_args!(
        "ERR unknown subcommand '{}' of '{command}'",
        quoted(subcommand)
    ));
}

/// Redis' own words, because clients look for them to find out what a server can do.
fn unknown(name: &[u8], arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let mut beginning = String::new();
    for argument in arguments.iter() {
        beginning.push_str(&format!("'{}' ", quoted(argument)));
        if beginning.len() > QUOTED_BYTES {
            break;
        }
    }
    reply.error(format_args!(
        "ERR unknown command '{}', with args beginning with: {beginning}",
        quoted(name)
    ));
}

/// How much of an argument an error repeats.
const QUOTED_BYTES: usize = 128;

/// The beginning of what a client sent, fit to be repeated to it.
fn quoted(argument: &[u8]) -> impl std::fmt::Display {
    String::from_utf8_lossy(&argument[..argument.len().min(QUOTED_BYTES)]).into_owned()
}
