//! Checks that, if the cost of a rule depends on responses or request bodies, there is a listener
//! that sees them.

use super::{Grpc, ListenAddresses, report::Report, rules::RawRule};

/// Checks rules whose cost depends on the response or the request body. Reports an error if no
/// proxy is configured, because only the proxy sees responses and request bodies. Warns if other
/// listeners also apply rules with a response-based or body-based cost.
pub(super) fn check(
    rules: &[RawRule<'_>],
    has_proxy: bool,
    listen: &ListenAddresses,
    grpc: &Grpc,
    report: &mut Report,
) {
    let blind = blind_listeners(listen, grpc);
    for field in rules.iter().filter_map(|rule| rule.proxy_only.as_ref()) {
        let why = format!(
            "depends on {}, which only the reverse proxy sees",
            field.source
        );
        let field = &field.span;
        if !has_proxy {
            let advice = "add a `proxy` section, or remove this field";
            field.wrong_key(report, format!("{why}; {advice}"));
        } else if !blind.is_empty() {
            let listeners = blind.join(" and ");
            let advice =
                "are charged in full and not refunded; disable unused listeners with `off`";
            field.warn_of_key(
                report,
                format!("blind-listener: {why}; requests at {listeners} {advice}"),
            );
        }
    }
}

/// Returns the names of the listeners that apply rules, but see neither responses nor request
/// bodies.
fn blind_listeners(listen: &ListenAddresses, grpc: &Grpc) -> Vec<&'static str> {
    let listeners = [
        ("listen.http", listen.http),
        ("listen.resp", listen.resp),
        ("listen.spop", listen.spop),
        // Without the authorization service, the gRPC listener does not apply rules.
        ("listen.grpc", listen.grpc.filter(|_| grpc.authorization)),
    ];
    let open = listeners
        .into_iter()
        .filter(|(_, address)| address.is_some());
    open.map(|(name, _)| name).collect()
}
