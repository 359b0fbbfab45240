//! Tests of the section `listen`: addresses and other settings of listeners, and secrets that
//! messages must hide.

use std::time::Duration;

use tidegate_config::{Config, Password};

use crate::{PROXY, mistakes};

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
            "listen.resp.username (line 1): has no effect without `password` or `password_env`; set one of the two, or remove `username`",
        ),
        (
            "http: {address: '127.0.0.1:1', max_connections: 0}",
            "listen.http.max_connections (line 1): must be 1 to 1000000",
        ),
        (
            "resp: {address: '127.0.0.1:1', token: a}",
            "listen.resp.token (line 1): unknown key `token`; expected one of address, max_connections, \
             max_connections_per_client, idle_timeout, tls, username, password, password_env, top",
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
    let open = "open-listener: other machines can reach 0.0.0.0:1, and any client there can read and consume the limits of every key";
    for name in ["http", "resp", "grpc"] {
        let found = warnings(&format!("listen: {{{name}: '0.0.0.0:1'}}"));
        let expected = format!("listen.{name} (line 1): {open}; set `");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(&expected), "{found:?}");
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

/// Regression test: messages must not hide store settings that contain no secret, because operators
/// need to see the invalid value.
#[test]
fn values_of_the_store_that_hold_no_secret_are_shown() {
    for (field, expected) in [
        (
            "timeout: 5x",
            "store.timeout (line 1): expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"5x\"",
        ),
        (
            "connections: many",
            "store.connections (line 1): expected a non-negative integer, got \"many\"",
        ),
        (
            "on_failure: opn",
            "store.on_failure (line 1): expected one of open, closed, local, got \"opn\"; did you mean `open`?",
        ),
        (
            "fallback_share: 3",
            "store.fallback_share (line 1): expected a percentage such as 10%, got the number 3",
        ),
        (
            "denial_cache_ttl: soon",
            "store.denial_cache_ttl (line 1): expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"soon\"",
        ),
        (
            "memory: plenty",
            "store.memory (line 1): expected a map such as {max_keys: 1000000}, got \"plenty\"",
        ),
        (
            "tls: on",
            "store.tls (line 1): expected a map such as {ca: ca.pem, cert: client.pem, key: client.key}, got \"on\"",
        ),
    ] {
        assert_eq!(
            mistakes(&format!("store: {{redis: 'redis://h', {field}}}")),
            [expected]
        );
    }
}

#[test]
fn an_address_without_a_host_has_advice() {
    let advice = |port: u16| {
        format!(
            "; write 127.0.0.1:{port} for programs on this machine, or 0.0.0.0:{port} for other machines too"
        )
    };
    for (written, shown) in [
        ("8080", "the number 8080"),
        ("':8080'", "\":8080\""),
        ("'*:8080'", "\"*:8080\""),
        ("'localhost:8080'", "\"localhost:8080\""),
    ] {
        let problem =
            format!("expected an address and port such as 127.0.0.1:8080, or off, got {shown}");
        let expected = format!("listen.http (line 1): {problem}{}", advice(8080));
        assert_eq!(
            mistakes(&format!("listen: {{http: {written}}}")),
            [expected]
        );
        let expected = format!("listen.http.address (line 1): {problem}{}", advice(8080));
        assert_eq!(
            mistakes(&format!("listen: {{http: {{address: {written}}}}}")),
            [expected]
        );
    }
    for other in ["99999", "0", "'10.0.0.1'", "'a.example:80'"] {
        let found = mistakes(&format!("listen: {{http: {other}}}"));
        assert!(found.len() == 1 && !found[0].contains("write"), "{found:?}");
    }
}

#[test]
fn a_file_without_a_listener_is_a_warning() {
    let off = "listen: {http: off, grpc: off, resp: off, admin: off}\n";
    let expected = "listen (line 1): no-listener: every listener is off and there is no `proxy`, so no client can \
        reach this server; enable a listener, or add a `proxy`";
    assert_eq!(warnings(off), [expected]);
    for silent in [
        "rules: []",
        "listen: {http: off, grpc: off, resp: off}",
        "listen: {http: off, grpc: off, admin: off}",
        &format!("{off}{PROXY}"),
    ] {
        assert_eq!(warnings(silent), [""; 0], "{silent}");
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
        "store: {redis: ':hunter2@h:6379'}",
        "store: {redis: {cluster: [':hunter2@h:6379']}}",
        "store: {redis: 'redis://h', timeout: 'redis://:hunter2@h'}",
        "store: {redis: 'redis://h', on_failure: 'redis://:hunter2@h'}",
        "store: {redis: 'redis://h', password: [hunter2]}",
        "store: {redis: 'redis://h', password_env: {hunter2: a}}",
        "store: {memory: 'redis://:hunter2@h'}",
        "store: ['redis://:hunter2@h']",
        "admin: hunter2",
        "admin: {token: [hunter2]}",
        "admin: {token_env: 'hunter2='}",
        "privacy: hunter2",
        "privacy: {keys: hashed, secret: [hunter2]}",
        "privacy: {keys: hashed, secret: {hunter2: a}}",
        "privacy: {keys: hashed, secret_env: 'hunter2='}",
        "listen: {resp: {address: '127.0.0.1:1', password: 'hunter2 hunter2'}}",
        "listen: 'redis://:hunter2@h'",
        "listen: {http: 'http://me:hunter2@h'}",
        "rules: 'redis://:hunter2@h'",
        "rules: [{name: a, limits: ['redis://:hunter2@h']}]",
        "proxy: {listen: '127.0.0.1:1', upstreams: [{name: a, urls: ['http://me:hunter2@h/x']}]}",
        "'redis://:hunter2@h': 1",
    ] {
        let found = mistakes(text).join("\n");
        assert!(!found.contains("hunter2"), "{text}: {found}");
        assert!(!found.is_empty());
    }
}

/// The audit log identifies tokens by their names, and the server identifies them by their secrets,
/// so both must be unique.
#[test]
fn the_tokens_of_operators_have_their_own_names_and_secrets() {
    let file = "admin:
  token: first
  tokens:
    - {name: local, token_env: A}
    - {name: SIGHUP, token_env: B}
    - {name: alice, token: first}
    - {name: bob, token_env: A}
    - {name: carol, token: second}
    - {name: dave, token_env: C}
";
    let reserved =
        "is reserved: the audit log uses it for changes made without a token; choose another name";
    let twin = "is also the secret of another token; give each token its own secret";
    assert_eq!(
        mistakes(file),
        [
            format!("admin.tokens[0].name (line 4): {reserved}"),
            format!("admin.tokens[1].name (line 5): {reserved}"),
            format!("admin.tokens[2].token (line 6): {twin}"),
            format!("admin.tokens[3].token_env (line 7): {twin}"),
        ]
    );
}

/// By default, the number of connections is limited. The documentation states the same default
/// limits.
#[test]
fn connections_are_limited_by_default() {
    let config = Config::parse(PROXY).unwrap();
    let listeners = &config.listeners;
    for listener in [&listeners.http, &listeners.grpc, &listeners.resp] {
        let limits = (
            listener.max_connections,
            listener.max_connections_per_client,
        );
        assert_eq!(limits, (10_000, 1_000));
    }
    let admin = &listeners.admin;
    assert_eq!(
        (admin.max_connections, admin.max_connections_per_client),
        (128, 128)
    );
    let proxy = config.proxy.unwrap();
    assert_eq!(
        (proxy.max_connections, proxy.max_connections_per_client),
        (10_000, 1_000)
    );
}
