//! `MULTI`, `EXEC` and `DISCARD`.

use super::{
    super::{
        bounds::MAX_COMMAND_BYTES,
        parse::{Arguments, Parser},
        reply::Reply,
        transaction::Transaction,
    },
    Command, Context, refuse, run,
};

/// The commands that are allowed in a transaction in addition to the commands that make decisions.
/// All other commands either change the connection state or have large replies. With large replies,
/// a transaction could turn a few bytes of input into megabytes of output.
const ALSO: [&str; 5] = ["ping", "echo", "select", "del", "unlink"];

pub(super) fn multi(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    if context.session.transaction.is_some() {
        return refuse(
            context,
            reply,
            format_args!("ERR MULTI calls can not be nested"),
        );
    }
    context.session.transaction = Some(Box::default());
    reply.ok();
}

pub(super) fn discard(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    match context.session.transaction.take() {
        Some(_) => reply.ok(),
        None => refuse(context, reply, format_args!("ERR DISCARD without MULTI")),
    }
}

/// Runs the queued commands. The commands are evaluated separately, but with the same timestamp.
pub(super) fn exec(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    let Some(transaction) = context.session.transaction.take() else {
        return refuse(context, reply, format_args!("ERR EXEC without MULTI"));
    };
    let Some((count, queued)) = transaction.end() else {
        return reply.error(format_args!(
            "EXECABORT Transaction discarded because of previous errors."
        ));
    };
    reply.array(count);
    let mut parser = Parser::default();
    let mut rest = queued.as_slice();
    // The commands were queued in the wire format, so they parse without error.
    while let Ok(1) = parser.parse_one(rest)
        && let Some((arguments, end)) = parser.command(0, rest)
    {
        run(context, arguments, reply.out);
        rest = &rest[end..];
    }
}

/// Returns whether `command` runs immediately even while a transaction is open.
pub(super) fn is_immediate(command: &Command) -> bool {
    ["multi", "exec", "discard", "quit", "reset"].contains(&command.name)
}

/// Queues `command` for `EXEC`, if it is allowed in a transaction.
pub(super) fn queue(
    transaction: &mut Transaction,
    command: &Command,
    arguments: Arguments<'_>,
    reply: &mut Reply<'_>,
) {
    if command.group != "module" && !ALSO.contains(&command.name) {
        transaction.spoil();
        reply.error(format_args!(
            "ERR '{}' is not allowed in a transaction",
            command.name
        ));
    } else if transaction.queue(arguments) {
        reply.simple("QUEUED");
    } else {
        reply.error(format_args!(
            "ERR the transaction is too long: at most {MAX_COMMAND_BYTES} bytes"
        ));
    }
}
