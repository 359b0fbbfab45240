//! Tests of client identification with the settings `clients` and `entries`.

use crate::listener::TestListener;

const RULES: &str = "
headers: {rule_names: true}
rules:
  - {name: address, when: {path: /address}, key: [ip], limits: [1/h]}
  - {name: api, when: {path: /api}, key: [key_id], limits: [1/h]}
";

fn open(identity: &str) -> TestListener {
    TestListener::open(&format!("{identity}\n{RULES}"))
}

/// Returns whether a request for `/address` with these headers is admitted.
fn passes(listener: &TestListener, query: &str, headers: &[(&str, &str)]) -> bool {
    let headers = [&[("x-forwarded-uri", "/address")], headers].concat();
    listener.authorize(query, &headers).status == 200
}

#[test]
fn networks_of_proxies_are_trusted() {
    let listener = open("clients: {proxies: [10.0.0.0/8, 192.0.2.7]}");
    let from = |list: &str| passes(&listener, "", &[("x-forwarded-for", list)]);
    assert!(from("6.6.6.6, 203.0.113.9, 192.0.2.7, 10.0.0.1"));
    assert!(!from("7.7.7.7, 203.0.113.9, 10.9.9.9"), "the same client");
    assert!(from("7.7.7.7, 203.0.113.10"));
}

#[test]
fn forwarded_and_a_providers_header_are_optional() {
    let listener = open("clients: {header: Forwarded}");
    let from = |value: &str| {
        passes(
            &listener,
            "",
            &[("forwarded", value), ("x-forwarded-for", "6.6.6.6")],
        )
    };
    assert!(from("for=7.7.7.7, for=\"203.0.113.9:1\""));
    assert!(!from("for=203.0.113.9"));
    let listener = open("clients: {header: cf-connecting-ip}");
    let from = |value: &str| {
        passes(
            &listener,
            "",
            &[("cf-connecting-ip", value), ("x-forwarded-for", "6.6.6.6")],
        )
    };
    assert!(from("203.0.113.9") && from("203.0.113.10") && !from("203.0.113.9"));
}

#[test]
fn the_ipv6_prefix_length_is_configurable() {
    let listener = open("clients: {ipv6_prefix: 48}");
    let from = |ip: &str| passes(&listener, "", &[("x-forwarded-for", ip)]);
    assert!(from("2001:db8:1:2::3") && !from("2001:db8:1:4::5") && from("2001:db8:2::"));
}

#[test]
fn hops_in_the_query_override_the_file() {
    let listener = open("clients: {proxies: 1}");
    let from = |query: &str| {
        passes(
            &listener,
            query,
            &[("x-forwarded-for", "203.0.113.9, 198.51.100.1")],
        )
    };
    assert!(from("") && !from("?hops=1"), "203.0.113.9");
    assert!(from("?hops=0"), "198.51.100.1");
}

#[test]
fn an_api_key_is_counted_without_its_secret() {
    let listener = open("entries: {key_id: {of: header.x-api-key, split: \".\"}}");
    let ask = |key: &str| {
        let answer = listener.authorize("", &[("x-forwarded-uri", "/api"), ("x-api-key", key)]);
        (answer.status, answer.rule().map(str::to_owned))
    };
    assert_eq!(ask("acme.s3cret"), (200, Some("api".to_owned())));
    assert_eq!(ask("acme.wrong").0, 429);
    assert_eq!(
        ask("s3cret"),
        (200, None),
        "without the part there is no entry"
    );
}

#[test]
fn client_location_comes_from_the_geoip_databases() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../identity/tests/maxmind");
    let listener = TestListener::open(&format!(
        "geoip: {{country: {folder}/GeoLite2-Country-Test.mmdb, asn: {folder}/GeoLite2-ASN-Test.mmdb}}
rules:
  - {{name: country, when: {{path: /country}}, key: [country], limits: [1/h]}}
  - {{name: asn, when: {{path: /asn, asn: [1221, 7018]}}, key: [asn], limits: [1/h]}}
"
    ));
    let statuses = |path: &str, clients: &[&str]| {
        let status = |client: &&str| {
            let headers = [
                ("x-forwarded-uri", path),
                ("x-forwarded-for", *client),
                ("x-country", "AQ"),
                ("x-asn", "1221"),
            ];
            listener.authorize("", &headers).status
        };
        clients.iter().map(status).collect::<Vec<_>>()
    };
    let clients = [
        "2.125.160.216",
        "2001:218::1",
        "2.125.160.217",
        "192.0.2.1",
        "192.0.2.1",
    ];
    assert_eq!(statuses("/country", &clients), [200, 200, 429, 200, 200]);
    let clients = ["1.128.0.1", "12.81.92.1", "1.129.0.1", "1.0.0.1", "1.0.0.1"];
    assert_eq!(statuses("/asn", &clients), [200, 200, 429, 200, 200]);
}
