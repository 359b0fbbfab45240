//! `listen`: addresses and other settings of listeners, and secrets that messages must hide.

use std::time::Duration;

use tidegate_config::{Config, Password};

use crate::mistakes;

fn warnings(text: &str) -> Vec<String> {
    let config = Config::parse(text).unwrap();
    config.warnings.iter().map(ToString::to_string).collect()
}

#[test]
fn a_listener_is_an_address_or_a_map() {
    let text = "
listen:
  http: {address: '127.0.0.1:8000', token_env: HTTP_TOKEN, max_connections: 500, hosts: [Limits.Internal, a_b], tls: {certificate: a.pem, key: a.key}}
  resp: {address: '127.0.0.1:6000', username: app, password: secret, idle_timeout: 5min}
  grpc: {address: off}
  admin: {address: '127.0.0.1:9000', max_connections_per_client: 7}
";
    let config = Config::parse(text).unwrap();
    let at = |address: Option<std::net::SocketAddr>| address.map(|address| address.port());
    let listen = &config.listen;
    assert_eq!(
        [listen.http, listen.resp, listen.grpc, listen.admin].map(at),
        [Some(8000), Some(6000), None, Some(9000)]
    );
    let listeners = &config.listeners;
    assert_eq!(listeners.http.max_connections, 500);
    assert_eq!(listeners.http.max_connections_per_client, 1_000);
    assert_eq!(
        listeners.http.credential,
        Password::Env("HTTP_TOKEN".into())
    );
    assert!(listeners.http.tls.is_some());
    assert_eq!(listeners.http.hosts, ["limits.internal", "a_b"]);
    assert_eq!(
        listeners.resp.credential,
        Password::Literal("secret".into())
    );
    assert_eq!(listeners.resp.username.as_deref(), Some("app"));
    assert_eq!(listeners.resp.idle_timeout, Some(Duration::from_secs(300)));
    assert_eq!(listeners.resp.max_connections, 10_000);
    let admin = &listeners.admin;
    assert_eq!(
        (admin.max_connections, admin.max_connections_per_client),
        (128, 7)
    );
    assert!(!format!("{config:?}").contains("secret"));
}

#[test]
fn mistakes_in_a_listener_are_reported() {
    for (listener, expected) in [
        (
            "http: {address: '127.0.0.1:8000', hosts: ['limits.internal:8080']}",
            "listen.http.hosts[0] (line 1): expected a host name without port, such as limits.internal, got \"limits.internal:8080\"",
        ),
        (
            "http: {token: a}",
            "listen.http.address (line 1): is missing; write an address and port such as 127.0.0.1:8080",
        ),
        (
            "resp: {address: '127.0.0.1:1', username: a}",
            "listen.resp.username (line 1): has no effect without `password` or `password_env`; add one, or remove it",
        ),
        (
            "http: {address: '127.0.0.1:1', max_connections: 0}",
            "listen.http.max_connections (line 1): must be 1 to 1000000",
        ),
        (
            "resp: {address: '127.0.0.1:1', token: a}",
            "listen.resp.token (line 1): unknown key `token`; expected one of address, max_connections, \
             max_connections_per_client, idle_timeout, tls, username, password, password_env",
        ),
        (
            "grpc: {address: '127.0.0.1:1', idle_timeout: soon}",
            "listen.grpc.idle_timeout (line 1): expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"soon\"",
        ),
    ] {
        assert_eq!(mistakes(&format!("listen: {{{listener}}}")), [expected]);
    }
}

#[test]
fn a_public_listener_without_authentication_is_a_warning() {
    let open = "open-listener: other machines can reach 0.0.0.0:1, and any client there can read and spend the limits of every key";
    for name in ["http", "resp", "grpc"] {
        let said = warnings(&format!("listen: {{{name}: '0.0.0.0:1'}}"));
        let expected = format!("listen.{name} (line 1): {open}; set `");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with(&expected), "{said:?}");
    }
    let tls = "{certificate: a.pem, key: a.key, client_ca: ca.pem}";
    for guarded in [
        "listen: {http: {address: '0.0.0.0:1', token: a}}".to_owned(),
        "listen: {resp: {address: '0.0.0.0:1', password_env: P}}".to_owned(),
        format!("listen: {{http: {{address: '0.0.0.0:1', tls: {tls}}}}}"),
        format!("listen: {{grpc: '0.0.0.0:1'}}\ngrpc: {{tls: {tls}}}"),
        "listen: {http: '[::1]:1', resp: '127.9.9.9:1'}".to_owned(),
        "listen: {http: off}".to_owned(),
    ] {
        assert_eq!(warnings(&guarded), Vec::<String>::new(), "{guarded}");
    }
}

#[test]
fn no_message_shows_a_possible_secret() {
    for text in [
        "store: \"redis://:hunter2@h\"",
        "store: hunter2",
        "store: {redis: {cluster: {a: 'redis://:hunter2@h'}}}",
        "store: {redis: 'redis://:hunter2@h:port'}",
        "store: {redis: 'http://:hunter2@h'}",
        "store: {'redis://:hunter2@h': 1}",
        "store: {redis: 'redis://h', timeout: hunter2}",
        "store: {redis: 'redis://h', on_failure: hunter2}",
        "store: {memory: 'redis://:hunter2@h'}",
        "store: ['redis://:hunter2@h']",
        "admin: hunter2",
        "admin: {token: [hunter2]}",
        "admin: {token_env: 'hunter2='}",
        "listen: {resp: {address: '127.0.0.1:1', password: 'hunter2 hunter2'}}",
        "listen: 'redis://:hunter2@h'",
        "listen: {http: 'http://me:hunter2@h'}",
        "rules: 'redis://:hunter2@h'",
        "rules: [{name: a, limits: ['redis://:hunter2@h']}]",
        "proxy: {listen: '127.0.0.1:1', upstreams: [{name: a, urls: ['http://me:hunter2@h/x']}]}",
        "'redis://:hunter2@h': 1",
    ] {
        let said = mistakes(text).join("\n");
        assert!(!said.contains("hunter2"), "{text}: {said}");
        assert!(!said.is_empty());
    }
}
