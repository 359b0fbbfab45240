//! Warnings of upstreams that nobody reaches, and of rules that wait for a sign of room that nobody gives.

use tidegate_core::RuleSet;

use super::Upstream;
use crate::config::{report::Report, value::Value};

/// The names of the warnings, for those who look for them in a log.
const UNREACHABLE: &str = "unreachable-upstream";
const UNTOLD: &str = "untold-room";

/// Warns of what the `upstreams`, which are `values` in the file, leave open together with `rules`.
pub(super) fn warn(
    upstreams: &[Upstream],
    values: &[Value<'_>],
    rules: &RuleSet,
    report: &mut Report,
) {
    let first = upstreams
        .iter()
        .position(|upstream| upstream.when.is_always());
    for (at, (upstream, value)) in upstreams.iter().zip(values).enumerate() {
        if let Some(all) = first.and_then(|first| upstreams.get(first).filter(|_| at > first)) {
            let message = format!(
                "{UNREACHABLE}: no request is for `{}`, because every request is for `{}`, which stands before it and has no `when`; move that one to the end",
                upstream.name, all.name
            );
            value.warn(report, message);
        }
        let entry = upstream.room_entry();
        if upstream.adaptive.is_none() && rules.looks_at(&entry) {
            let message = format!(
                "{UNTOLD}: a rule goes by `{entry}`, which the proxy tells only of an upstream with `adaptive`; write `adaptive: {{}}`"
            );
            value.warn(report, message);
        }
    }
}
