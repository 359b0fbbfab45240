//! Tests the client address for given headers and configurations, whatever the client sends.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod columns;

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use tidegate_identity::{AddressHeader, Proxies, Trust};

const XFF: &str = "x-forwarded-for";
const FORWARDED: &str = "forwarded";

/// The headers of a request, line by line.
type Lines<'l> = &'l [(&'l str, &'l str)];

fn hops(hops: usize, header: &str) -> Trust {
    Trust::new(Proxies::Hops(hops), AddressHeader::named(header).unwrap())
}

fn nets(nets: &[&str], header: &str) -> Trust {
    let nets = nets.iter().map(|net| net.parse().unwrap()).collect();
    Trust::new(Proxies::Nets(nets), AddressHeader::named(header).unwrap())
}

/// Returns a configuration that trusts our own proxies and a content delivery network, in IPv4 and
/// IPv6.
fn ours(header: &str) -> Trust {
    nets(&["10.0.0.0/8", "fd00::/8", "198.51.100.0/24"], header)
}

fn client(trust: &Trust, peer: &str, lines: Lines<'_>) -> String {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    trust.client_ip(peer.parse().unwrap(), &headers).to_string()
}

/// Checks the client address for each set of header lines.
fn assert_clients(trust: &Trust, peer: &str, table: &[(Lines<'_>, &str)]) {
    for (lines, expected) in table {
        assert_eq!(
            client(trust, peer, lines),
            *expected,
            "{lines:?} from {peer}"
        );
    }
}

#[test]
fn no_proxy_is_trusted_by_default() {
    let table: [(Lines<'_>, &str); 4] = [
        (&[], "203.0.113.9"),
        (&[(XFF, "6.6.6.6")], "203.0.113.9"),
        (&[(FORWARDED, "for=6.6.6.6")], "203.0.113.9"),
        (
            &[("cf-connecting-ip", "6.6.6.6"), ("x-real-ip", "6.6.6.6")],
            "203.0.113.9",
        ),
    ];
    assert_clients(&Trust::default(), "203.0.113.9", &table);
    assert_clients(&ours(XFF), "203.0.113.9", &table);
    assert_clients(&ours(FORWARDED), "203.0.113.9", &table);
    assert_clients(&ours("cf-connecting-ip"), "203.0.113.9", &table);
}

#[test]
fn one_trusted_proxy_uses_the_last_element() {
    let table: [(Lines<'_>, &str); 14] = [
        (&[(XFF, "203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6, 203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6,203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6"), (XFF, "203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "10.0.0.1, 10.0.0.2, 203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6, 203.0.113.9:51234")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6, ::ffff:203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6, [2001:db8::9]:443")], "2001:db8::9"),
        (&[(XFF, "6.6.6.6, 2001:DB8:0::9")], "2001:db8::9"),
        (&[(XFF, "\"6.6.6.6, 203.0.113.9")], "203.0.113.9"),
        (&[(XFF, "\u{e9}, 203.0.113.9")], "203.0.113.9"),
        (&[(XFF, ",,,;, 203.0.113.9")], "203.0.113.9"),
        (
            &[(XFF, "203.0.113.9"), (FORWARDED, "for=6.6.6.6")],
            "203.0.113.9",
        ),
        (
            &[(XFF, "203.0.113.9"), ("x-real-ip", "6.6.6.6")],
            "203.0.113.9",
        ),
    ];
    assert_clients(&hops(1, XFF), "10.0.0.8", &table);
    assert_clients(&ours(XFF), "10.0.0.8", &table);
    assert_clients(&ours(XFF), "::ffff:10.0.0.8", &table);
    assert_clients(&ours(XFF), "fd00::8", &table);
}

#[test]
fn without_a_named_client_the_proxy_is_the_client() {
    let table: [(Lines<'_>, &str); 9] = [
        (&[], "10.0.0.8"),
        (&[(XFF, "")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6, unknown")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6, ")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6,,")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6, 203.0.113.9.1")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6, \u{661}.1.1.1")], "10.0.0.8"),
        (&[(XFF, "6.6.6.6 203.0.113.9")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6")], "10.0.0.8"),
    ];
    assert_clients(&hops(1, XFF), "10.0.0.8", &table);
    assert_clients(&ours(XFF), "10.0.0.8", &table);
}

#[test]
fn several_proxies_are_counted_from_the_right() {
    let list = [
        (XFF, "6.6.6.6, 203.0.113.9"),
        (XFF, "198.51.100.7 , 10.0.0.7"),
    ];
    for (count, expected) in [
        (0, "10.0.0.8"),
        (1, "10.0.0.7"),
        (2, "198.51.100.7"),
        (3, "203.0.113.9"),
        (5, "10.0.0.8"), // the list is too short, so the request did not take this path
    ] {
        assert_eq!(
            client(&hops(count, XFF), "10.0.0.8", &list),
            expected,
            "{count}"
        );
    }
}

#[test]
fn trusted_networks_are_skipped_to_the_first_other_address() {
    let table: [(Lines<'_>, &str); 8] = [
        (
            &[(XFF, "6.6.6.6, 203.0.113.9, 198.51.100.7, 10.0.0.7")],
            "203.0.113.9",
        ),
        (
            &[
                (XFF, "6.6.6.6, 203.0.113.9, 198.51.100.7"),
                (XFF, "fd00::7"),
            ],
            "203.0.113.9",
        ),
        (&[(XFF, "203.0.113.9, 10.0.0.7")], "203.0.113.9"),
        (&[(XFF, "10.1.2.3, 203.0.113.9, 10.0.0.7")], "203.0.113.9"),
        (&[(XFF, "6.6.6.6, unknown, 10.0.0.7")], "10.0.0.7"),
        (&[(XFF, "6.6.6.6,, 10.0.0.7")], "10.0.0.7"),
        (&[(XFF, "10.1.1.1, 10.0.0.7")], "10.1.1.1"), // all are trusted: the leftmost is used
        (&[(XFF, "::ffff:10.1.1.1, 10.0.0.7")], "10.1.1.1"),
    ];
    assert_clients(&ours(XFF), "10.0.0.8", &table);
}

#[test]
fn forwarded_is_parsed_as_rfc_7239_says() {
    let table: [(Lines<'_>, &str); 17] = [
        (&[(FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        (
            &[(
                FORWARDED,
                "for=6.6.6.6, FOR=203.0.113.9;proto=https;by=10.0.0.8",
            )],
            "203.0.113.9",
        ),
        (
            &[
                (FORWARDED, "for=6.6.6.6"),
                (FORWARDED, "proto=http; for=203.0.113.9"),
            ],
            "203.0.113.9",
        ),
        (
            &[(FORWARDED, "for=6.6.6.6,for=\"203.0.113.9:4711\"")],
            "203.0.113.9",
        ),
        (
            &[(FORWARDED, "for=6.6.6.6, for=\"[2001:db8::9]:4711\"")],
            "2001:db8::9",
        ),
        (
            &[(FORWARDED, "for=6.6.6.6, for=\"[2001:db8::9]\"")],
            "2001:db8::9",
        ),
        (
            &[(FORWARDED, "for=6.6.6.6, for=\"2001:db8::9\"")],
            "2001:db8::9",
        ),
        (
            &[(FORWARDED, "for=6.6.6.6, for=\"\\[2001:db8::9]\"")],
            "2001:db8::9",
        ),
        (
            &[(FORWARDED, "for=\"6.6.6.6, for=203.0.113.9")],
            "203.0.113.9",
        ),
        (
            &[(FORWARDED, "for=\"6.6.6.6\\\", for=203.0.113.9")],
            "203.0.113.9",
        ),
        (&[(FORWARDED, "for=6.6.6.6, for=unknown")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6, for=_hidden")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6, for=")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6, for=\"\"")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6, proto=https")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6;for=203.0.113.9")], "10.0.0.8"),
        (&[(FORWARDED, "for=6.6.6.6,"), (XFF, "6.6.6.6")], "10.0.0.8"),
    ];
    assert_clients(&hops(1, FORWARDED), "10.0.0.8", &table);
    assert_clients(&ours(FORWARDED), "10.0.0.8", &table);
    let path: [(Lines<'_>, &str); 1] = [(
        &[(
            FORWARDED,
            "for=6.6.6.6, for=203.0.113.9, for=\"[fd00::7]:1\"",
        )],
        "203.0.113.9",
    )];
    assert_clients(&hops(2, FORWARDED), "10.0.0.8", &path);
    assert_clients(&ours(FORWARDED), "10.0.0.8", &path);
}

#[test]
fn a_provider_header_must_be_one_line_with_one_address() {
    let table: [(Lines<'_>, &str); 6] = [
        (
            &[("CF-Connecting-IP", "203.0.113.9"), (XFF, "6.6.6.6")],
            "203.0.113.9",
        ),
        (&[("cf-connecting-ip", "2001:db8::9")], "2001:db8::9"),
        (
            &[
                ("cf-connecting-ip", "6.6.6.6"),
                ("cf-connecting-ip", "203.0.113.9"),
            ],
            "10.0.0.8",
        ),
        (&[("cf-connecting-ip", "6.6.6.6, 203.0.113.9")], "10.0.0.8"),
        (&[("cf-connecting-ip", "")], "10.0.0.8"),
        (&[("true-client-ip", "6.6.6.6")], "10.0.0.8"),
    ];
    assert_clients(&ours("cf-connecting-ip"), "10.0.0.8", &table);
    assert_clients(&hops(1, "CF-Connecting-IP"), "10.0.0.8", &table);
}

#[test]
fn a_network_of_ipv6_addresses_has_one_count() {
    let address: IpAddr = "2001:db8:1:2ff::9".parse().unwrap();
    let counted = |bits| {
        let trust = Trust::default().with_ipv6_prefix(bits).unwrap();
        trust.counted(address).to_string()
    };
    assert_eq!(
        Trust::default().counted(address).to_string(),
        "2001:db8:1:2ff::"
    );
    assert_eq!(counted(56), "2001:db8:1:200::");
    assert_eq!(counted(128), "2001:db8:1:2ff::9");
    assert_eq!(Trust::default().with_ipv6_prefix(0), None);
    assert_eq!(Trust::default().with_ipv6_prefix(129), None);
    let v4: IpAddr = "192.0.2.1".parse().unwrap();
    assert_eq!(Trust::default().counted(v4), v4);
}

#[test]
fn settings_that_allow_evasion_are_warned_about() {
    let codes =
        |trust: Trust| -> Vec<&str> { trust.warnings().map(|warning| warning.code()).collect() };
    assert_eq!(codes(ours(XFF)), [""; 0]);
    assert_eq!(
        codes(nets(&["10.0.0.0/8", "0.0.0.0/0"], XFF)),
        ["trust-all"]
    );
    assert_eq!(
        codes(nets(&["::/0"], XFF).with_ipv6_prefix(65).unwrap()),
        ["trust-all", "raw-ipv6"]
    );
    assert_eq!(codes(nets(&["::ffff:0.0.0.0/96"], XFF)), ["trust-all"]);
    let warning = nets(&["::/0"], XFF).warnings().next().unwrap().to_string();
    assert!(
        warning.starts_with("trust-all: ") && warning.contains("list the networks"),
        "{warning}"
    );
}

#[test]
fn a_network_of_mapped_addresses_is_the_ipv4_network() {
    let mapped = nets(&["::ffff:10.0.0.0/104"], XFF);
    let lines = [(XFF, "203.0.113.9")];
    for peer in ["10.0.0.8", "::ffff:10.0.0.8"] {
        assert_eq!(client(&mapped, peer, &lines), "203.0.113.9");
    }
    assert_eq!(client(&mapped, "192.0.2.1", &lines), "192.0.2.1");
}

proptest! {
    /// Regardless of the headers that the client sends, the result is the address that the proxy
    /// next to the client appends.
    #[test]
    fn a_client_cannot_choose_its_address(
        sent in prop::collection::vec("[ -~]{0,30}", 0..4),
        same_line in any::<bool>(),
        forwarded in any::<bool>(),
    ) {
        let (header, appended) = if forwarded { (FORWARDED, "for=203.0.113.9") } else { (XFF, "203.0.113.9") };
        let mut lines = sent;
        match lines.last_mut().filter(|_| same_line) {
            Some(last) => *last = format!("{last}, {appended}"),
            None => lines.push(appended.to_owned()),
        }
        let lines: Vec<(&str, &str)> = lines.iter().map(|line| (header, line.as_str())).collect();
        for trust in [hops(1, header), ours(header)] {
            prop_assert_eq!(client(&trust, "10.0.0.8", &lines), "203.0.113.9");
        }
    }
}
