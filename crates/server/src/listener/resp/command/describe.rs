//! `COMMAND`: the command table, for clients that complete, route or validate commands.

use super::{
    super::{parse::Arguments, reply::Reply},
    COMMANDS, Command, Context, find, unknown_subcommand,
};

pub(super) fn command(_: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let Some(subcommand) = arguments.get(1) else {
        return all(reply);
    };
    let named = arguments.skip(2);
    match subcommand.to_ascii_lowercase().as_slice() {
        b"count" => reply.integer(i64::try_from(COMMANDS.len()).unwrap_or(i64::MAX)),
        b"list" => list(reply),
        b"info" if named.len() == 0 => all(reply),
        b"info" => {
            reply.array(named.len());
            named.iter().for_each(|name| match find(name) {
                Some(command) => describe(command, reply),
                None => reply.null_array(),
            });
        }
        b"docs" if named.len() == 0 => docs(COMMANDS.iter().collect(), reply),
        b"docs" => docs(named.iter().filter_map(find).collect(), reply),
        b"getkeys" => keys(named, reply),
        other => unknown_subcommand(other, "command", reply),
    }
}

fn all(reply: &mut Reply<'_>) {
    reply.array(COMMANDS.len());
    COMMANDS.iter().for_each(|command| describe(command, reply));
}

fn list(reply: &mut Reply<'_>) {
    reply.array(COMMANDS.len());
    COMMANDS
        .iter()
        .for_each(|command| reply.bulk(command.name.as_bytes()));
}

/// Writes the name, arity, flags, first key, last key, step, categories, tips, key specifications
/// and subcommands.
fn describe(command: &Command, reply: &mut Reply<'_>) {
    let key = i64::from(command.keyed);
    reply.array(10);
    reply.bulk(command.name.as_bytes());
    reply.integer(command.arity.number());
    reply.words(command.flags);
    reply.integer(key);
    reply.integer(key);
    reply.integer(key);
    let category = format!("@{}", command.group);
    reply.words(&[&category]);
    reply.array(0);
    reply.array(usize::from(command.keyed));
    if command.keyed {
        first_argument(reply);
    }
    reply.array(0);
}

/// Writes the key specification of a command whose only key is its first argument.
fn first_argument(reply: &mut Reply<'_>) {
    reply.map(3);
    reply.bulk(b"flags");
    reply.words(&["RW", "access", "update"]);
    reply.bulk(b"begin_search");
    spec("index", &[("index", 1)], reply);
    reply.bulk(b"find_keys");
    spec(
        "range",
        &[("lastkey", 0), ("keystep", 1), ("limit", 0)],
        reply,
    );
}

fn spec(kind: &str, numbers: &[(&str, i64)], reply: &mut Reply<'_>) {
    reply.map(2);
    reply.bulk(b"type");
    reply.bulk(kind.as_bytes());
    reply.bulk(b"spec");
    reply.map(numbers.len());
    for (name, value) in numbers {
        reply.bulk(name.as_bytes());
        reply.integer(*value);
    }
}

fn docs(commands: Vec<&Command>, reply: &mut Reply<'_>) {
    reply.map(commands.len());
    for command in commands {
        reply.bulk(command.name.as_bytes());
        reply.map(3);
        for (name, value) in [
            ("summary", command.summary),
            ("since", "0.1.0"),
            ("group", command.group),
        ] {
            reply.bulk(name.as_bytes());
            reply.bulk(value.as_bytes());
        }
    }
}

fn keys(arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let Some(command) = arguments.get(0).and_then(find) else {
        return reply.error(format_args!("ERR Invalid command specified"));
    };
    match arguments.get(1) {
        Some(key) if command.keyed => {
            reply.array(1);
            reply.bulk(key);
        }
        _ => reply.error(format_args!("ERR The command has no key arguments")),
    }
}
