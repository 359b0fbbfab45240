//! The requests that a block by entries denies.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use crate::{
    limit::bounds,
    rules::{RuleError, condition::check_name, pattern::canonical_net, request},
};

/// The shortest prefixes of networks that are not wide. A wide network contains the clients of many
/// internet service providers.
const MIN_NARROW_IPV4: u8 = 8;
const MIN_NARROW_IPV6: u8 = 16;

/// The requests that a block by entries denies: all requests with the given entries, or only those
/// to which a rule applies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryBlockTarget {
    rule: Option<Box<str>>,
    /// Sorted by name, so that equal targets have the same form.
    entries: Box<[BlockedEntry]>,
}

/// An entry of an [`EntryBlockTarget`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockedEntry {
    /// The name of the entry.
    pub name: Box<str>,
    /// The value that a request must have.
    pub value: BlockedValue,
}

/// The value that an entry of a request must have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockedValue {
    /// Exactly this text.
    Text(Box<str>),
    /// An address in this network. An IPv4-mapped IPv6 address counts as an IPv4 address. A
    /// network in the request, such as `2001:db8:1::/64`, must be a part of this network.
    Network(IpNet),
}

impl BlockedValue {
    /// Parses a value: an address, a network in CIDR notation, or any other text.
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(network) = network_of(text) {
            let net = network?;
            if net.trunc() != net {
                return Err(format!(
                    "\"{text}\" is an address inside a network; write {} for the network, or {} for \
                     the address",
                    canonical_net(net.trunc()),
                    net.addr()
                ));
            }
            return Ok(Self::Network(canonical_net(net)));
        }
        if text.is_empty() {
            return Err("must not be empty".to_owned());
        }
        let (length, most) = (text.len(), bounds::MAX_KEY_BYTES);
        if length > most {
            return Err(format!("{length} bytes exceed the maximum of {most}"));
        }
        Ok(Self::Text(text.into()))
    }
}

/// Parses a network or a single address. Returns `None` if the text is neither, and an error if it
/// is an address with an invalid prefix length.
fn network_of(text: &str) -> Option<Result<IpNet, String>> {
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(length)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().ok()?;
    let Some(length) = length else {
        return Some(Ok(IpNet::from(address)));
    };
    let most = if address.is_ipv4() { 32 } else { 128 };
    let net = length.parse().ok();
    let net = net.and_then(|length| IpNet::new(address, length).ok());
    Some(net.ok_or_else(|| {
        format!(
            "expected a network such as {address}/{most}, with a prefix length from 0 to {most}"
        )
    }))
}

/// Formats a network with a single address as that address.
impl fmt::Display for BlockedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Network(net) if net.prefix_len() == net.max_prefix_len() => net.addr().fmt(f),
            Self::Network(net) => net.fmt(f),
        }
    }
}

impl EntryBlockTarget {
    /// Creates the target for all requests that have all of these `entries`, which are pairs of a
    /// name and a value. A value that is an address or a network in CIDR notation matches the
    /// addresses in this network. Any other value matches only the same text. If `rule` is given,
    /// the target contains only requests to which this rule applies.
    ///
    /// # Errors
    ///
    /// Returns an error for `entries` if there are no entries, or more than
    /// [`bounds::MAX_KEY_ENTRIES`]. Returns an error for `entries.<name>` if a name is invalid or
    /// occurs twice, or if a value is empty, too long, or not a valid network.
    pub fn new(rule: Option<&str>, entries: &[(&str, &str)]) -> Result<Self, RuleError> {
        let (count, most) = (entries.len(), bounds::MAX_KEY_ENTRIES);
        if count == 0 || count > most {
            let problem = format!("must contain 1 to {most} entries, got {count}");
            return Err(RuleError::new("entries", problem));
        }
        let read = |(name, value): &(&str, &str)| {
            check_name(name).map_err(|error| RuleError::new("entries", error.problem))?;
            let value = BlockedValue::parse(value);
            let value = value.map_err(|problem| RuleError::new(request::field(name), problem))?;
            let name = Box::from(*name);
            Ok(BlockedEntry { name, value })
        };
        let entries = entries.iter().map(read);
        let mut entries = entries.collect::<Result<Box<[BlockedEntry]>, RuleError>>()?;
        entries.sort_unstable();
        let twice = entries.windows(2).find(|pair| pair[0].name == pair[1].name);
        if let Some([entry, _]) = twice {
            let problem = "is given twice; set a block for each value";
            return Err(RuleError::new(request::field(&entry.name), problem));
        }
        let rule = rule.map(Box::from);
        Ok(Self { rule, entries })
    }

