//! Who the client is, by the word of those who may be believed.
//!
//! Each proxy on the way appends whom it was asked by to a list, and so may the client, before all others. So
//! the list is read from the right, from the socket's other end on, and only as far as there is a proxy that
//! is believed:
//!
//! ```text
//! X-Forwarded-For: 6.6.6.6, 203.0.113.9, 10.0.0.7        peer 10.0.0.8
//!                  written   written by   written by
//!                  by the    10.0.0.7:    10.0.0.8
//!                  client    the client
//! ```

use std::{fmt, net::IpAddr};

use http::{HeaderMap, HeaderName};
use ipnet::IpNet;
use tidegate_core::canonical_net;

use crate::{address, rfc7239};

/// `X-Forwarded-For`.
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// `Forwarded`.
const FORWARDED: HeaderName = HeaderName::from_static("forwarded");

/// The prefix of an IPv6 address that counts are kept for, unless said otherwise: the network that one
/// subscriber is given.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

/// Which proxies are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proxies {
    /// As many as stand between the clients and us, whatever their addresses. Where there are none, 0, the
    /// socket's other end is the client. Right as long as nobody can ask us past one of them.
    Hops(usize),
    /// Those with an address in one of these networks, an IPv4-mapped one being the IPv4 network. Right however many a request
    /// has passed.
    Nets(Vec<IpNet>),
}

/// Where proxies write down whom they were asked by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressHeader {
    /// The list in `X-Forwarded-For`.
    XForwardedFor,
    /// The list in `Forwarded`, RFC 7239.
    Forwarded,
    /// One address in a header of the provider's own, such as `CF-Connecting-IP`.
    Single(HeaderName),
}

impl AddressHeader {
    /// The header called `name`; `None` if no header can have that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        Some(match name {
            name if name == X_FORWARDED_FOR => Self::XForwardedFor,
            name if name == FORWARDED => Self::Forwarded,
            name => Self::Single(name),
        })
    }
}

/// How the address of a client is found. The default believes nobody: the socket's other end is the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    proxies: Proxies,
    header: AddressHeader,
    ipv6_prefix: u8,
}

impl Default for Trust {
    fn default() -> Self {
        Self::new(Proxies::Hops(0), AddressHeader::XForwardedFor)
    }
}

impl Trust {
    /// Believes `proxies` in what they write into `header`.
    #[must_use]
    pub const fn new(proxies: Proxies, header: AddressHeader) -> Self {
        Self {
            proxies,
            header,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
        }
    }

    /// Keeps counts for the first `bits` of an IPv6 address, from 1 to 128; `None` if there are not so many.
    #[must_use]
    pub fn with_ipv6_prefix(self, bits: u8) -> Option<Self> {
        (1..=128).contains(&bits).then_some(Self {
            ipv6_prefix: bits,
            ..self
        })
    }

    /// Believes so many proxies instead, whatever their addresses.
    #[must_use]
    pub fn with_hops(self, hops: usize) -> Self {
        Self {
            proxies: Proxies::Hops(hops),
            ..self
        }
    }

