//! `TIDEGATE.TOP`: the keys with the most requests, denials or cost.

use std::sync::Arc;

use tidegate_limiter::{
    ServerLimiter,
    top::{TopList, TopQuery},
};

use super::{
    super::{super::top, parse::Arguments, reply::Reply},
    Context, PendingCommand, PendingReply, quoted, refuse,
};

/// Runs `TIDEGATE.TOP [rule] [BY requests|denied|cost] [OVER 5m|15m|1h|1d] [COUNT n]`. Replies with
/// `[from_ms, until_ms, [requests, denied, cost], [[rule or null, [value, …], estimate, error],
/// …]]`.
///
/// Each option consists of a name and a value. Therefore, if the number of arguments is odd, the
/// first argument is the rule.
pub(super) fn top(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    if !context.session.may_list_keys {
        let error = format_args!(
            "NOPERM this command reveals the keys of all clients, so it is disabled; set `top: true` under `listen.resp` in the rules file"
        );
        return refuse(context, reply, error);
    }
    match read(arguments.skip(1)) {
        Ok(query) => {
            let later = PendingCommand::Top(PendingTop(query));
            context.pending.push(PendingReply::new(later, reply));
        }
        Err(problem) => refuse(context, reply, format_args!("ERR {problem}")),
    }
}

fn read(arguments: Arguments<'_>) -> Result<TopQuery, String> {
    let (mut query, mut options) = (top::default_query(), arguments);
    let text = |bytes: Option<&[u8]>| {
        let bytes = bytes.unwrap_or_default();
        let text = std::str::from_utf8(bytes);
        text.map(str::to_owned)
            .map_err(|_| format!("'{}' is not UTF-8", quoted(bytes)))
    };
    if !options.len().is_multiple_of(2) {
        query.rule = Some(text(options.get(0))?);
        options = options.skip(1);
    }
    while options.len() > 0 {
        let value = text(options.get(1))?;
        if options.is(0, "by") {
            query.by = top::measure(&value).map_err(|problem| format!("BY {problem}"))?;
        } else if options.is(0, "over") {
            query.over = top::period(&value).map_err(|problem| format!("OVER {problem}"))?;
        } else if options.is(0, "count") {
            query.count = top::count(&value).map_err(|problem| format!("COUNT {problem}"))?;
        } else {
            let option = quoted(options.get(0).unwrap_or_default());
            return Err(format!(
                "unknown option '{option}'; expected BY, OVER or COUNT"
            ));
        }
        options = options.skip(2);
    }
    Ok(query)
}

/// The assumed size of a reply row, in bytes. A waiting query is assumed to need this amount of
/// memory for each requested row.
const ROW_BYTES: usize = 128;

/// A query that runs on another thread.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingTop(TopQuery);

impl PendingTop {
    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        let rule = self.0.rule.as_ref().map_or(0, String::capacity);
        // The replies to the whole batch stay in memory until the last query has finished.
        rule + self.0.count * ROW_BYTES
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &Arc<ServerLimiter>,
        reply: &mut Reply<'_>,
    ) {
        match top::answer(limiter, self.0).await {
            Ok(list) => render(&list, reply),
            Err(failure) => reply.error(format_args!("ERR {failure}")),
        }
    }
}

fn render(list: &TopList, reply: &mut Reply<'_>) {
    reply.array(4);
    reply.count(list.from.as_micros() / 1_000);
    reply.count(list.until.as_micros() / 1_000);
    reply.array(3);
    reply.count(list.total.requests);
    reply.count(list.total.denied);
    reply.count(list.total.cost);
    reply.array(list.rows.len());
    for row in &list.rows {
        reply.array(4);
        match &row.rule {
            Some(rule) => reply.bulk(rule.as_bytes()),
            None => reply.null(),
        }
        reply.array(row.key.len());
        for value in &row.key {
            reply.bulk(value.as_bytes());
        }
        reply.count(row.estimate);
        reply.count(row.error);
    }
}
