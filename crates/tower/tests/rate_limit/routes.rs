//! Tests which rules apply to a request, with which keys and at which cost.

use std::net::SocketAddr;

use tidegate_core::{Cost, CostSource, Mode};
use tidegate_identity::{AddressHeader, DerivedEntry, Entries, Peer, Proxies, Trust};
use tidegate_tower::RateLimitLayer;
use tower::{Layer, Service, ServiceExt};

use crate::support::{Notes, fixed, get, limited, limiter, on, send, statuses};

#[tokio::test]
async fn every_route_has_its_rules_and_denied_requests_never_arrive() {
    let (notes, mut service) = limited(vec![
        fixed("login", "1/h").when(on("/login")),
        fixed("api", "2/h").when(on("/api/**")),
    ]);
    assert_eq!(statuses(&mut service, "/login", 3).await, [200, 429, 429]);
    assert_eq!(statuses(&mut service, "/%6Cogin", 1).await, [429]);
    assert_eq!(statuses(&mut service, "/api/a", 2).await, [200, 200]);
    assert_eq!(statuses(&mut service, "/api/b", 1).await, [429]);
    assert_eq!(statuses(&mut service, "/free", 2).await, [200, 200]);
    let expected = ["/login", "/api/a", "/api/a", "/free", "/free"];
    assert_eq!(notes.paths(), expected);
}

/// Some routers and services resolve dot segments, and would use a different path than the rules.
#[tokio::test]
async fn a_path_with_dot_segments_is_refused_if_rules_use_paths() {
    let dotted = ["/api/..", "/api/x/../../healthz", "/api/%2e%2E/healthz"];
    let (notes, mut service) = limited(vec![fixed("api", "1/h").when(on("/api/**"))]);
    for path in dotted {
        let refused = send(&mut service, get(path)).await;
        assert_eq!(refused.status, 400, "{path}");
        assert!(
            refused.body.contains("path: has segments"),
            "{}",
            refused.body
        );
    }
    assert!(notes.paths().is_empty());
    let (_, mut service) = limited(vec![fixed("all", "9/h")]);
    for path in dotted {
        assert_eq!(statuses(&mut service, path, 1).await, [200], "{path}");
    }
}

#[tokio::test]
async fn a_repeated_key_header_is_refused() {
    let rule = fixed("each", "1/h")
        .keyed_by(&["header.x-api-key"])
        .unwrap();
    let (notes, mut service) = limited(vec![rule]);
    for random in ["1", "2", "3"] {
        let mut request = get("/");
        for key in ["real", random] {
            request
                .headers_mut()
                .append("x-api-key", key.parse().unwrap());
        }
        let refused = send(&mut service, request).await;
        assert_eq!(refused.status, 400);
        let named = "header.x-api-key: has several values";
        assert!(refused.body.contains(named), "{}", refused.body);
    }
    assert!(notes.paths().is_empty());
}

#[tokio::test]
async fn poll_ready_costs_nothing_and_clones_share_counts() {
    let (notes, mut service) = limited(vec![fixed("all", "2/h")]);
    for _ in 0..10 {
        service.ready().await.unwrap();
    }
    let mut clone = service.clone();
    assert_eq!(statuses(&mut clone, "/", 1).await, [200]);
    assert_eq!(statuses(&mut service, "/", 2).await, [200, 429]);
    assert_eq!(notes.paths().len(), 2);
}

#[tokio::test]
async fn counts_are_kept_by_application_entries() {
    let (_, mut service) = limited(vec![fixed("each", "1/h").keyed_by(&["customer"]).unwrap()]);
    for (customer, expected) in [("a", 200), ("b", 200), ("a", 429), ("b", 429)] {
        let mut request = get("/");
        let entries = Entries::new().with("customer", customer);
        request.extensions_mut().insert(entries);
        assert_eq!(send(&mut service, request).await.status, expected);
    }
    // The client controls the header, so the header does not set the entry.
    let mut request = get("/");
    request
        .headers_mut()
        .insert("x-customer", "a".parse().unwrap());
    assert_eq!(send(&mut service, request).await.status, 200);
}