    /// The address of the client whose request the socket's other end, `peer`, has brought.
    ///
    /// IPv4-mapped addresses are IPv4 addresses, and zones are dropped. Where a believed proxy names nobody
    /// that can be read (`unknown`, nonsense, a list that is too short), the client is the last one known for
    /// certain: with [`Proxies::Hops`] `peer`, with [`Proxies::Nets`] that proxy itself. So no header lets a
    /// client choose an address that no believed proxy has written.
    #[must_use]
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        match &self.proxies {
            Proxies::Hops(hops) => self.named(headers, *hops).unwrap_or(peer),
            Proxies::Nets(nets) if is_in(nets, peer) => self.named(headers, 1).unwrap_or(peer),
            Proxies::Nets(_) => peer,
        }
    }

    /// The same for a request about which `proxy` asks: it is believed, whatever its address, and one more
    /// than the hops.
    #[must_use]
    pub fn client_of(&self, proxy: IpAddr, headers: &HeaderMap) -> IpAddr {
        self.named_by_proxy(headers)
            .unwrap_or_else(|| proxy.to_canonical())
    }

    /// The same, unless that proxy names nobody.
    pub(crate) fn named_by_proxy(&self, headers: &HeaderMap) -> Option<IpAddr> {
        let hops = match self.proxies {
            Proxies::Hops(hops) => hops.saturating_add(1),
            Proxies::Nets(_) => 1,
        };
        self.named(headers, hops)
    }

    /// Whether `peer`, the socket's other end, is a proxy that is believed.
    #[must_use]
    pub fn believes(&self, peer: IpAddr) -> bool {
        match &self.proxies {
            Proxies::Hops(hops) => *hops > 0,
            Proxies::Nets(nets) => is_in(nets, peer.to_canonical()),
        }
    }

    /// The address that counts are kept for.
    #[must_use]
    pub fn counted(&self, client: IpAddr) -> IpAddr {
        address::network(client, self.ipv6_prefix)
    }

    /// The text under which an address is counted that is written like this, or a network that has one count; `None` if it is
    /// neither.
    #[must_use]
    pub fn counted_text(&self, written: &str) -> Option<String> {
        let (bare, bits) = match written.split_once('/') {
            Some((bare, bits)) => (bare, Some(bits.parse::<u8>().ok()?)),
            None => (written, None),
        };
        let address = address::read(bare)?;
        let is_mapped = bare.contains(':');
        let has_one_count = match address {
            // One that was written as IPv6 has the bits of that.
            IpAddr::V4(_) => bits.is_none_or(|bits| bits == if is_mapped { 128 } else { 32 }),
            IpAddr::V6(_) => bits.is_none_or(|bits| bits == 128 || bits == self.ipv6_prefix),
        };
        has_one_count.then(|| address::text(self.counted(address)))
    }

    /// What of this lets clients be counted for others, or not at all.
    pub fn warnings(&self) -> impl Iterator<Item = Warning> {
        let all = match &self.proxies {
            Proxies::Hops(_) => false,
            Proxies::Nets(nets) => nets.iter().any(|net| canonical_net(*net).prefix_len() == 0),
        };
        let raw = self.ipv6_prefix > DEFAULT_IPV6_PREFIX;
        let all = all.then_some(Warning::TrustAll);
        all.into_iter().chain(raw.then_some(Warning::RawIpv6))
    }

    /// The client by the word of the socket's other end, who is believed if there are any `hops`; `None` if he is not, or names nobody.
    fn named(&self, headers: &HeaderMap, hops: usize) -> Option<IpAddr> {
        let skipped = hops.checked_sub(1)?;
        match &self.header {
            AddressHeader::Single(name) => single(headers, name),
            AddressHeader::XForwardedFor => {
                let lines = headers.get_all(X_FORWARDED_FOR).iter().rev();
                let elements =
                    lines.flat_map(|line| line.as_bytes().rsplit(|octet| *octet == b','));
                let addresses =
                    elements.map(|element| address::read(std::str::from_utf8(element).ok()?));
                self.last_known(addresses, skipped)
            }
            AddressHeader::Forwarded => {
                let lines = headers.get_all(FORWARDED).iter().rev();
                let elements = lines.flat_map(|line| rfc7239::for_from_the_right(line.as_bytes()));
                let addresses = elements.map(|element| address::read(&element?));
                self.last_known(addresses, skipped)
            }
        }
    }

    /// The first from the right whom nobody vouches for.
    fn last_known(
        &self,
        mut from_the_right: impl Iterator<Item = Option<IpAddr>>,
        skipped: usize,
    ) -> Option<IpAddr> {
        let Proxies::Nets(nets) = &self.proxies else {
            return from_the_right.nth(skipped).flatten();
        };
        let mut known = None;
        while let Some(Some(address)) = from_the_right.next() {
            known = Some(address);
            if !is_in(nets, address) {
                break;
            }
        }
        known
    }
}

/// A setting by which abusers get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A network of all addresses is believed.
    TrustAll,
    /// IPv6 addresses are counted by more than their network.
    RawIpv6,
}

impl Warning {
    /// The warning's name, for those who look for it in a log.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::TrustAll => "trust-all",
            Self::RawIpv6 => "raw-ipv6",
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, problem) = (
            self.code(),
            match self {
                Self::TrustAll => {
                    "every address is a trusted proxy, so a client can name any address as its own; name the networks of your proxies"
                }
                Self::RawIpv6 => {
                    "counts are kept for less than a /64, of which a client has all addresses and so as many counts as it likes; use 64 or less"
                }
            },
        );
        write!(f, "{code}: {problem}")
    }
}

/// Reads a network such as `10.0.0.0/8`, or one address.
#[must_use]
pub fn network(text: &str) -> Option<IpNet> {
    let alone = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse().ok().or_else(alone)
}

fn is_in(nets: &[IpNet], address: IpAddr) -> bool {
    nets.iter()
        .any(|net| canonical_net(*net).contains(&address))
}

/// The address in a header of which there is one line.
pub(crate) fn single(headers: &HeaderMap, name: &HeaderName) -> Option<IpAddr> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => address::read(line.to_str().ok()?),
        _ => None,
    }
}
