//! `HELLO` and `AUTH`: protocol negotiation and authentication.
//!
//! Without a configured password, AUTH and HELLO behave as in a Redis server without a password:
//! the user is `default`, and any password for that user is accepted.

use tidegate_net::auth::AuthOutcome;

use super::{
    super::{
        parse::Arguments,
        reply::{Reply, RespVersion},
    },
    Context,
    client::{is_name, refuse_name},
    quoted, wrong_number,
};

/// Runs `HELLO [2|3 [AUTH user password] [SETNAME name]]`. All arguments are validated before
/// anything changes.
pub(super) fn hello(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let protocol = match arguments.get(1) {
        None => context.session.protocol,
        Some(b"2") => RespVersion::Resp2,
        Some(b"3") => RespVersion::Resp3,
        Some(version) if version.iter().all(u8::is_ascii_digit) => {
            return reply.error(format_args!("NOPROTO unsupported protocol version"));
        }
        Some(_) => {
            return reply.error(format_args!(
                "ERR Protocol version is not an integer or out of range"
            ));
        }
    };
    let mut options = arguments.skip(2);
    let (mut name, mut login) = (None, None);
    while options.len() > 0 {
        if options.is(0, "auth") && options.len() >= 3 {
            login = options.get(1).zip(options.get(2));
            options = options.skip(3);
        } else if options.is(0, "setname") && options.len() >= 2 {
            name = options.get(1);
            options = options.skip(2);
        } else {
            let option = quoted(options.get(0).unwrap_or_default());
            return reply.error(format_args!("ERR Syntax error in HELLO option '{option}'"));
        }
    }
    if name.is_some_and(|name| !is_name(name)) {
        return refuse_name("Client names", reply);
    }
    if let Some((user, password)) = login
        && !authenticate(context, user, password, reply)
    {
        return;
    }
    if !context.session.is_authenticated() {
        return reply.error(format_args!(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> \
             <pass> option can be used to authenticate the client and select the RESP protocol version at the same time"
        ));
    }
    if let Some(name) = name {
        context.session.names_mut().connection = name.to_vec();
    }
    context.session.protocol = protocol;
    reply.protocol = protocol;
    introduce(context, reply);
}

fn introduce(context: &Context<'_>, reply: &mut Reply<'_>) {
    reply.map(7);
    reply.bulk(b"server");
    reply.bulk(b"redis");
    reply.bulk(b"version");
    reply.bulk(super::server::REDIS_VERSION.as_bytes());
    reply.bulk(b"proto");
    reply.integer(context.session.protocol.number());
    reply.bulk(b"id");
    reply.count(context.session.id);
    reply.bulk(b"mode");
    reply.bulk(b"standalone");
    reply.bulk(b"role");
    reply.bulk(b"master");
    reply.bulk(b"modules");
    reply.array(0);
}

/// Runs `AUTH [user] password`.
pub(super) fn auth(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let last = arguments.get(arguments.len() - 1).unwrap_or_default();
    let user = match arguments.len() {
        2 if context.session.is_open() => {
            return reply.error(format_args!(
                "ERR AUTH <password> called without any password configured for the default user. \
                 Are you sure your configuration is correct?"
            ));
        }
        2 => context.session.default_user(),
        3 => arguments.get(1).unwrap_or_default().to_vec(),
        _ => return wrong_number(context, "auth", reply),
    };
    if authenticate(context, &user, last, reply) {
        reply.ok();
    }
}

/// Authenticates the connection as `user`. On failure writes the error and returns false.
fn authenticate(
    context: &mut Context<'_>,
    user: &[u8],
    password: &[u8],
    reply: &mut Reply<'_>,
) -> bool {
    match context.session.authenticate(user, password) {
        AuthOutcome::Accepted { .. } => return true,
        AuthOutcome::Wrong => wrong_pass(reply),
        AuthOutcome::Limited { retry_after } => reply.error(format_args!(
            "ERR too many invalid passwords from this address; try again in {} ms",
            retry_after.as_micros().div_ceil(1_000)
        )),
    }
    false
}

fn wrong_pass(reply: &mut Reply<'_>) {
    reply.error(format_args!(
        "WRONGPASS invalid username-password pair or user is disabled."
    ));
}
