//! Commands that return information about the server.

use super::{
    super::{parse::Arguments, reply::Reply},
    Context, unknown_subcommand,
};

/// The Redis version whose behaviour is emulated. Clients select features by the version.
pub(super) const REDIS_VERSION: &str = "7.4.0";

/// Runs `INFO [section …]`. Replies with all sections, regardless of the arguments.
pub(super) fn info(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    let keys = context.limiter.local_store().stats().keys;
    // With a Redis backend, the local keys are only the fallback while Redis is unreachable.
    let keyspace = if context.limiter.redis_store().is_some() {
        format!("tidegate_store:redis\r\ntidegate_fallback_keys:{keys}\r\n")
    } else {
        format!("tidegate_store:memory\r\ndb0:keys={keys},expires={keys},avg_ttl=0\r\n")
    };
    reply.verbatim(&format!(
        "# Server\r\n\
         redis_version:{REDIS_VERSION}\r\n\
         redis_mode:standalone\r\n\
         server_name:tidegate\r\n\
         tidegate_version:{}\r\n\
         process_id:{}\r\n\
         \r\n\
         # Persistence\r\n\
         loading:0\r\n\
         \r\n\
         # Replication\r\n\
         role:master\r\n\
         connected_slaves:0\r\n\
         \r\n\
         # Cluster\r\n\
         cluster_enabled:0\r\n\
         \r\n\
         # Keyspace\r\n\
         {keyspace}",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
    ));
}

/// Runs `CONFIG GET …`, which returns no settings. Rejects `CONFIG SET`, because settings are
/// changed only in the configuration file.
pub(super) fn config(_: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    if arguments.is(1, "get") {
        reply.map(0);
    } else if arguments.is(1, "set") {
        reply.error(format_args!(
            "ERR CONFIG SET is not supported: edit the configuration file"
        ));
    } else {
        unknown_subcommand(arguments.get(1).unwrap_or_default(), "config", reply);
    }
}

/// Runs `DBSIZE`, which replies with the number of keys in the memory store. With a Redis backend
/// the reply is an error, because the Redis server may hold other keys too.
pub(super) fn dbsize(context: &mut Context<'_>, _: Arguments<'_>, reply: &mut Reply<'_>) {
    if context.limiter.redis_store().is_some() {
        reply.error(format_args!(
            "ERR this server stores its keys in Redis: run DBSIZE there"
        ));
        return;
    }
    let keys = context.limiter.local_store().stats().keys;
    reply.count(u64::try_from(keys).unwrap_or(u64::MAX));
}
