//! Who the client is, by the word of those who may be believed.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::{HeaderMap, HeaderName, header::AsHeaderName};

/// `X-Forwarded-For`.
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The element of `X-Forwarded-For` that the proxy at our door appended, or, behind `hops` more proxies
/// that are to be believed, the one so many places to its left.
///
/// Counted from the right over all lines of the header, because everything further to the left was
/// written by the client. `None` if there is no such element or it is no address.
pub(crate) fn forwarded_for(headers: &HeaderMap, hops: usize) -> Option<IpAddr> {
    let lines = headers.get_all(X_FORWARDED_FOR).iter().rev();
    let element = lines
        .flat_map(|line| line.to_str().unwrap_or("").rsplit(','))
        .nth(hops)?;
    address(element)
}

/// The address in the header `name`, if there is one.
pub(crate) fn address_in(headers: &HeaderMap, name: impl AsHeaderName) -> Option<IpAddr> {
    address(headers.get(name)?.to_str().ok()?)
}

/// Reads an address with or without a port, brackets or a zone.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Some(ip.to_canonical());
    }
    if let Ok(socket) = text.parse::<SocketAddr>() {
        return Some(socket.ip().to_canonical());
    }
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.split(']').next())
        .unwrap_or(text);
    let bare = bare.split('%').next().unwrap_or(bare);
    bare.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// The address that counts are kept for: an IPv6 address without its lower 64 bits, because whoever has
/// one of those has them all.
pub(crate) fn counted(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn forwarded(lines: &[&str], hops: usize) -> Option<String> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("x-forwarded-for", HeaderValue::from_str(line).unwrap());
        }
        forwarded_for(&headers, hops).map(|ip| ip.to_string())
    }

    #[test]
    fn the_client_is_counted_from_the_right() {
        let lines = ["6.6.6.6, 203.0.113.9", "198.51.100.7 , 192.0.2.1"];
        assert_eq!(forwarded(&lines, 0).unwrap(), "192.0.2.1");
        assert_eq!(forwarded(&lines, 1).unwrap(), "198.51.100.7");
        assert_eq!(forwarded(&lines, 2).unwrap(), "203.0.113.9");
        assert_eq!(forwarded(&lines, 4), None);
        assert_eq!(forwarded(&["1.2.3.4, unknown"], 0), None);
        assert_eq!(forwarded(&[], 0), None);
    }

    #[test]
    fn addresses_are_read_in_every_dress() {
        for (text, expected) in [
            ("192.0.2.1:5000", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("fe80::1%eth0", "fe80::1"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), expected);
        }
        for text in ["", "unix:", "1.2.3", "2001:db8::1::", "[", "%", "1.2.3.4.5"] {
            assert_eq!(address(text), None, "{text}");
        }
    }

    #[test]
    fn a_subscriber_has_one_count() {
        let ip = |text: &str| counted(text.parse().unwrap()).to_string();
        assert_eq!(ip("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(ip("192.0.2.1"), "192.0.2.1");
    }
}
