//! Networks: sets of CIDR blocks.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};

use crate::{rules::RuleError, shown::shown};

/// A set of IPv4 and IPv6 networks. The networks are disjoint and sorted, so that a lookup is a
/// binary search.
///
/// An IPv4-mapped IPv6 address (`::ffff:192.0.2.1`) is treated as the IPv4 address, both in
/// networks and in values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rules) struct CidrSet(Box<[IpNet]>);

impl CidrSet {
    pub(in crate::rules) fn new(texts: &[&str]) -> Result<Self, RuleError> {
        if texts.is_empty() {
            return Err(RuleError::new("cidr", "must name at least one network"));
        }
        let nets: Vec<IpNet> = texts
            .iter()
            .map(|text| parse(text))
            .collect::<Result<_, _>>()?;
        // Aggregation makes the networks disjoint: it removes networks inside a larger network.
        let mut nets = IpNet::aggregate(&nets);
        nets.sort_by_key(IpNet::network);
        Ok(Self(nets.into()))
    }

    pub(in crate::rules) fn iter(&self) -> std::slice::Iter<'_, IpNet> {
        self.0.iter()
    }

    pub(in crate::rules) fn contains(&self, value: &str) -> bool {
        address(value).is_some_and(|address| {
            let after = self.0.partition_point(|net| net.network() <= address);
            after
                .checked_sub(1)
                .is_some_and(|at| self.0[at].contains(&address))
        })
    }
}

/// Parses an address. An IPv4-mapped address is returned as IPv4.
pub(in crate::rules) fn address(value: &str) -> Option<IpAddr> {
    value
        .parse::<IpAddr>()
        .ok()
        .map(|address| address.to_canonical())
}

fn parse(text: &str) -> Result<IpNet, RuleError> {
    let expected = || {
        let text = shown(text);
        let problem =
            format!("expected a network such as 10.0.0.0/8 or 2001:db8::/32, got \"{text}\"");
        RuleError::new("cidr", problem)
    };
    let net = match text.parse::<IpNet>() {
        Ok(net) => net,
        Err(_) => IpNet::from(text.parse::<IpAddr>().map_err(|_| expected())?),
    };
    if net.trunc() != net {
        let problem = format!(
            "\"{text}\" is an address inside a network; write {}",
            net.trunc()
        );
        return Err(RuleError::new("cidr", problem));
    }
    Ok(canonical_net(net))
}

/// Converts a network of IPv4-mapped addresses to IPv4: `::ffff:192.0.2.0/120` becomes
/// `192.0.2.0/24`. IPv4-mapped addresses in values are converted to IPv4 too.
#[must_use]
pub fn canonical_net(net: IpNet) -> IpNet {
    const MAPPED: u8 = 96;
    let length = net.prefix_len().checked_sub(MAPPED);
    match (net.network().to_canonical(), length) {
        (IpAddr::V4(address), Some(length)) if net.network().is_ipv6() => {
            Ipv4Net::new(address, length).map_or(net, IpNet::V4)
        }
        _ => net,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_matches_each_network_that_contains_it() {
        let nets =
            CidrSet::new(&["10.0.0.0/8", "10.1.0.0/16", "192.0.2.7", "2001:db8::/32"]).unwrap();
        for inside in [
            "10.0.0.0",
            "10.255.255.255",
            "192.0.2.7",
            "2001:db8:1::1",
            "::ffff:10.2.3.4",
        ] {
            assert!(nets.contains(inside), "{inside}");
        }
        for outside in [
            "9.255.255.255",
            "11.0.0.0",
            "192.0.2.8",
            "2001:db9::",
            "",
            "ten",
            "10.0.0.0/8",
        ] {
            assert!(!nets.contains(outside), "{outside}");
        }
    }

    #[test]
    fn an_ipv4_mapped_network_equals_its_ipv4_network() {
        let nets = CidrSet::new(&["::ffff:10.0.0.0/104"]).unwrap();
        assert!(nets.contains("10.9.9.9"));
        assert!(nets.contains("::ffff:10.9.9.9"));
        assert!(!nets.contains("11.0.0.0"));
        assert!(!CidrSet::new(&["::/0"]).unwrap().contains("10.0.0.1"));
    }

    #[test]
    fn an_invalid_network_is_refused_with_a_suggestion() {
        let refused = |text: &str| CidrSet::new(&[text]).unwrap_err().to_string();
        assert_eq!(
            refused("10.0.0.1/8"),
            "cidr: \"10.0.0.1/8\" is an address inside a network; write 10.0.0.0/8"
        );
        for text in ["", "10.0.0.0/33", "10.0.0/8", "2001:db8::/129", "internal"] {
            assert!(refused(text).contains("expected a network"), "{text}");
        }
    }
}
