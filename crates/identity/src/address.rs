//! Parses the IP addresses in proxy headers, and formats IP addresses for rules.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Parses an address with or without a port, brackets or a zone. Returns an IPv4-mapped IPv6
/// address as an IPv4 address.
pub(crate) fn read(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Some(ip.to_canonical());
    }
    if let Ok(socket) = text.parse::<SocketAddr>() {
        return Some(socket.ip().to_canonical());
    }
    // A port, or an obfuscated port (RFC 7239), may follow the brackets.
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.split(']').next())
        .unwrap_or(text);
    let bare = bare.split('%').next().unwrap_or(bare);
    bare.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Formats an address. An IPv4 address is formatted without `std::fmt`, because every request needs
/// its address as a string.
pub(crate) fn text(ip: IpAddr) -> String {
    let IpAddr::V4(ip) = ip else {
        return ip.to_string();
    };
    let mut text = String::with_capacity("255.255.255.255".len());
    for (at, octet) in ip.octets().into_iter().enumerate() {
        if at > 0 {
            text.push('.');
        }
        text.push_str(itoa::Buffer::new().format(octet));
    }
    text
}

/// Returns the network with the first `prefix` bits of an IPv6 address. One client usually controls
/// all addresses of a network. Returns an IPv4 address unchanged. `prefix` must be at most 128.
pub(crate) fn network(ip: IpAddr, prefix: u8) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => {
            let dropped = 128_u32.saturating_sub(u32::from(prefix));
            let mask = u128::MAX.checked_shl(dropped).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & mask))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_in_canonical_form() {
        for octet in 0..=u8::MAX {
            let ip = IpAddr::from([octet, 7, octet, 250]);
            assert_eq!(text(ip), ip.to_string());
        }
        assert_eq!(text("2001:db8::1".parse().unwrap()), "2001:db8::1");
    }

    #[test]
    fn addresses_are_parsed_in_every_notation() {
        for (text, expected) in [
            ("192.0.2.1", "192.0.2.1"),
            (" 192.0.2.1\t", "192.0.2.1"),
            ("192.0.2.1:5000", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("[::ffff:c000:201]:443", "192.0.2.1"),
            ("2001:DB8::1", "2001:db8::1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
            ("[2001:db8::1]:_hidden", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("fe80::1%eth0", "fe80::1"),
            ("[fe80::1%25eth0]:80", "fe80::1"),
        ] {
            assert_eq!(read(text).unwrap().to_string(), expected);
        }
        for text in [
            "",
            "unix:",
            "unknown",
            "_hidden",
            "1.2.3",
            "01.2.3.4",
            "0x7f000001",
            "2130706433",
            "2001:db8::1::",
            "[",
            "%",
            "1.2.3.4.5",
            "1.2.3.4, 5.6.7.8",
            "localhost",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn an_ipv6_prefix_has_one_count() {
        let ip = |text: &str, prefix| network(text.parse().unwrap(), prefix).to_string();
        let address = "2001:db8:1:2ff:3:4:5:6";
        assert_eq!(ip(address, 128), address);
        assert_eq!(ip(address, 64), "2001:db8:1:2ff::");
        assert_eq!(ip(address, 56), "2001:db8:1:200::");
        assert_eq!(ip(address, 48), "2001:db8:1::");
        assert_eq!(ip(address, 1), "::");
        assert_eq!(ip(address, 0), "::");
        assert_eq!(ip("192.0.2.1", 1), "192.0.2.1");
    }
}
