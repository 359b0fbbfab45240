//! Connection commands that clients send to every Redis server.

use tidegate_limiter::Database;

use super::super::{
    parse::Arguments,
    reply::{Reply, RespVersion},
    session::CloseAfterReply,
};
use super::Context;

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

/// Runs `SELECT index`. A client with a URL such as `redis://host/1` sends this command so that its
/// keys stay separate from the keys of other applications. Therefore each database has its own
/// keys.
pub(super) fn select(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let index = std::str::from_utf8(arguments.get(1).unwrap_or_default()).ok();
    let Some(index) = index.and_then(|index| index.parse::<i64>().ok()) else {
        return reply.error(format_args!("ERR value is not an integer or out of range"));
    };
    match Database::new(index) {
        Some(database) => {
            context.session.database = database;
            reply.ok();
        }
        None => reply.error(format_args!("ERR DB index is out of range")),
    }
}

pub(super) fn quit(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    context.session.close = CloseAfterReply::Quit;
    reply.ok();
}

pub(super) fn reset(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    context.session.reset();
    reply.protocol = RespVersion::default();
    reply.simple("RESET");
}