    /// Returns the rule that must apply to a request; `None` if the target does not depend on the
    /// rules.
    #[must_use]
    pub fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }

    /// Returns the entries, sorted by name.
    #[must_use]
    pub fn entries(&self) -> &[BlockedEntry] {
        &self.entries
    }

    /// Returns an error for `entries.<name>` if the target contains the addresses of a network with
    /// a prefix shorter than /8 (IPv4) or /16 (IPv6), and no other entry restricts the target. A
    /// block of such a large network is usually a mistake.
    ///
    /// # Errors
    ///
    /// Returns an error that names the network.
    pub fn check_width(&self) -> Result<(), RuleError> {
        let [BlockedEntry { name, value }] = &*self.entries else {
            return Ok(());
        };
        let BlockedValue::Network(net) = value else {
            return Ok(());
        };
        let (least, family) = match net {
            IpNet::V4(_) => (MIN_NARROW_IPV4, "IPv4"),
            IpNet::V6(_) => (MIN_NARROW_IPV6, "IPv6"),
        };
        if net.prefix_len() >= least {
            return Ok(());
        }
        let whom = match net.prefix_len() {
            0 => format!("every {family} client"),
            _ => format!("a large part of all {family} clients"),
        };
        let problem = format!("{net} contains {whom}; write a prefix of /{least} or longer");
        Err(RuleError::new(request::field(name), problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(entries: &[(&str, &str)]) -> String {
        match EntryBlockTarget::new(None, entries) {
            Ok(target) => {
                let entries = target.entries().iter();
                let entries = entries.map(|entry| format!("{}={}", entry.name, entry.value));
                entries.collect::<Vec<_>>().join(" ")
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_target_is_canonical() {
        for (entries, expected) in [
            (&[("ip", "203.0.113.9")][..], "ip=203.0.113.9"),
            (&[("ip", "203.0.113.9/32")], "ip=203.0.113.9"),
            (&[("ip", "::ffff:203.0.113.9")], "ip=203.0.113.9"),
            (&[("ip", "::ffff:203.0.113.0/120")], "ip=203.0.113.0/24"),
            (&[("ip", "2001:DB8::/32")], "ip=2001:db8::/32"),
            (&[("b", "x/y"), ("a", "10.0.0")], "a=10.0.0 b=x/y"),
        ] {
            assert_eq!(shown(entries), expected);
        }
    }

    #[test]
    fn an_invalid_target_names_the_field_and_says_what_to_write() {
        let long = "x".repeat(1_025);
        for (entries, expected) in [
            (&[][..], "entries: must contain 1 to 16 entries, got 0"),
            (
                &[("", "x")],
                "entries: the name of an entry must not be empty",
            ),
            (&[("ip", "")], "entries.ip: must not be empty"),
            (
                &[("a", &long)],
                "entries.a: 1025 bytes exceed the maximum of 1024",
            ),
            (
                &[("a", "x"), ("a", "y")],
                "entries.a: is given twice; set a block for each value",
            ),
            (
                &[("ip", "203.0.113.0/33")],
                "entries.ip: expected a network such as 203.0.113.0/32, with a prefix length from 0 \
                 to 32",
            ),
            (
                &[("ip", "2001:db8::/x")],
                "entries.ip: expected a network such as 2001:db8::/128, with a prefix length from 0 \
                 to 128",
            ),
            (
                &[("ip", "203.0.113.9/24")],
                "entries.ip: \"203.0.113.9/24\" is an address inside a network; write \
                 203.0.113.0/24 for the network, or 203.0.113.9 for the address",
            ),
        ] {
            assert_eq!(shown(entries), expected);
        }
    }

    #[test]
    fn a_wide_network_is_recognised() {
        let width = |entries: &[(&str, &str)]| {
            let target = EntryBlockTarget::new(None, entries).unwrap();
            target.check_width().err().map(|error| error.to_string())
        };
        for narrow in ["10.0.0.0/8", "2001::/16", "203.0.113.9", "acme"] {
            assert_eq!(width(&[("ip", narrow)]), None, "{narrow}");
        }
        assert_eq!(width(&[("ip", "0.0.0.0/0"), ("user", "x")]), None);
        assert_eq!(
            width(&[("ip", "0.0.0.0/0")]).unwrap(),
            "entries.ip: 0.0.0.0/0 contains every IPv4 client; write a prefix of /8 or longer"
        );
        // All IPv4-mapped addresses.
        assert!(width(&[("ip", "::ffff:0.0.0.0/96")]).is_some());
        assert_eq!(
            width(&[("ip", "2000::/3")]).unwrap(),
            "entries.ip: 2000::/3 contains a large part of all IPv6 clients; write a prefix of /16 \
             or longer"
        );
    }
}
