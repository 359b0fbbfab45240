//! Tests of the sections `grpc` and `quotas`, which are for Envoy over gRPC.

use tidegate_config::{Config, Grpc};

use crate::mistakes;

#[test]
fn the_grpc_settings_are_read() {
    let config = Config::parse("").unwrap();
    assert_eq!(config.listen.grpc.unwrap().port(), 8081);
    assert_eq!(config.grpc, Grpc::default());
    assert!(!config.grpc.authorization, "the rules are not exposed");
    let config = Config::parse(
        "grpc:
  authorization: true
  tls: {certificate: server.pem, key: server.key, client_ca: clients.pem}
  keep_alive: 5s
  keep_alive_timeout: 500ms
  max_connection_age: 1h
  max_connection_age_grace: 1min
  max_streams: 8
",
    );
    let grpc = config.unwrap().grpc;
    assert!(grpc.authorization);
    let tls = grpc.tls.unwrap();
    assert_eq!(tls.certificate.to_str(), Some("server.pem"));
    assert_eq!(tls.key.to_str(), Some("server.key"));
    assert_eq!(tls.client_ca.unwrap().to_str(), Some("clients.pem"));
    let times = [
        grpc.keep_alive,
        grpc.keep_alive_timeout,
        grpc.max_connection_age,
        grpc.max_connection_age_grace,
    ];
    assert_eq!(
        times.map(|time| time.as_millis()),
        [5_000, 500, 3_600_000, 60_000]
    );
    assert_eq!(grpc.max_streams, 8);
}

#[test]
fn mistakes_in_the_grpc_settings_are_reported() {
    let file = "grpc: {authorization: 1, keep_alive: 400d, max_connection_age: never, max_streams: 0, tls: {key: a, client: b}}";
    assert_eq!(
        mistakes(file),
        [
            "grpc.keep_alive (line 1): must be 1ms to 366d",
            "grpc.max_connection_age (line 1): expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"never\"",
            "grpc.max_streams (line 1): must be 1 to 100000",
            "grpc.authorization (line 1): expected true or false, got the number 1",
            "grpc.tls.client (line 1): unknown key `client`; did you mean `client_ca`?",
            "grpc.tls.certificate (line 1): is missing; name a PEM file",
        ]
    );
}

#[test]
fn quotas_are_read() {
    let config = Config::parse(
        "quotas:
  - {name: keys, domain: shop, bucket: {service: shop, api_key: '*'}, limit: 100/s}
  - {name: all, domain: shop, limit: 5/10min}
",
    );
    let quotas = config.unwrap().quotas;
    assert_eq!((&*quotas[0].name, &*quotas[0].domain), ("keys", "shop"));
    assert_eq!(quotas[0].limit.requests, 100);
    assert_eq!(quotas[1].limit.period.to_string(), "10min");
    let id = |pairs: &[(&str, &str)]| {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    };
    let alice = id(&[("service", "shop"), ("api_key", "alice"), ("zone", "eu")]);
    assert!(quotas[0].applies("shop", &alice));
    assert!(!quotas[0].applies("blog", &alice));
    assert!(!quotas[0].applies("shop", &id(&[("service", "shop")])));
    assert!(quotas[1].applies("shop", &id(&[])));
}

#[test]
fn mistakes_in_quotas_are_reported() {
    let file = "quotas:
  - {name: a, domain: '', limit: 5000000000/s}
  - {name: a, domain: shop, limit: 1/500ms, bucket: [service]}
  - {limit: 1/400d, bucket: {service: {cidr: x}}}
  - {name: b, domain: shop, limt: 1/s}
";
    assert_eq!(
        mistakes(file),
        [
            "quotas[0].domain (line 2): must not be empty",
            "quotas[0].limit (line 2): a quota must be at most 4294967295 requests per period",
            "quotas[1].name (line 3): is already the name of an earlier quota; give each quota its own name",
            "quotas[1].bucket (line 3): expected a map such as {service: shop, api_key: \"*\"}, got a list",
            "quotas[1].limit (line 3): the period of a quota must be a whole number of seconds",
            "quotas[2].name (line 4): is missing; every quota has a name, a domain and a limit",
            "quotas[2].domain (line 4): is missing; every quota has a name, a domain and a limit",
            "quotas[2].bucket.service.cidr (line 4): expected a network such as 10.0.0.0/8 or 2001:db8::/32, got \"x\"",
            "quotas[2].limit (line 4): the period of a quota must be at most 366 days",
            "quotas[3].limt (line 5): unknown key `limt`; did you mean `limit`?",
        ]
    );
    let config = Config::parse("{listen: {grpc: off}, quotas: [{name: a, domain: b, limit: 1/s}]}");
    assert_eq!(config.unwrap().warnings[0].path, "quotas");
}