#[tokio::test]
async fn clients_are_counted_by_address_and_by_key_without_secrets() {
    let nets = Proxies::Nets(vec!["10.0.0.0/8".parse().unwrap()]);
    let limiter = limiter(vec![
        fixed("ip", "1/h").keyed_by(&["ip"]).unwrap(),
        fixed("key", "1/h").keyed_by(&["key"]).unwrap(),
    ]);
    let mut service = RateLimitLayer::new(limiter)
        .peer(|extensions| Some(extensions.get::<Peer>()?.0.ip()))
        .trust(Trust::new(nets, AddressHeader::XForwardedFor))
        .derived("key", DerivedEntry::split("header.x-key", ".", 1).unwrap())
        .layer(Notes::default());
    for (peer, header, value, expected) in [
        ("10.0.0.1:1", "x-forwarded-for", "192.0.2.1", 200),
        ("10.0.0.2:2", "x-forwarded-for", "6.6.6.6, 192.0.2.1", 429),
        ("192.0.2.1:3", "x-forwarded-for", "192.0.2.9", 429),
        ("192.0.2.2:4", "x-key", "acme.one", 200),
        ("192.0.2.3:5", "x-key", "acme.two", 429),
        ("192.0.2.3:5", "x-key", "other.two", 200),
    ] {
        let mut request = get("/");
        let peer: SocketAddr = peer.parse().unwrap();
        request.extensions_mut().insert(Peer(peer));
        request.headers_mut().insert(header, value.parse().unwrap());
        let answer = send(&mut service, request).await;
        assert_eq!(answer.status, expected, "{peer} {value}: {}", answer.body);
    }
}

#[tokio::test]
async fn the_cost_comes_from_the_layer_a_function_or_an_entry() {
    let limits = || limiter(vec![fixed("all", "10/h")]);
    let mut fixed_cost = RateLimitLayer::new(limits())
        .cost(Cost::new(6).unwrap())
        .layer(Notes::default());
    assert_eq!(statuses(&mut fixed_cost, "/", 2).await, [200, 429]);
    let mut by_path = RateLimitLayer::new(limits())
        .cost_by(|request| Cost::new(request.uri.path().len() as u64).unwrap())
        .layer(Notes::default());
    assert_eq!(statuses(&mut by_path, "/12345678", 2).await, [200, 429]);
    assert_eq!(statuses(&mut by_path, "/", 2).await, [200, 429]);
    let by_entry = fixed("all", "10/h").costing(CostSource::Entry("query.n".into()));
    let (_, mut service) = limited(vec![by_entry.unwrap()]);
    assert_eq!(statuses(&mut service, "/?n=7", 2).await, [200, 429]);
    assert_eq!(statuses(&mut service, "/?n=3", 1).await, [200]);
}

#[tokio::test]
async fn a_shadow_layer_never_denies() {
    let (notes, mut service) = limited(vec![fixed("all", "1/h").in_mode(Mode::Shadow)]);
    assert_eq!(statuses(&mut service, "/", 3).await, [200, 200, 200]);
    assert_eq!(notes.paths().len(), 3);
    let answer = send(&mut service, get("/")).await;
    assert_eq!(answer.header("ratelimit"), None);
}

#[tokio::test]
async fn rules_are_swapped_between_requests() {
    let limiter = limiter(vec![fixed("all", "1/h")]);
    let mut service = RateLimitLayer::new(limiter.clone()).layer(Notes::default());
    assert_eq!(statuses(&mut service, "/", 2).await, [200, 429]);
    let rules = vec![fixed("all", "2/h")];
    limiter.swap_rules(tidegate_core::RuleSet::build(rules, Vec::new()).unwrap());
    assert_eq!(statuses(&mut service, "/", 2).await, [200, 429]);
}

/// A tower `Buffer` or a server may send a service to another thread.
#[tokio::test]
async fn the_service_and_its_responses_are_send() {
    fn sendable<T: Send + 'static>(value: T) -> T {
        value
    }
    let (_, service) = limited(vec![fixed("all", "1/h")]);
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    shared(&service);
    let mut service = sendable(service);
    let future = sendable(service.ready().await.unwrap().call(get("/")));
    assert_eq!(future.await.unwrap().status(), 200);
}
