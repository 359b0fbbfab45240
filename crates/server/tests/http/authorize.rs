//! Tests of `ANY /v1/authorize`.

use tidegate_core::Span;

use crate::listener::TestListener;

const RULES: &str = "
headers: {rule_names: true}
rules:
  - name: login
    when: {path: /login, method: POST}
    key: [ip]
    limits: [1/h]
  - name: api
    when: {path: /api/**}
    key: [customer]
    limits: [1/h]
  - name: tokens
    when: {header.Authorization: {present: true}, host: api.example.org}
    key: [header.authorization]
    limits: [1/h]
";

const LOGIN: [(&str, &str); 2] = [
    ("x-original-method", "POST"),
    ("x-original-uri", "/login?next=/"),
];

#[test]
fn nginx_subrequests_are_answered() {
    let listener = TestListener::open(RULES);
    let from = |ip: &str| {
        let headers = [
            LOGIN[0],
            LOGIN[1],
            ("x-real-ip", ip),
            ("x-forwarded-for", "6.6.6.6"),
        ];
        listener.authorize("", &headers)
    };
    let allowed = from("203.0.113.9");
    assert_eq!((allowed.status, allowed.rule()), (200, Some("login")));
    // With a body, nginx could not use the connection again.
    assert_eq!(
        (&*allowed.body, allowed.header("content-length")),
        ("", Some("0"))
    );
    assert_eq!(allowed.header("ratelimit"), Some(r#""login";r=0;t=3600"#));
    let denied = from("203.0.113.9");
    assert_eq!(
        (denied.status, denied.header("retry-after")),
        (429, Some("3600"))
    );
    assert_eq!(from("203.0.113.10").status, 200);
}

/// A proxy such as nginx can then write the rule and the key to its access log.
#[test]
fn the_rule_and_the_key_are_named_if_the_proxy_logs_them() {
    let listener = TestListener::open(
        "rules: [{name: per customer, when: {path: /api/**}, key: [customer, method], limits: [1/h]}]",
    );
    let ask = |query: &str, path: &str| {
        let headers = [
            ("x-original-method", "GET"),
            ("x-original-uri", path),
            ("x-customer", "a,b é"),
        ];
        let answer = listener.authorize(query, &headers);
        let header = |name| answer.header(name).map(str::to_owned);
        (
            answer.status,
            header("tidegate-rule"),
            header("tidegate-key"),
        )
    };
    let rule = Some("per%20customer".to_owned());
    let key = Some("a%2Cb%20%C3%A9,GET".to_owned());
    assert_eq!(
        ask("?log=rule,key", "/api/a"),
        (200, rule.clone(), key.clone())
    );
    assert_eq!(ask("?log=key", "/api/a"), (429, None, key));
    assert_eq!(ask("?log=rule", "/api/a"), (429, rule, None));
    assert_eq!(ask("", "/api/a"), (429, None, None));
    assert_eq!(ask("?log=rule,key", "/other"), (200, None, None));
}

/// Caddy and Traefik pass the body of a denial on to the client, so the body must not contain a
/// rule name.
#[test]
fn responses_that_a_proxy_may_forward_name_no_rule() {
    let rules = "rules:\n  - {name: secret-fraud-rule, limits: [1/h]}\n  - {name: secret-key, key: [customer], limits: [1/h]}\n  - {name: secret-trial, limits: [5/h], mode: shadow}\n";
    let listener = TestListener::open(rules);
    let state = Some(r#""1/h";r=0;t=3600"#);
    let allowed = listener.authorize("", &LOGIN);
    assert_eq!((allowed.status, allowed.header("ratelimit")), (200, state));
    let denied = listener.authorize("", &LOGIN);
    assert_eq!((denied.status, denied.header("ratelimit")), (429, state));
    let body = denied.json();
    assert_eq!(body["limits"].as_array().unwrap().len(), 1, "{body}");
    let body = body.to_string();
    assert!(!body.contains("secret") && !body.contains("rule"), "{body}");
    let long = "x".repeat(2_000);
    let refused = listener.authorize("", &[("x-customer", &long)]);
    assert_eq!(refused.status, 400);
    let detail = refused.problem();
    assert!(
        detail.starts_with("entries.customer: makes a key of "),
        "{detail}"
    );
    assert!(!detail.contains("secret"), "{detail}");
}

#[test]
fn a_block_says_when_it_ends() {
    let listener = TestListener::open(RULES);
    let (rules, now) = (listener.limiter.rules(), listener.limiter.now());
    let key = rules.rule("login").unwrap().encode_key(&["203.0.113.9"]);
    let (key, span) = (key.unwrap(), Some(Span::from_secs(90)));
    assert!(listener.limiter.local_store().block(&key, span, "", now));
    let client = [("x-real-ip", "203.0.113.9")];
    let denied = listener.authorize("", &[&LOGIN[..], &client].concat());
    assert_eq!(
        (denied.status, denied.header("retry-after")),
        (429, Some("90"))
    );
    assert_eq!(denied.json()["retry_after_ms"], 90_000);
}

#[test]
fn caddy_and_traefik_are_answered_for_every_method() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect();
    let headers = [
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", "/login"),
        ("x-forwarded-for", "6.6.6.6, 203.0.113.9"),
        ("x-real-ip", "7.7.7.7"),
    ];
    assert_eq!(
        client.ask("GET", "/v1/authorize", &headers, b"").status,
        200
    );
    for method in ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        assert_eq!(
            client.ask(method, "/v1/authorize", &headers, b"").status,
            429,
            "{method}"
        );
    }
}

#[test]
fn a_proxy_can_choose_the_denial_status() {
    let listener = TestListener::open(RULES);
    assert_eq!(listener.authorize("?deny=403", &LOGIN).status, 200);
    let denied = listener.authorize("?deny=403", &LOGIN);
    assert_eq!(
        (denied.status, &denied.json()["reason"]),
        (403, &"limit".into())
    );
    assert_eq!(
        listener
            .authorize("?deny=503&proxy=nginx&hops=0", &LOGIN)
            .status,
        503
    );
    for (query, expected) in [
        (
            "?deny=200",
            "deny: must be a status from 400 to 599, such as 403",
        ),
        (
            "?deny=x",
            "deny: must be a status from 400 to 599, such as 403",
        ),
        (
            "?proxy=apache",
            "proxy: must be nginx, caddy, traefik or envoy",
        ),
        ("?hops=-1", "hops: must be a number from 0 to 16"),
        (
            "?proxy=envoy",
            "path: is missing; set `path_prefix: /v1/authorize?proxy=envoy&path=` in the configuration of Envoy, with `path=` at the end",
        ),
        (
            "?proxy=envoy/login?next=/",
            "proxy: must be nginx, caddy, traefik or envoy",
        ),
        (
            "?proxy=nginx&path=/login",
            "path: is an option of proxy=envoy; remove it, or add proxy=envoy before it",
        ),
        (
            "?denny=403",
            "query: unknown option `denny`; the options are deny, hops, log, path, proxy and reserve",
        ),
        ("?log=rule,keys", "log: must be rule, key or rule,key"),
        (
            "?log=rule&log=key",
            "query: the option `log` is repeated; give each option once",
        ),
    ] {
        let refused = listener.authorize(query, &LOGIN);
        assert_eq!(
            (refused.status, refused.problem().as_str()),
            (400, expected),
            "{query}"
        );
    }
}

#[test]
fn headers_of_two_proxies_are_rejected() {
    let listener = TestListener::open(RULES);
    let headers = [LOGIN[0], LOGIN[1], ("x-forwarded-uri", "/harmless")];
    let refused = listener.authorize("", &headers);
    assert_eq!(refused.status, 400);
    let problem = refused.problem();
    assert!(
        problem.starts_with("x-original-uri and x-forwarded-uri are both present"),
        "{problem}"
    );
    let nginx = listener.authorize("?proxy=nginx", &headers);
    assert_eq!((nginx.status, nginx.rule()), (200, Some("login")));
    let caddy = listener.authorize("?proxy=caddy", &headers);
    assert_eq!((caddy.status, caddy.rule()), (200, None));
}

/// Envoy appends the client's request target to the URL of the authorization request, and copies
/// the client's method and host.
#[test]
fn envoy_requests_are_answered() {
    let listener = TestListener::open(RULES);
    let ask = |method: &str, query: &str, headers: &[(&str, &str)]| {
        let path = format!("/v1/authorize{query}");
        let answer = listener.connect().ask(method, &path, headers, b"");
        (answer.status, answer)
    };
    let login = "?proxy=envoy&path=/login?next=/";
    let client = [("x-forwarded-for", "6.6.6.6,203.0.113.9")];
    let (status, allowed) = ask("POST", login, &client);
    assert_eq!(status, 200);
    assert_eq!(allowed.header("ratelimit"), Some(r#""login";r=0;t=3600"#));
    // The following have no effect: options in the client's target, headers that other proxies use,
    // and additional addresses in the client's `X-Forwarded-For`.
    for (query, client) in [
        (login, "7.7.7.7,203.0.113.9"),
        (
            "?proxy=envoy&path=//login?x&hops=1&deny=503&path=/a",
            "7.7.7.7,203.0.113.9",
        ),
    ] {
        let headers = [
            ("x-forwarded-for", client),
            ("x-original-uri", "/a"),
            ("x-forwarded-uri", "/a"),
            ("x-forwarded-method", "GET"),
            ("x-real-ip", "8.8.8.8"),
        ];
        let (status, denied) = ask("POST", query, &headers);
        assert_eq!(status, 429, "{query}");
        assert_eq!(denied.header("retry-after"), Some("3600"));
    }
    assert_eq!(ask("GET", login, &client).0, 200, "another method");
    let api = "?proxy=envoy&deny=403&path=/api/orders";
    let customer = |value| ask("GET", api, &[("x-customer", value)]).0;
    assert_eq!(customer("acme"), 200);
    // If a header has several lines, Envoy joins their values with commas.
    assert_eq!(customer("acme,acme"), 403);
    assert_eq!(customer("acme,other"), 403);
    assert_eq!(customer("acme, inc"), 200);
}

/// If Envoy has joined too many header lines into one, the request is rejected, as it is over gRPC.
/// If the excess lines were dropped instead, the customer would be missing, and no rule would
/// apply.
#[test]
fn an_envoy_request_with_too_many_header_lines_is_rejected() {
    let listener = TestListener::open(RULES);
    let ask = |commas: usize| {
        let junk = ",".repeat(commas);
        let headers = [("a-junk", &*junk), ("x-customer", "acme")];
        let path = "/v1/authorize?proxy=envoy&path=/api/orders";
        listener.connect().ask("GET", path, &headers, b"")
    };
    assert_eq!(ask(900).rule(), Some("api"));
    let refused = ask(1_000);
    assert_eq!(refused.status, 400);
    let text = &refused.body;
    assert!(text.contains("more than 1000 header lines"), "{text}");
}

#[test]
fn headers_are_entries() {
    let listener = TestListener::open(RULES);
    let api = [("x-forwarded-uri", "/api/v1"), ("x-customer", "acme")];
    assert_eq!(listener.authorize("", &api).rule(), Some("api"));
    assert_eq!(listener.authorize("", &api).status, 429);
    let bearer = [
        ("authorization", "Bearer x"),
        ("x-forwarded-host", "API.example.org:443"),
    ];
    assert_eq!(listener.authorize("", &bearer).rule(), Some("tokens"));
    assert_eq!(listener.authorize("", &bearer).status, 429);
}

#[test]
fn an_empty_header_is_not_an_entry() {
    let listener = TestListener::open(RULES);
    let anonymous = [("x-forwarded-uri", "/api/v1"), ("x-customer", "")];
    for _ in 0..2 {
        let answer = listener.authorize("", &anonymous);
        assert_eq!((answer.status, answer.rule()), (200, None));
    }
}

#[test]
fn a_path_in_another_spelling_is_the_same_path() {
    let listener = TestListener::open(RULES);
    for (uri, status) in [
        ("/login", 200),
        ("/%6Cogin", 429),
        ("/%6c%6Fgin?a", 429),
        ("/x/..//../login", 400),
        ("/./login?a", 400),
        ("/api/%2e%2e/login", 400),
    ] {
        let headers = [LOGIN[0], ("x-original-uri", uri)];
        assert_eq!(listener.authorize("", &headers).status, status, "{uri}");
    }
}

#[test]
fn cookies_and_routes_have_one_spelling() {
    let listener = TestListener::open(
        "
rules:
  - {name: session, when: {path: /session}, key: [cookie.session], limits: [1/h]}
  - {name: login, when: {path: {route: /sign-in}}, key: [ip], limits: [1/h]}
",
    );
    for (uri, cookie, status) in [
        ("/session", "session=abc", 200),
        ("/session", "session=abc", 429),
        ("/session", "session=%61bc", 400),
        ("/sign-in", "a=b", 200),
    ] {
        let headers = [
            ("x-original-uri", uri),
            ("x-real-ip", "203.0.113.9"),
            ("cookie", cookie),
        ];
        let answer = listener.authorize("", &headers);
        assert_eq!(answer.status, status, "{uri} {cookie}");
    }
    for uri in [
        "/SIGN-IN",
        "/sign-in/",
        "/sign-in;v=1",
        "/sign%2Din",
        "/sign-in%20",
    ] {
        let headers = [("x-original-uri", uri), ("x-real-ip", "203.0.113.9")];
        assert_eq!(listener.authorize("", &headers).status, 429, "{uri}");
    }
}

/// nginx treats a 400 from forward-auth as a configuration error and returns 500.
#[test]
fn an_ambiguous_request_is_rejected_with_a_status_the_proxy_forwards() {
    let listener = TestListener::open(RULES);
    let dots = [LOGIN[0], ("x-original-uri", "/x/../login")];
    let answer = listener.authorize("?deny=403", &dots);
    assert_eq!(answer.status, 403);
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.starts_with("path: "), "{detail}");
    let twice = [
        ("x-forwarded-uri", "/api/v1"),
        ("x-customer", "acme"),
        ("x-customer", "random"),
    ];
    let answer = listener.authorize("", &twice);
    assert_eq!(answer.status, 400);
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert_eq!(detail, "customer: has several values; send one");
}

#[test]
fn an_invalid_key_is_rejected_with_a_status_the_proxy_forwards() {
    let listener = TestListener::open(
        "
rules:
  - {name: keys, when: {header.x-key: {present: true}}, key: [header.x-key], limits: [3/h]}
  - {name: costs, key: [header.x-c], cost: header.x-n, limits: [300/h]}
",
    );
    let long = "k".repeat(1_100);
    let asks: [&[(&str, &str)]; 3] = [
        &[("x-original-uri", "/"), ("x-key", &long)],
        &[("x-original-uri", "/"), ("x-c", "1")],
        &[("x-original-uri", "/"), ("x-c", "1"), ("x-n", "abc")],
    ];
    for headers in asks {
        assert_eq!(listener.authorize("", headers).status, 400, "{headers:?}");
        let answer = listener.authorize("?deny=403", headers);
        assert_eq!(answer.status, 403, "{headers:?}");
        assert_eq!(answer.json()["status"], 403);
    }
}

#[test]
fn hops_are_counted_from_the_right() {
    let listener = TestListener::open(RULES);
    let from = |query: &str, list: &str| {
        let headers = [
            ("x-forwarded-method", "POST"),
            ("x-forwarded-uri", "/login"),
            ("x-forwarded-for", list),
        ];
        listener.authorize(query, &headers).status
    };
    assert_eq!(from("?hops=1", "6.6.6.6, 203.0.113.9, 10.0.0.1"), 200);
    assert_eq!(from("?hops=1", "7.7.7.7, 203.0.113.9, 10.0.0.1"), 429);
    assert_eq!(
        from("", "7.7.7.7, 203.0.113.9, 10.0.0.1"),
        200,
        "the last is 10.0.0.1"
    );
    assert_eq!(
        from("?hops=9", "203.0.113.9"),
        200,
        "the list is too short: the peer is used"
    );
}
