//! `proxy.access_log`: the access log file, and what its lines contain.

use std::path::PathBuf;

use crate::{report::Report, value::Value};

/// The settings of the access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessLogConfig {
    /// `to`: the path of the log file; `None` means standard output (`stdout`).
    pub to: Option<PathBuf>,
    /// `query`: whether lines include the query string, which can contain secrets; default false.
    pub query: bool,
    /// `key`: whether the lines of denied requests include the key under which the rule denied the
    /// request; default false.
    pub key: bool,
}

pub(super) fn access_log(value: &Value<'_>, report: &mut Report) -> Option<AccessLogConfig> {
    let what = "stdout, a path, or a map such as {to: /var/log/tidegate/access.log, query: true}";
    if value.scalar().is_some() {
        let to = target(value.text(report, what)?);
        return Some(AccessLogConfig {
            to,
            query: false,
            key: false,
        });
    }
    let fields = value.fields(report, what, &["to", "query", "key"])?;
    let mut flag = |name| fields.get(name).and_then(|value| value.flag(report));
    let (query, key) = (flag("query"), flag("key"));
    let Some(to) = fields.get("to") else {
        if !fields.tries("to") {
            fields.wrong(report, "to", "is missing; write stdout or a path");
        }
        return None;
    };
    Some(AccessLogConfig {
        to: target(to.text(report, "stdout or a path")?),
        query: query.unwrap_or(false),
        key: key.unwrap_or(false),
    })
}

fn target(text: &str) -> Option<PathBuf> {
    (text != "stdout").then(|| text.into())
}
