//! `CLIENT`: connection names, library names and other connection settings.

use super::{
    super::{
        bounds::MAX_NAME_BYTES,
        parse::Arguments,
        reply::Reply,
        session::{Names, ReplyMode, RespSession},
    },
    Context, quoted, unknown_subcommand,
};

pub(super) fn client(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let session = &mut *context.session;
    let subcommand = arguments.get(1).unwrap_or_default().to_ascii_lowercase();
    match (subcommand.as_slice(), arguments.len()) {
        (b"id", 2) => reply.count(session.id),
        (b"setname", 3) => set_name(session, arguments.get(2).unwrap_or_default(), reply),
        (b"getname", 2) => match &session.names {
            Some(names) if !names.connection.is_empty() => reply.bulk(&names.connection),
            _ => reply.null(),
        },
        (b"setinfo", 4) => set_info(session, arguments, reply),
        (b"info", 2) => reply.verbatim(&line(session)),
        (b"list", _) => reply.verbatim(&line(session)),
        (b"reply", 3) => set_replies(session, arguments, reply),
        (b"no-evict" | b"no-touch", 3) => switch(arguments, reply),
        (b"tracking" | b"caching", _) => reply.error(format_args!(
            "ERR client tracking is not supported: this server stores no values that a client could cache"
        )),
        (
            b"id" | b"setname" | b"getname" | b"setinfo" | b"info" | b"reply" | b"no-evict"
            | b"no-touch",
            _,
        ) => {
            let name = quoted(&subcommand);
            reply.error(format_args!(
                "ERR wrong number of arguments for 'client|{name}' command"
            ));
        }
        _ => unknown_subcommand(&subcommand, "client", reply),
    }
}

/// Returns whether a name is valid in a `CLIENT LIST` line.
pub(super) fn is_name(name: &[u8]) -> bool {
    name.len() <= MAX_NAME_BYTES && name.iter().all(u8::is_ascii_graphic)
}

pub(super) fn refuse_name(what: &str, reply: &mut Reply<'_>) {
    reply.error(format_args!(
        "ERR {what} cannot contain spaces, newlines or special characters, nor be longer than {MAX_NAME_BYTES} bytes."
    ));
}

fn set_name(session: &mut RespSession, name: &[u8], reply: &mut Reply<'_>) {
    if !is_name(name) {
        return refuse_name("Client names", reply);
    }
    session.names_mut().connection = name.to_vec();
    reply.ok();
}

fn set_info(session: &mut RespSession, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    type Field = fn(&mut Names) -> &mut Vec<u8>;
    let fields: [(&str, Field); 2] = [
        ("lib-name", |names| &mut names.library),
        ("lib-ver", |names| &mut names.version),
    ];
    let Some((_, field)) = fields.iter().find(|(name, _)| arguments.is(2, name)) else {
        let option = quoted(arguments.get(2).unwrap_or_default());
        return reply.error(format_args!("ERR Unrecognized option '{option}'"));
    };
    let value = arguments.get(3).unwrap_or_default();
    if !is_name(value) {
        return refuse_name("Library names and versions", reply);
    }
    *field(session.names_mut()) = value.to_vec();
    reply.ok();
}

fn set_replies(session: &mut RespSession, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let replies = [
        ("on", ReplyMode::On),
        ("off", ReplyMode::Off),
        ("skip", ReplyMode::SkipNext),
    ];
    match replies.iter().find(|(word, _)| arguments.is(2, word)) {
        // While replies are off, `SKIP` has no effect.
        Some((_, ReplyMode::SkipNext)) if session.replies == ReplyMode::Off => {}
        Some((_, replies)) => {
            session.replies = *replies;
            reply.ok();
        }
        None => reply.error(format_args!("ERR syntax error: expected ON, OFF or SKIP")),
    }
}

/// Accepts a setting that has no effect in Tidegate, such as `CLIENT NO-EVICT`.
fn switch(arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    if arguments.is(2, "on") || arguments.is(2, "off") {
        return reply.ok();
    }
    reply.error(format_args!("ERR syntax error: expected ON or OFF"));
}

/// Returns this connection as a line of `CLIENT LIST`. A client sees only its own connection.
fn line(session: &RespSession) -> String {
    let names = session.names.as_deref().cloned().unwrap_or_default();
    format!(
        "id={} addr={} name={} db={} flags=N resp={} lib-name={} lib-ver={}\n",
        session.id,
        session.peer,
        String::from_utf8_lossy(&names.connection),
        session.database.number(),
        session.protocol.number(),
        String::from_utf8_lossy(&names.library),
        String::from_utf8_lossy(&names.version),
    )
}
