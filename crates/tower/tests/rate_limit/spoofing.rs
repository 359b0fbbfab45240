//! Tests that a client cannot change the key by which it is counted, whatever headers it sends.

use std::net::SocketAddr;

use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, Request};
use proptest::prelude::*;
use tidegate_identity::{AddressHeader, Entries, Peer, Proxies, Trust};
use tidegate_tower::RateLimitLayer;
use tower::{Layer, Service};

use crate::support::{Limiter, Notes, fixed, get, limiter};

type Lines = Vec<(String, String)>;

/// Generates arbitrary headers, including those that some proxies use to report the client.
fn lines() -> impl Strategy<Value = Lines> {
    let telling = prop::sample::select(vec![
        "x-forwarded-for",
        "forwarded",
        "x-real-ip",
        "x-client-ip",
        "client-ip",
        "true-client-ip",
        "cf-connecting-ip",
        "fastly-client-ip",
        "x-cluster-client-ip",
        "x-forwarded-host",
        "x-forwarded-uri",
        "x-original-url",
        "via",
        "ip",
        "customer",
        "x-customer",
    ]);
    let name = prop_oneof![4 => telling.prop_map(str::to_owned), 1 => "[a-z][a-z-]{0,11}"];
    let address = prop::sample::select(vec![
        "6.6.6.6",
        "10.0.0.7",
        "6.6.6.6, 10.0.0.7",
        "::ffff:6.6.6.6",
        "[2001:db8::6]:4711",
        "fe80::6%eth0",
        "for=6.6.6.6",
        "for=\"[2001:db8::6]:_p\";by=10.0.0.7",
        "unknown",
        "acme",
    ]);
    let value = prop_oneof![3 => address.prop_map(str::to_owned), 1 => "[ -~]{0,30}"];
    prop::collection::vec((name, value), 0..6)
}

/// Returns configurations that do not trust the tests' headers: no proxy is trusted, the trusted
/// proxies have other addresses, or another header is used.
fn trusts() -> Vec<Trust> {
    let ours = || Proxies::Nets(vec!["10.0.0.0/8".parse().unwrap()]);
    vec![
        Trust::default(),
        Trust::new(Proxies::Hops(0), AddressHeader::XForwardedFor),
        Trust::new(ours(), AddressHeader::XForwardedFor),
        Trust::new(ours(), AddressHeader::Forwarded),
        Trust::new(ours(), AddressHeader::named("cf-connecting-ip").unwrap()),
    ]
}

fn request(peer: &str, customer: &str, lines: &[(String, String)]) -> Request<()> {
    let mut request = get("/");
    for (name, value) in lines {
        let name = HeaderName::try_from(name.as_str()).unwrap();
        let value = HeaderValue::try_from(value.as_str()).unwrap();
        request.headers_mut().append(name, value);
    }
    let peer: SocketAddr = peer.parse().unwrap();
    request.extensions_mut().insert(Peer(peer));
    let known = Entries::new().with("customer", customer);
    request.extensions_mut().insert(known);
    request
}

/// Sends a request without `lines` and a request with `lines`. Returns both statuses.
fn twice(trust: Trust, rule: &str, peer: &str, lines: &Lines, appended: &Lines) -> [u16; 2] {
    let rules = vec![fixed("each", "1/h").keyed_by(&[rule]).unwrap()];
    let limiter: std::sync::Arc<Limiter> = limiter(rules);
    let mut service = RateLimitLayer::new(limiter)
        .trust(trust)
        .layer(Notes::default());
    [appended.clone(), [&lines[..], &appended[..]].concat()].map(|lines| {
        let ready = std::future::poll_fn(|context| service.poll_ready(context));
        ready.now_or_never().unwrap().unwrap();
        let answer = service.call(request(peer, "acme", &lines)).now_or_never();
        answer.unwrap().unwrap().status().as_u16()
    })
}

proptest! {
    #[test]
    fn untrusted_headers_never_change_the_key(lines in lines()) {
        for rule in ["ip", "ip.exact", "customer"] {
            for trust in trusts() {
                let answers = twice(trust.clone(), rule, "192.0.2.1:4711", &lines, &Vec::new());
                prop_assert_eq!(answers, [200, 429], "{} of {:?}", rule, trust);
            }
        }
    }

    #[test]
    fn elements_appended_by_a_trusted_proxy_decide(lines in lines()) {
        let ours = || Proxies::Nets(vec!["10.0.0.0/8".parse().unwrap()]);
        let appended = vec![("x-forwarded-for".to_owned(), "203.0.113.9".to_owned())];
        for proxies in [ours(), Proxies::Hops(1)] {
            let trust = Trust::new(proxies, AddressHeader::XForwardedFor);
            for rule in ["ip", "ip.exact", "customer"] {
                let answers = twice(trust.clone(), rule, "10.0.0.7:80", &lines, &appended);
                prop_assert_eq!(answers, [200, 429], "{} of {:?}", rule, trust);
            }
        }
    }
}
