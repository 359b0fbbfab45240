//! Tests of authentication and cross-site protection.

use crate::{
    access_cases::{
        AUTHORIZATIONS, PAGES, REBOUND_PAGES, assert_access, assert_guesses_are_limited,
    },
    listener::TestListener,
};

const BODY: &str = r#"{"key": "k", "algorithm": "gcra", "rate": "1/h", "burst": 99}"#;
const GUARDED: &str = "listen: {http: {address: '127.0.0.1:0', token: secret}}";

#[test]
fn with_a_token_only_requests_with_it_are_allowed() {
    let listener = TestListener::open(GUARDED);
    let ask = |method: &str, path: &str, headers: &[(&str, &str)]| {
        listener
            .connect()
            .ask(method, path, headers, BODY.as_bytes())
    };
    let authorizations = AUTHORIZATIONS
        .map(|(shown, is_right)| (shown.map(|shown| ("authorization", shown)), is_right));
    let tokens = [
        (Some(("tidegate-token", "wrong")), false),
        (Some(("tidegate-token", "secret")), true),
    ];
    for (minute, (header, is_right)) in (0..).zip(authorizations.into_iter().chain(tokens)) {
        listener.at_millis(minute * 60_000);
        let headers: Vec<_> = header.into_iter().collect();
        for (method, path) in [
            ("POST", "/v1/throttle"),
            ("POST", "/v1/check"),
            ("POST", "/v1/peek"),
            ("GET", "/v1/authorize"),
            ("GET", "/nowhere"),
        ] {
            let answer = ask(method, path, &headers);
            // In a forward-auth request, `Authorization` is a header of the original client
            // request.
            let is_clients = header.is_some_and(|(name, _)| name == "authorization");
            let is_right = is_right && !(is_clients && path == "/v1/authorize");
            assert_access(&answer, is_right, (header, method, path));
        }
    }
    assert_guesses_are_limited(|| ask("GET", "/v1/authorize", &[("tidegate-token", "guess")]));
}

/// Regression test: if a client sends ten invalid tokens, the proxy that forwards the client's
/// requests must not be locked out.
#[test]
fn clients_of_a_forward_auth_proxy_cannot_lock_it_out() {
    let listener = TestListener::open(GUARDED);
    let ask = |headers: &[(&str, &str)]| {
        let mut client = listener.connect();
        client.ask("GET", "/v1/authorize", headers, b"").status
    };
    let own = ("tidegate-token", "secret");
    let of_client = [
        ("authorization", "Bearer guess"),
        ("tidegate-token", "guess"),
    ];
    for _ in 0..20 {
        assert_eq!(ask(&of_client[..1]), 401);
        assert_eq!(ask(&[of_client[1], own]), 401);
        assert_eq!(ask(&[own, of_client[1]]), 401);
        assert_eq!(ask(&[own, own]), 401);
    }
    assert_eq!(ask(&[of_client[0], own]), 200);
}

#[test]
fn cross_site_browser_requests_are_rejected() {
    let listener = TestListener::open("");
    for (header, status) in PAGES {
        let answer = listener
            .connect()
            .ask("POST", "/v1/throttle", &[header], BODY.as_bytes());
        assert_eq!(answer.status, status, "{header:?}");
        // In a forward-auth request, the headers come from a browser's request to another service.
        assert_eq!(listener.authorize("", &[header]).status, 200, "{header:?}");
    }
}

/// If an attacker's host name resolves to this machine, the attacker's pages have the same origin
/// as the listener. Only the host name distinguishes requests from the attacker's pages.
#[test]
fn browser_requests_to_unknown_names_are_rejected() {
    let listener = TestListener::open("");
    for (headers, status) in REBOUND_PAGES {
        let mut client = listener.connect();
        let answer = client.ask("POST", "/v1/throttle", headers, BODY.as_bytes());
        assert_eq!(answer.status, *status, "{headers:?}");
    }
    let named = TestListener::open("listen: {http: {address: '127.0.0.1:0', hosts: Evil.Example}}");
    let (headers, _) = REBOUND_PAGES[1];
    let mut client = named.connect();
    let answer = client.ask("POST", "/v1/throttle", headers, BODY.as_bytes());
    assert_eq!(answer.status, 200);
}
