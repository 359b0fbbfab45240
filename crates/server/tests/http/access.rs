//! Tests of authentication and cross-site protection.

use crate::{
    access_cases::{AUTHORIZATIONS, PAGES, assert_access, assert_guesses_are_limited},
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
            assert_access(&answer, is_right, (header, method, path));
        }
    }
    // In a forward-auth request, `Authorization` belongs to the client's request.
    let headers = [
        ("authorization", "Bearer the client's own"),
        ("tidegate-token", "secret"),
    ];
    assert_eq!(ask("GET", "/v1/authorize", &headers).status, 200);
    assert_guesses_are_limited(|| ask("GET", "/v1/authorize", &headers[..1]));
}

#[test]
fn cross_site_browser_requests_are_rejected() {
    let listener = TestListener::open("");
    for (header, status) in PAGES {
        let answer = listener
            .connect()
            .ask("POST", "/v1/throttle", &[header], BODY.as_bytes());
        assert_eq!(answer.status, status, "{header:?}");
        // The headers of a forward-auth request are those of a browser's request to another
        // service.
        assert_eq!(listener.authorize("", &[header]).status, 200, "{header:?}");
    }
}
