//! Warnings of upstreams that nobody reaches, or that are the proxy itself, and of rules that wait for a sign of room that
//! nobody gives.

use std::net::{IpAddr, SocketAddr};

use tidegate_core::RuleSet;

use super::{Upstream, Url};
use crate::config::{report::Report, value::Value};

/// The names of the warnings, for those who look for them in a log.
const UNREACHABLE: &str = "unreachable-upstream";
const UNTOLD: &str = "untold-room";
const ITSELF: &str = "own-address";

/// Warns of what the `upstreams`, which are `values` in the file, leave open together with `rules` and with where the proxy
/// itself listens.
pub(super) fn warn(
    upstreams: &[Upstream],
    values: &[Value<'_>],
    (listen, rules): (Option<SocketAddr>, &RuleSet),
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
        let is_itself = |url: &&Url| listen.is_some_and(|listen| is_at(url, listen));
        if let Some(url) = upstream.urls.iter().find(is_itself) {
            let message = format!(
                "{ITSELF}: `{}` is at {}, where this proxy itself listens, so that it asks itself over and over; name the address of the service behind it",
                upstream.name,
                url.authority()
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

/// Whether who listens there is asked by `url`, as far as can be said without looking up a name.
fn is_at(url: &Url, listen: SocketAddr) -> bool {
    let host: Option<IpAddr> = match &*url.host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.parse().ok(),
    };
    let reaches =
        |host: IpAddr| host == listen.ip() || listen.ip().is_unspecified() && host.is_loopback();
    listen.port() != 0 && url.port == listen.port() && host.is_some_and(reaches)
}
