//! A lint that warns about upstreams that no request reaches, upstreams whose address is the
//! proxy's own address, and rules that depend on a `headroom.*` entry that the proxy never
//! provides.

use std::net::{IpAddr, SocketAddr};

use tidegate_core::RuleSet;

use crate::{Proxy, Url, proxy::RawUpstream, report::Report};

/// The code of the warning about an upstream that no request can reach. Users can search for the
/// code.
const UNREACHABLE_UPSTREAM: &str = "unreachable-upstream";
/// The code of the warning about a rule with a `headroom.*` entry that no upstream provides.
const UNKNOWN_HEADROOM: &str = "unknown-headroom";
/// The code of the warning about an upstream whose address is that of the proxy itself.
const OWN_ADDRESS: &str = "own-address";

/// Warns about the upstreams in `proxy`, which were read from `raw`, and about rules in `rules`
/// that use an upstream's `headroom.*` entry.
pub(crate) fn warn(proxy: &Proxy, raw: &[RawUpstream<'_>], rules: &RuleSet, report: &mut Report) {
    let upstreams = &proxy.upstreams;
    let first = upstreams
        .iter()
        .position(|upstream| upstream.when.is_always());
    for (at, (upstream, raw)) in upstreams.iter().zip(raw).enumerate() {
        let span = &raw.span;
        if let Some(all) = first.and_then(|first| upstreams.get(first).filter(|_| at > first)) {
            let message = format!(
                "{UNREACHABLE_UPSTREAM}: no request reaches `{}`, because every request matches `{}`, which comes first \
                 and has no `when`; move that upstream to the end",
                upstream.name, all.name
            );
            span.warn(report, message);
        }
        let is_own_address = |url: &&Url| is_at(url, proxy.listen);
        if let Some(url) = upstream.urls.iter().find(is_own_address) {
            let message = format!(
                "{OWN_ADDRESS}: `{}` is at {}, where this proxy itself listens, so requests would loop; set the \
                 address of the service behind the proxy",
                upstream.name,
                url.authority()
            );
            span.warn(report, message);
        }
        let entry = upstream.headroom_entry();
        if upstream.adaptive.is_none() && rules.uses_entry(&entry) {
            let message = format!(
                "{UNKNOWN_HEADROOM}: a rule uses `{entry}`, which the proxy provides only for an upstream with `adaptive`; add `adaptive: {{}}`"
            );
            span.warn(report, message);
        }
    }
}

/// Returns whether `url` connects to `listen`, as far as can be determined without a DNS lookup.
fn is_at(url: &Url, listen: SocketAddr) -> bool {
    let host: Option<IpAddr> = match &*url.host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.parse().ok(),
    };
    let reaches =
        |host: IpAddr| host == listen.ip() || listen.ip().is_unspecified() && host.is_loopback();
    listen.port() != 0 && url.port == listen.port() && host.is_some_and(reaches)
}
