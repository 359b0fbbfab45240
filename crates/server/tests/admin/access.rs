//! Tests of access control.

use crate::{
    access_cases::{
        AUTHORIZATIONS, PAGES, REBOUND_PAGES, assert_access, assert_guesses_are_limited,
    },
    listener::{KEY, TestListener},
};

#[test]
fn with_a_token_only_requests_with_it_are_allowed() {
    let listener = TestListener::with_token(Some("secret"));
    let block = format!("/v1/blocks/{KEY}");
    for (minute, (shown, is_right)) in (0..).zip(AUTHORIZATIONS) {
        // Attempts with invalid tokens are rate limited, so each attempt is made in a different
        // minute.
        listener.at_secs(60 * minute);
        let headers: Vec<(&str, &str)> = shown
            .map(|shown| ("authorization", shown))
            .into_iter()
            .collect();
        let ask = |method: &str, path: &str| listener.ask_with(method, path, &headers, "");
        for (method, path) in [
            ("GET", "/v1/rules"),
            ("PUT", &block),
            ("DELETE", &block),
            ("GET", "/nowhere"),
        ] {
            let answer = ask(method, path);
            assert_access(&answer, is_right, (shown, method, path));
        }
        for path in ["/healthz", "/readyz", "/metrics"] {
            assert_eq!(
                ask("GET", path).status,
                200,
                "{shown:?} {path}: this is loopback"
            );
        }
    }
    // If the request has a valid token, any `Host` is accepted.
    let headers = [
        ("authorization", "Bearer secret"),
        ("host", "admin.example"),
    ];
    assert_eq!(
        listener.ask_with("GET", "/v1/rules", &headers, "").status,
        200
    );
    assert_eq!(
        listener
            .ask_with("GET", "/metrics", &headers[1..], "")
            .status,
        401
    );
}

#[test]
fn without_a_token_web_pages_are_rejected() {
    let listener = TestListener::open();
    for (headers, status) in [
        (&[("host", "localhost:9090")][..], 200),
        (&[("host", "127.0.0.1:9090")], 200),
        (&[("host", "[::1]:9090")], 200),
        (
            &[("host", "localhost"), ("origin", "http://localhost:3000")],
            200,
        ),
        (&[("host", "evil.example")], 403),
        (&[("host", "localhost.evil.example")], 403),
        (&[("host", "caf\u{e9}.example")], 403),
        (&[("host", "")], 403),
        (&[("host", "localhost"), ("host", "evil.example")], 403),
        (&[("host", "localhost"), ("origin", "caf\u{e9}")], 403),
        (&[("host", "127.0.0.1.evil.example")], 403),
        (&[("host", "user@evil.example")], 403),
        (
            &[("host", "localhost"), ("origin", "https://evil.example")],
            403,
        ),
        (&[("host", "localhost"), ("origin", "null")], 403),
    ] {
        for (method, path) in [
            ("GET", "/v1/rules"),
            ("POST", "/v1/reload"),
            ("GET", "/metrics"),
        ] {
            let answer = listener.ask_with(method, path, headers, "");
            assert_eq!(answer.status, status, "{headers:?} {method} {path}");
        }
    }
}

#[test]
fn a_wrong_token_is_not_reported_as_a_missing_one() {
    let listener = TestListener::with_token(Some("secret"));
    let missing = listener.ask("GET", "/v1/rules", "");
    let advice = "send the admin token: `Authorization: Bearer TOKEN`";
    assert_eq!(
        (missing.status, missing.problem()),
        (401, advice.to_owned())
    );
    let headers = [("authorization", "Bearer guess")];
    let wrong = listener.ask_with("GET", "/v1/rules", &headers, "");
    assert_eq!(wrong.status, 401);
    let problem = wrong.problem();
    assert!(problem.starts_with("invalid admin token; "), "{problem}");
}

#[test]
fn token_guesses_are_limited_counted_and_get_retry_after() {
    let listener = TestListener::with_token(Some("secret"));
    let ask = |token: &str| {
        let token = format!("Bearer {token}");
        listener.ask_with("GET", "/v1/rules", &[("authorization", &token)], "")
    };
    assert_guesses_are_limited(|| ask("guess"));
    let limited = ask("secret");
    assert_eq!(
        limited.status, 429,
        "the right token is not accepted among many guesses"
    );
    assert_eq!(limited.header("retry-after"), Some("1"));
    let metrics = listener.ask("GET", "/metrics", "").body;
    for line in [
        r#"tidegate_authentication_failures_total{listener="admin",reason="wrong"} 10"#,
        r#"tidegate_authentication_failures_total{listener="admin",reason="limited"} 3"#,
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    listener.at_secs(1);
    assert_eq!(ask("secret").status, 200);
}

#[test]
fn cross_site_requests_are_rejected_even_with_the_token() {
    let listener = TestListener::with_token(Some("secret"));
    let token = ("authorization", "Bearer secret");
    for (header, status) in PAGES {
        for (method, path) in [("GET", "/v1/rules"), ("GET", "/healthz")] {
            let answer = listener.ask_with(method, path, &[token, header], "");
            assert_eq!(answer.status, status, "{header:?} {method} {path}");
        }
    }
    let open = TestListener::open();
    let fetch = [("host", "localhost"), ("sec-fetch-site", "cross-site")];
    assert_eq!(open.ask_with("GET", "/v1/rules", &fetch, "").status, 403);
}

#[test]
fn browser_requests_to_unknown_names_are_rejected_even_with_the_token() {
    let listener = TestListener::with_token(Some("secret"));
    for (headers, status) in REBOUND_PAGES {
        let headers = [&[("authorization", "Bearer secret")], *headers].concat();
        let answer = listener.ask_with("GET", "/v1/rules", &headers, "");
        assert_eq!(answer.status, *status, "{headers:?}");
    }
    let headers = [
        ("authorization", "Bearer secret"),
        ("host", "limits.internal:8082"),
        ("sec-fetch-site", "none"),
    ];
    let answer = listener.ask_with("GET", "/v1/rules", &headers, "");
    assert_eq!(answer.status, 200);
}
