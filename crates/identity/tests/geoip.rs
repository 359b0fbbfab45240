//! Tests the GeoIP entries `country` and `asn`. The entries come from MaxMind databases, and never
//! from the client.

#![cfg(feature = "maxmind")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, net::IpAddr, path::PathBuf};

use http::HeaderMap;
use tidegate_identity::{
    ForwardAuthContext, ForwardAuthRequest, GeoIpField, GeoIpSource, HeaderDialect, MaxMind, Trust,
};

const COUNTRIES: &str = "GeoLite2-Country-Test.mmdb";
const NETWORKS: &str = "GeoLite2-ASN-Test.mmdb";

fn bytes(file: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/maxmind");
    fs::read(folder.join(file)).unwrap()
}

fn geoip() -> MaxMind {
    let geoip = MaxMind::default();
    geoip.put(GeoIpField::Country, bytes(COUNTRIES)).unwrap();
    geoip.put(GeoIpField::Asn, bytes(NETWORKS)).unwrap();
    geoip
}

fn refused(place: GeoIpField, bytes: Vec<u8>) -> String {
    MaxMind::default()
        .put(place, bytes)
        .unwrap_err()
        .to_string()
}

#[test]
fn ipv4_and_ipv6_addresses_are_looked_up() {
    let geoip = geoip();
    for (address, country, asn) in [
        ("2.125.160.216", Some("GB"), None),
        ("::ffff:2.125.160.216", Some("GB"), None),
        ("2001:218::1", Some("JP"), None),
        ("1.128.0.1", None, Some(1_221)),
        ("2600:6000::1", None, Some(237)),
        ("127.0.0.1", None, None),
        ("::1", None, None),
    ] {
        let address: IpAddr = address.parse().unwrap();
        let found = (geoip.country(address), geoip.asn(address));
        assert_eq!((found.0.as_deref(), found.1), (country, asn), "{address}");
    }
}

#[test]
fn an_invalid_database_is_refused_and_the_old_one_kept() {
    let geoip = geoip();
    let whole = bytes(COUNTRIES);
    let cut = whole[whole.len() / 2..].to_vec();
    for (place, bytes, expected) in [
        (
            GeoIpField::Country,
            Vec::new(),
            "it is not a MaxMind database",
        ),
        (
            GeoIpField::Country,
            b"hello".to_vec(),
            "it is not a MaxMind database",
        ),
        (
            GeoIpField::Asn,
            whole,
            "it is a \"GeoLite2-Country\" database, which has no asn for any address",
        ),
        (
            GeoIpField::Country,
            bytes(NETWORKS),
            "which has no country for any address",
        ),
        (GeoIpField::Country, cut, "it is "),
    ] {
        let error = geoip.put(place, bytes).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    assert_eq!(
        geoip.country("2.125.160.216".parse().unwrap()).as_deref(),
        Some("GB")
    );
    assert_eq!(geoip.asn("1.128.0.1".parse().unwrap()), Some(1_221));
}

/// Simulates bit errors on a disk. A damaged database is either rejected or still readable. A
/// damaged database never causes a panic or an endless loop.
#[test]
fn a_damaged_database_is_refused() {
    let (whole, mut read) = (bytes(NETWORKS), 0);
    for at in (0..whole.len()).step_by(97) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        let geoip = MaxMind::default();
        if geoip.put(GeoIpField::Asn, damaged).is_ok() {
            read += 1;
            geoip.asn("1.128.0.1".parse().unwrap());
        }
    }
    assert!(read > 0, "most of it is names, which are never read");
    for end in (0..whole.len()).step_by(997) {
        refused(GeoIpField::Asn, whole[..end].to_vec());
    }
}

#[test]
fn a_geoip_source_takes_precedence_over_headers() {
    let (geoip, trust, mut headers) = (geoip(), Trust::default(), HeaderMap::new());
    let lines = [
        ("x-country", "AQ"),
        ("x-asn", "666"),
        ("x-forwarded-uri", "/"),
    ];
    for (name, value) in lines {
        headers.insert(name, value.parse().unwrap());
    }
    let mut entry = |from: &str, name: &str, geoip: Option<&dyn GeoIpSource>| {
        headers.insert("x-forwarded-for", from.parse().unwrap());
        let source = ForwardAuthContext {
            peer: "10.0.0.1".parse().unwrap(),
            dialect: HeaderDialect::Detect,
            trust: &trust,
            derived: &[],
            geoip,
        };
        let forwarded = ForwardAuthRequest::parse(&headers, source).unwrap();
        forwarded.entry(name).unwrap().map(String::from)
    };
    let known = Some(&geoip as &dyn GeoIpSource);
    assert_eq!(
        entry("2.125.160.216", "country", known).as_deref(),
        Some("GB")
    );
    assert_eq!(entry("1.128.0.1", "asn", known).as_deref(), Some("1221"));
    assert_eq!(entry("192.0.2.1", "country", known), None);
    assert_eq!(entry("192.0.2.1", "asn", known), None);
    // If this server has no GeoIP source, the proxy may send `country` from its own source.
    assert_eq!(entry("192.0.2.1", "country", None).as_deref(), Some("AQ"));
}
