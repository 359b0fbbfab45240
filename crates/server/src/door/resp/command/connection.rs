//! What every client says to every Redis.

use super::super::{
    desk::Context,
    parse::Arguments,
    reply::{Protocol, Reply},
    session::Ending,
};

pub(super) fn ping(_: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    match arguments.get(1) {
        Some(message) => reply.bulk(message),
        None => reply.simple("PONG"),
    }
}

pub(super) fn echo(_: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    reply.bulk(arguments.get(1).unwrap_or_default());
}

pub(super) fn readonly(_: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    reply.ok();
}

pub(super) fn select(_: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let index = std::str::from_utf8(arguments.get(1).unwrap_or_default()).ok();
    match index.and_then(|index| index.parse::<i64>().ok()) {
        Some(0) => reply.ok(),
        Some(_) => reply.error(format_args!("ERR DB index is out of range")),
        None => reply.error(format_args!("ERR value is not an integer or out of range")),
    }
}

pub(super) fn quit(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    context.session.ending = Ending::Quit;
    reply.ok();
}

pub(super) fn reset(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    context.session.reset();
    reply.protocol = Protocol::default();
    reply.simple("RESET");
}
