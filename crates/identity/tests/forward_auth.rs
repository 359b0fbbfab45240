//! Tests that a proxy's description of a request is parsed correctly, and that a client cannot
//! manipulate the description.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{borrow::Cow, net::IpAddr};

use http::{HeaderMap, HeaderName, HeaderValue};
use tidegate_identity::{
    AddressHeader, AmbiguousRequest, DerivedEntry, DescribedRequest, ForwardAuthContext,
    ForwardAuthRequest, HeaderDialect, Proxies, Trust,
};

static TRUST: Trust = Trust::new(Proxies::Hops(0), AddressHeader::XForwardedFor);

const PEER: ForwardAuthContext<'_> = ForwardAuthContext {
    peer: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
    dialect: HeaderDialect::Detect,
    trust: &TRUST,
    derived: &[],
    geoip: None,
};

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
    lines
        .iter()
        .map(|(name, text)| (HeaderName::from_static(name), value(text)))
        .collect()
}

fn entries(
    lines: &[(&'static str, &str)],
    source: ForwardAuthContext<'_>,
    names: &[&str],
) -> Vec<Option<String>> {
    let headers = headers(lines);
    let forwarded = ForwardAuthRequest::parse(&headers, source).unwrap();
    names
        .iter()
        .map(|name| forwarded.entry(name).unwrap().map(Cow::into_owned))
        .collect()
}

fn some(texts: &[&str]) -> Vec<Option<String>> {
    texts.iter().map(|text| Some((*text).to_owned())).collect()
}

#[test]
fn nginx_headers_are_understood() {
    let lines = [
        ("x-original-method", "POST"),
        ("x-original-uri", "/login?next=%2Fhome&x=1"),
        ("x-real-ip", "203.0.113.9"),
        ("x-forwarded-for", "6.6.6.6"),
        ("host", "Example.org:8443"),
        ("x-customer", "acme"),
        ("cookie", "theme=dark; session=s1"),
    ];
    let names = [
        "cookie.session",
        "method",
        "path",
        "query.next",
        "ip",
        "host",
        "customer",
        "header.X-Customer",
    ];
    let expected = some(&[
        "s1",
        "POST",
        "/login",
        "/home",
        "203.0.113.9",
        "example.org",
        "acme",
        "acme",
    ]);
    assert_eq!(entries(&lines, PEER, &names), expected);
}

#[test]
fn caddy_and_traefik_headers_are_understood() {
    let lines = [
        ("x-forwarded-method", "GET"),
        ("x-forwarded-uri", "/%62"),
        ("x-forwarded-host", "[2001:DB8::1]:443"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-for", "6.6.6.6, 2001:db8:1:2:3::4"),
    ];
    let names = ["method", "path", "host", "scheme", "ip", "ip.exact"];
    let expected = some(&[
        "GET",
        "/b",
        "[2001:db8::1]",
        "https",
        "2001:db8:1:2::",
        "2001:db8:1:2:3::4",
    ]);
    assert_eq!(entries(&lines, PEER, &names), expected);
    assert_eq!(
        entries(&lines, PEER, &["query.x", "customer"]),
        [None, None]
    );
}

#[test]
fn a_client_behind_caddy_cannot_choose_its_address() {
    let lines = [
        ("x-forwarded-uri", "/"),
        ("x-forwarded-for", "203.0.113.9"),
        ("x-real-ip", "6.6.6.6"),
    ];
    assert_eq!(entries(&lines, PEER, &["ip"]), some(&["203.0.113.9"]));
}

#[test]
fn a_client_cannot_choose_its_path() {
    let lines = [
        ("x-original-uri", "/login"),
        ("x-forwarded-uri", "/harmless"),
    ];
    let found = headers(&lines);
    let refused = ForwardAuthRequest::parse(&found, PEER).unwrap_err();
    let mixed = AmbiguousRequest::MixedDialects {
        original: "x-original-uri",
        forwarded: "x-forwarded-uri",
    };
    assert_eq!(refused, mixed);
    let path_for = |dialect| entries(&lines, ForwardAuthContext { dialect, ..PEER }, &["path"]);
    assert_eq!(path_for(HeaderDialect::Nginx), some(&["/login"]));
    assert_eq!(path_for(HeaderDialect::XForwarded), some(&["/harmless"]));
}

#[test]
fn nginx_may_stand_behind_other_proxies() {
    let trust = |proxies| Trust::new(proxies, AddressHeader::XForwardedFor);
    let nets = trust(Proxies::Nets(vec!["198.51.100.0/24".parse().unwrap()]));
    let lines = [
        ("x-original-uri", "/"),
        ("x-real-ip", "198.51.100.7"),
        ("x-forwarded-for", "6.6.6.6, 203.0.113.9"),
    ];
    for (trust, ip) in [
        (&TRUST, "198.51.100.7"),
        (&trust(Proxies::Hops(1)), "203.0.113.9"),
        (&nets, "203.0.113.9"),
    ] {
        let source = ForwardAuthContext { trust, ..PEER };
        assert_eq!(entries(&lines, source, &["ip"]), some(&[ip]));
        let direct = [lines[0], ("x-real-ip", "192.0.2.1"), lines[2]];
        if *trust == nets {
            assert_eq!(entries(&direct, source, &["ip"]), some(&["192.0.2.1"]));
        }
    }
}

#[test]
fn a_client_cannot_supply_headers_its_proxy_omits() {
    for (proxys, clients) in [
        (("x-original-uri", "/login"), ("x-forwarded-method", "GET")),
        (("x-original-uri", "/login"), ("x-forwarded-uri", "/login")),
        (("x-forwarded-uri", "/login"), ("x-original-method", "GET")),
    ] {
        let found = headers(&[proxys, clients, ("x-real-ip", "6.6.6.6")]);
        assert!(
            ForwardAuthRequest::parse(&found, PEER).is_err(),
            "{clients:?}"
        );
    }
    let lines = [
        ("x-original-uri", "/login"),
        ("host", "example.org"),
        ("x-forwarded-host", "chosen.example"),
        ("x-forwarded-for", "6.6.6.6"),
    ];
    let expected = some(&["example.org", "127.0.0.1"]);
    assert_eq!(entries(&lines, PEER, &["host", "ip"]), expected);
}

#[test]
fn a_proxy_that_names_no_client_is_detected() {
    for (lines, named) in [
        (
            &[("x-original-uri", "/"), ("x-real-ip", "192.0.2.1")][..],
            true,
        ),
        (
            &[("x-original-uri", "/"), ("x-forwarded-for", "192.0.2.1")],
            false,
        ),
        (
            &[("x-forwarded-uri", "/"), ("x-forwarded-for", "192.0.2.1")],
            true,
        ),
        (
            &[("x-forwarded-uri", "/"), ("x-forwarded-for", "unknown")],
            false,
        ),
        // The client may run on the proxy's own machine, so a loopback address is valid.
        (&[("x-original-uri", "/"), ("x-real-ip", "127.0.0.1")], true),
        (
            &[("x-forwarded-uri", "/"), ("x-forwarded-for", "127.0.0.1")],
            true,
        ),
    ] {
        let headers = headers(lines);
        let forwarded = ForwardAuthRequest::parse(&headers, PEER).unwrap();
        assert_eq!(forwarded.has_client_ip(), named, "{lines:?}");
    }
}

#[test]
fn without_proxy_headers_the_peer_is_the_client() {
    assert_eq!(
        entries(&[], PEER, &["ip", "path"]),
        [Some("127.0.0.1".to_owned()), None]
    );
}

/// If a header or query parameter has several different values, some services use the first value
/// and others the last. The rules and the service could then use different values.
#[test]
fn conflicting_values_are_refused() {
    let lines = [
        ("x-forwarded-uri", "/p?q=1&q=2&same=1&same=1"),
        ("x-customer", "real"),
        ("x-customer", "random"),
        ("x-same", "one"),
        ("x-same", "one"),
        ("cookie", "id=1; theme=dark"),
        ("cookie", "id=2"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-proto", "http"),
    ];
    let headers = headers(&lines);
    let key = [(
        Box::from("key"),
        DerivedEntry::split("header.x-customer", ".", 1).unwrap(),
    )];
    let source = ForwardAuthContext {
        derived: &key,
        ..PEER
    };
    let forwarded = ForwardAuthRequest::parse(&headers, source).unwrap();
    for (entry, repeated) in [
        ("customer", "customer"),
        ("header.x-customer", "header.x-customer"),
        ("key", "header.x-customer"),
        ("cookie.id", "cookie.id"),
        ("query.q", "query.q"),
        ("scheme", "scheme"),
    ] {
        let ambiguous = AmbiguousRequest::Repeated(repeated.into());
        assert_eq!(forwarded.entry(entry), Err(ambiguous), "{entry}");
    }
    for (entry, expected) in [
        ("same", "one"),
        ("query.same", "1"),
        ("cookie.theme", "dark"),
        ("header.cookie", "id=1; theme=dark; id=2"),
    ] {
        let value = forwarded.entry(entry).unwrap();
        assert_eq!(value.as_deref(), Some(expected), "{entry}");
    }
}

/// ingress-nginx sets `X-Original-URL`. ingress-nginx forwards an `X-Original-URI` unchanged from
/// the client.
#[test]
fn conflicting_proxy_headers_are_refused() {
    for (one, other, named) in [
        (
            ("x-original-url", "https://h/login"),
            ("x-original-uri", "/"),
            "path",
        ),
        (
            ("x-original-uri", "/login"),
            ("x-original-uri", "/"),
            "path",
        ),
        (
            ("x-original-method", "POST"),
            ("x-original-method", "GET"),
            "x-original-method",
        ),
        (("host", "a"), ("host", "b"), "host"),
    ] {
        let lines = [("x-original-uri", "/login"), one, other];
        let found = headers(if named == "path" { &lines[1..] } else { &lines });
        let refused = ForwardAuthRequest::parse(&found, PEER).unwrap_err();
        assert_eq!(refused, AmbiguousRequest::Repeated(named.into()));
    }
}

#[test]
fn white_space_around_a_value_is_trimmed() {
    for value in ["acme", " acme", "acme\t ", "\tacme"] {
        let lines = [("x-original-uri", "/"), ("x-customer", value)];
        let names = ["customer", "header.x-customer"];
        assert_eq!(entries(&lines, PEER, &names), some(&["acme", "acme"]));
    }
    let lines = [("x-original-uri", "/"), ("x-customer", " \t")];
    assert_eq!(entries(&lines, PEER, &["customer"]), [None]);
}

/// The proxy may remove a header that `Connection` names, so the service may not receive the
/// header.
#[test]
fn headers_listed_in_connection_are_ambiguous() {
    for connection in ["x-customer", "close, X-Customer"] {
        let lines = [("connection", connection), ("x-customer", "acme")];
        let found = headers(&lines);
        let forwarded = ForwardAuthRequest::parse(&found, PEER).unwrap();
        for name in ["customer", "header.x-customer"] {
            let ambiguous = AmbiguousRequest::HopByHop(name.into());
            assert_eq!(forwarded.entry(name), Err(ambiguous));
        }
        assert_eq!(forwarded.entry("header.x-other"), Ok(None));
    }
}

/// CGI, WSGI and PHP treat two names as equal if they differ only in `_` and `-`.
#[test]
fn a_header_name_with_an_underscore_is_ambiguous() {
    for lines in [
        &[("x_api-key", "b")][..],
        &[("x-api-key", "a"), ("x_api_key", "b")],
    ] {
        let found = headers(lines);
        let forwarded = ForwardAuthRequest::parse(&found, PEER).unwrap();
        for name in ["header.x-api-key", "header.X-Api-Key", "api_key"] {
            assert_eq!(
                forwarded.entry(name),
                Err(AmbiguousRequest::Alias(name.into())),
                "{lines:?}"
            );
        }
        assert_eq!(forwarded.entry("header.x-api"), Ok(None));
    }
}

#[test]
fn a_path_with_dot_segments_is_ambiguous() {
    let found = headers(&[("x-forwarded-uri", "/api/../login?q=1")]);
    let forwarded = ForwardAuthRequest::parse(&found, PEER).unwrap();
    assert_eq!(forwarded.entry("path"), Err(AmbiguousRequest::DotSegments));
    assert_eq!(forwarded.entry("query.q").unwrap().as_deref(), Some("1"));
    assert!(forwarded.has_path());
}

#[test]
fn values_that_are_not_text_still_count() {
    let lines = [("x-original-url", "https://h.example/p?q=1")];
    assert_eq!(
        entries(&lines, PEER, &["path", "query.q"]),
        some(&["/p", "1"])
    );
    let mut found = HeaderMap::new();
    found.insert("x-customer", HeaderValue::from_bytes(b"\xff").unwrap());
    assert_eq!(
        ForwardAuthRequest::parse(&found, PEER)
            .unwrap()
            .entry("customer")
            .unwrap()
            .unwrap(),
        "\u{fffd}"
    );
}

#[test]
fn an_entry_may_be_derived_from_another() {
    let part = |name: &str, of| (name.into(), DerivedEntry::split(of, ".", 1).unwrap());
    let parts = [
        part("key_id", "header.x-key"),
        part("customer", "query.customer"),
    ];
    let source = ForwardAuthContext {
        derived: &parts,
        ..PEER
    };
    let lines = [
        ("x-forwarded-uri", "/?customer=acme.7"),
        ("x-key", "k1.secret"),
        ("x-customer", "other"),
    ];
    assert_eq!(
        entries(&lines, source, &["key_id", "customer"]),
        some(&["k1", "acme"])
    );
    let lines = [("x-key", "secret"), ("x-customer", "other")];
    assert_eq!(
        entries(&lines, source, &["key_id", "customer"]),
        [None, None]
    );
}

#[test]
fn an_empty_value_is_absent() {
    let lines = [
        ("x-customer", ""),
        ("x-original-method", ""),
        ("x-original-uri", "/?user=&x=1"),
        ("cookie", "id="),
    ];
    let names = [
        "customer",
        "header.x-customer",
        "method",
        "query.user",
        "cookie.id",
    ];
    assert_eq!(entries(&lines, PEER, &names), [const { None }; 5]);
}

/// Returns the description of a request by an Envoy whose peer is `peer`.
fn described<'r>(headers: &'r HeaderMap, peer: Option<&str>) -> DescribedRequest<'r> {
    DescribedRequest {
        headers,
        method: Some("POST"),
        target: Some("//login?user=alice"),
        host: Some("Shop.Example:443"),
        scheme: Some("https"),
        peer: peer.map(|peer| peer.parse().unwrap()),
        entries: &[("customer", "acme"), ("plan", "")],
    }
}

#[test]
fn a_described_request_has_the_same_entries() {
    let lines = [
        ("x-forwarded-proto", "http"),
        ("x-customer", "umbrella"),
        ("x-plan", "gold"),
        ("x-original-method", "DELETE"),
        ("x-region", "eu"),
    ];
    let headers = headers(&lines);
    let request = ForwardAuthRequest::described(described(&headers, Some("192.0.2.7")), PEER);
    let names = [
        "method",
        "path",
        "host",
        "scheme",
        "ip",
        "query.user",
        "customer",
        "plan",
        "region",
    ];
    let found = names.map(|name| request.entry(name).unwrap().map(Cow::into_owned));
    let mut expected = some(&[
        "POST",
        "/login",
        "shop.example",
        "https",
        "192.0.2.7",
        "alice",
        "acme",
    ]);
    // A header never replaces an entry that the proxy's configuration sets, even if the entry is
    // empty.
    expected.extend([None, Some("eu".into())]);
    assert_eq!(found.to_vec(), expected);
}

#[test]
fn a_client_cannot_choose_its_address_if_the_proxy_appends_nothing() {
    let hops = |hops| Trust::default().with_hops(hops);
    let nets = Proxies::Nets(vec!["10.0.0.0/8".parse().unwrap()]);
    let nets = Trust::new(nets, AddressHeader::XForwardedFor);
    let list = Some("6.6.6.6, 203.0.113.9, 10.0.0.7");
    for (trust, peer, list, expected) in [
        (hops(0), Some("10.0.0.7"), list, "10.0.0.7"),
        (hops(1), Some("10.0.0.7"), list, "10.0.0.7"),
        (
            hops(1),
            Some("10.0.0.7"),
            Some("203.0.113.9"),
            "203.0.113.9",
        ),
        (hops(1), Some("10.0.0.7"), Some("10.0.0.7"), "10.0.0.7"),
        (hops(1), Some("10.0.0.7"), None, "10.0.0.7"),
        (hops(2), Some("10.0.0.7"), list, "203.0.113.9"),
        // Envoy took its peer from the list (`use_remote_address: false`).
        (
            hops(1),
            Some("203.0.113.9"),
            Some("6.6.6.6, 203.0.113.9"),
            "203.0.113.9",
        ),
        (nets.clone(), Some("10.0.0.7"), list, "203.0.113.9"),
        (nets, Some("192.0.2.1"), list, "192.0.2.1"),
        // If `peer` is `None`, the proxy has appended the last element.
        (hops(0), None, list, "10.0.0.7"),
        (hops(1), None, list, "203.0.113.9"),
        (hops(0), None, None, "127.0.0.1"),
    ] {
        let lines = list.map(|list| ("x-forwarded-for", list));
        let headers = headers(lines.as_slice());
        let context = ForwardAuthContext {
            trust: &trust,
            ..PEER
        };
        let request = ForwardAuthRequest::described(described(&headers, peer), context);
        let ip = request.entry("ip").unwrap().unwrap();
        assert_eq!(ip, expected, "{trust:?} {peer:?} {list:?}");
    }
}

proptest::proptest! {
    #[test]
    fn arbitrary_headers_never_panic(uri in "\\PC{0,40}", query in "[%+&=a-f0-9]{0,20}", host in "\\PC{0,20}") {
        let uri = format!("{uri}?{query}");
        let headers = headers(&[("x-original-uri", &uri), ("host", &host), ("x-forwarded-for", &host)]);
        let forwarded = ForwardAuthRequest::parse(&headers, PEER).unwrap();
        for name in ["path", "query.a", "host", "ip", "header.", "", "\u{e9} "] {
            let _ = forwarded.entry(name);
        }
    }
}
