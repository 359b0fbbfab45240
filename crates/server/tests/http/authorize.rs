//! `ANY /v1/authorize`, asked as nginx, Caddy and Traefik ask.

use crate::{door::Door, wire::assert_problem};

const RULES: &str = "
rules:
  - name: login
    when: {path: /login, method: POST}
    key: [ip]
    limits: [{algorithm: fixed_window, limit: 1, window: 1min}]
";

const NGINX: &str =
    "x-original-method: POST\r\nx-original-uri: /login?next=/\r\nx-real-ip: 203.0.113.9\r\n";
const CADDY: &str = "x-forwarded-method: POST\r\nx-forwarded-uri: /login\r\nx-forwarded-host: a.example\r\nx-forwarded-for: 203.0.113.9\r\n";

#[test]
fn proxies_are_answered_by_what_they_forward() {
    for (line, headers) in [
        ("GET /v1/authorize", NGINX),
        ("GET /v1/authorize?proxy=nginx", NGINX),
        ("GET /v1/authorize", CADDY),
        ("POST /v1/authorize?proxy=caddy", CADDY),
        ("GET /v1/authorize?proxy=traefik", CADDY),
    ] {
        let door = Door::open(RULES);
        let mut proxy = door.connect();
        let first = proxy.ask(line, headers, b"");
        assert_eq!(first.status, 200, "{line}: {first:?}");
        assert_eq!(first.json()["rule"], "login", "{line}");
        let second = proxy.ask(line, headers, b"");
        assert_eq!(second.status, 429, "{line}: {second:?}");
        assert_eq!(second.header("retry-after"), Some("60"));
        let other = headers.replace("203.0.113.9", "203.0.113.10");
        assert_eq!(proxy.ask(line, &other, b"").status, 200, "{line}");
    }
}

#[test]
fn a_proxy_may_choose_the_status_of_a_denial() {
    let door = Door::open(RULES);
    let mut proxy = door.connect();
    assert_eq!(
        proxy.ask("GET /v1/authorize?deny=403", NGINX, b"").status,
        200
    );
    assert_eq!(
        proxy.ask("GET /v1/authorize?deny=403", NGINX, b"").status,
        403
    );
    for query in ["deny=200", "deny=x", "proxy=apache", "hops=99", "what=1"] {
        let reply = proxy.ask(&format!("GET /v1/authorize?{query}"), NGINX, b"");
        let name = query.split('=').next().unwrap();
        assert_problem(&reply, 400, &[name]);
    }
}
