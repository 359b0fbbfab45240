//! Finds the client address of a request. The configuration says which proxies are trusted.
//!
//! Each proxy on the path appends the address of its own peer to a list, for example in
//! `X-Forwarded-For`. A client can also send a list of its own. The client's own elements then
//! precede the proxies' elements. Therefore, the list is read from the right, starting at the
//! socket's peer, up to the first address that is not a trusted proxy:
//!
//! ```text
//! X-Forwarded-For: 6.6.6.6, 203.0.113.9, 10.0.0.7        peer 10.0.0.8
//!                  written   written by   written by
//!                  by the    10.0.0.7:    10.0.0.8
//!                  client    the client
//! ```
//!
//! A header with a single address, such as `CF-Connecting-IP`, can be configured instead of a list.
//! For forward-auth requests in the nginx dialect, the address in `X-Real-IP` takes the place of
//! the socket's peer (see [`ForwardAuthRequest`](crate::ForwardAuthRequest)).

use std::{fmt, net::IpAddr};

use http::{HeaderMap, HeaderName};
use ipnet::IpNet;
use tidegate_core::canonical_net;

use crate::{address, forwarded};

/// The header `X-Forwarded-For`.
pub(crate) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The header `Forwarded`.
const FORWARDED: HeaderName = HeaderName::from_static("forwarded");

/// The default prefix length, in bits, of the IPv6 network by which clients are counted. A
/// subscriber usually gets a network of this size.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

/// The trusted proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proxies {
    /// The number of trusted proxies between the clients and this server. The addresses of the
    /// proxies are not checked. With 0 proxies, the socket's peer is the client. The setting is
    /// safe only if clients cannot bypass any of the proxies.
    Hops(usize),
    /// The networks of the trusted proxies. An IPv4-mapped network is treated as the IPv4 network.
    /// The setting works with any number of proxies on the path.
    Nets(Vec<IpNet>),
}

/// The header in which proxies record the client address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressHeader {
    /// The list in `X-Forwarded-For`.
    XForwardedFor,
    /// The list in `Forwarded` (RFC 7239).
    Forwarded,
    /// A single address in a provider's own header, such as `CF-Connecting-IP`.
    Single(HeaderName),
}

impl AddressHeader {
    /// Returns the header with this name, or `None` if the name is not a valid header name.
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

/// The configuration for finding the client address. By default, no proxy is trusted, and the
/// socket's peer is the client.
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
    /// Trusts `proxies` to write `header`.
    #[must_use]
    pub const fn new(proxies: Proxies, header: AddressHeader) -> Self {
        Self {
            proxies,
            header,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
        }
    }

    /// Sets the prefix length, in `bits`, of the IPv6 network by which clients are counted. Returns
    /// `None` if `bits` is not between 1 and 128.
    #[must_use]
    pub fn with_ipv6_prefix(self, bits: u8) -> Option<Self> {
        (1..=128).contains(&bits).then_some(Self {
            ipv6_prefix: bits,
            ..self
        })
    }

    /// Trusts the nearest `hops` proxies, without checking their addresses. Replaces the previous
    /// setting for trusted proxies.
    #[must_use]
    pub fn with_hops(self, hops: usize) -> Self {
        Self {
            proxies: Proxies::Hops(hops),
            ..self
        }
    }

    /// Returns the address of the client, given the socket's `peer` and the headers of the request.
    ///
    /// IPv4-mapped addresses are returned as IPv4, and zones are removed. The address recorded by a
    /// trusted proxy may be unusable: it may be `unknown`, invalid, or missing because the list is
    /// too short. If it is unusable, the result is the last known address. With [`Proxies::Hops`],
    /// the last known address is `peer`. With [`Proxies::Nets`], the last known address is that of
    /// the proxy that recorded the unusable address. Therefore, a client cannot use a header to
    /// choose an address that no trusted proxy has written.
    #[must_use]
    pub fn client_ip(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        match &self.proxies {
            Proxies::Hops(hops) => self.named(headers, *hops).unwrap_or(peer),
            Proxies::Nets(nets) if is_in(nets, peer) => self.named(headers, 1).unwrap_or(peer),
            Proxies::Nets(_) => peer,
        }
    }

    /// Returns the client address of a forward-auth request sent by `proxy`. `proxy` is always
    /// trusted, and its address is not checked. With [`Proxies::Hops`], the configured number of
    /// proxies is trusted in addition to `proxy`.
    #[must_use]
    pub fn client_ip_behind(&self, proxy: IpAddr, headers: &HeaderMap) -> IpAddr {
        self.client_ip_from_proxy(headers)
            .unwrap_or_else(|| proxy.to_canonical())
    }

    /// Returns the same as [`Self::client_ip_behind`], but `None` if the proxy does not send a
    /// valid address.
    pub(crate) fn client_ip_from_proxy(&self, headers: &HeaderMap) -> Option<IpAddr> {
        let hops = match self.proxies {
            Proxies::Hops(hops) => hops.saturating_add(1),
            Proxies::Nets(_) => 1,
        };
        self.named(headers, hops)
    }

    /// Returns whether there is a trusted proxy.
    #[must_use]
    pub fn has_proxies(&self) -> bool {
        match &self.proxies {
            Proxies::Hops(hops) => *hops > 0,
            Proxies::Nets(nets) => !nets.is_empty(),
        }
    }

    /// Returns true if the socket's `peer` is a trusted proxy.
    #[must_use]
    pub fn is_trusted(&self, peer: IpAddr) -> bool {
        match &self.proxies {
            Proxies::Hops(hops) => *hops > 0,
            Proxies::Nets(nets) => is_in(nets, peer.to_canonical()),
        }
    }

    /// Returns the prefix length of the IPv6 networks whose clients share one count.
    #[must_use]
    pub fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// Returns the address or network by which this client is counted.
    #[must_use]
    pub fn counted(&self, client: IpAddr) -> IpAddr {
        address::network(client, self.ipv6_prefix)
    }

    /// Returns the canonical string by which requests from an address or a network are counted.
    /// `written` is the address or network in any notation. Returns `None` if `written` is neither
    /// an address nor a network whose clients share one count.
    #[must_use]
    pub fn counted_text(&self, written: &str) -> Option<String> {
        let (bare, bits) = match written.split_once('/') {
            Some((bare, bits)) => (bare, Some(bits.parse::<u8>().ok()?)),
            None => (written, None),
        };
        let address = address::read(bare)?;
        let is_mapped = bare.contains(':');
        let has_one_count = match address {
            // The prefix length of an IPv4-mapped address refers to its IPv6 notation.
            IpAddr::V4(_) => bits.is_none_or(|bits| bits == if is_mapped { 128 } else { 32 }),
            IpAddr::V6(_) => bits.is_none_or(|bits| bits == 128 || bits == self.ipv6_prefix),
        };
        has_one_count.then(|| address::text(self.counted(address)))
    }

    /// Returns warnings about settings that let clients evade the limits, or use another client's
    /// address.
    pub fn warnings(&self) -> impl Iterator<Item = TrustWarning> {
        let all = match &self.proxies {
            Proxies::Hops(_) => false,
            Proxies::Nets(nets) => nets.iter().any(|net| canonical_net(*net).prefix_len() == 0),
        };
        let raw = self.ipv6_prefix > DEFAULT_IPV6_PREFIX;
        let all = all.then_some(TrustWarning::TrustAll);
        all.into_iter().chain(raw.then_some(TrustWarning::RawIpv6))
    }

    /// Returns the client address that the trusted proxies recorded. The function trusts the
    /// socket's peer if `hops` is at least 1. Returns `None` if the peer is not trusted or did not
    /// record a valid address.
    fn named(&self, headers: &HeaderMap, hops: usize) -> Option<IpAddr> {
        let skipped = hops.checked_sub(1)?;
        match &self.header {
            AddressHeader::Single(name) => single(headers, name),
            AddressHeader::XForwardedFor => {
                let lines = headers.get_all(X_FORWARDED_FOR).iter().rev();
                let elements = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
                let addresses =
                    elements.map(|element| address::read(std::str::from_utf8(element).ok()?));
                self.last_known(addresses, skipped)
            }
            AddressHeader::Forwarded => {
                let lines = headers.get_all(FORWARDED).iter().rev();
                let elements =
                    lines.flat_map(|line| forwarded::for_from_the_right(line.as_bytes()));
                let addresses = elements.map(|element| address::read(&element?));
                self.last_known(addresses, skipped)
            }
        }
    }

    /// With [`Proxies::Hops`], skips `skipped` addresses from the right, and returns the next
    /// address. With [`Proxies::Nets`], returns the first address from the right that is not a
    /// trusted proxy. If the list ends or contains an invalid address before that, returns the last
    /// trusted proxy's address that was read.
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

/// A setting that lets clients evade the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrustWarning {
    /// All addresses are trusted as proxies.
    TrustAll,
    /// IPv6 clients are counted by a prefix longer than /64, the usual network of one subscriber.
    RawIpv6,
}

impl TrustWarning {
    /// Returns the code of the warning, a fixed identifier to search for in logs.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::TrustAll => "trust-all",
            Self::RawIpv6 => "raw-ipv6",
        }
    }
}

impl fmt::Display for TrustWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, problem) = (
            self.code(),
            match self {
                Self::TrustAll => {
                    "every address is trusted as a proxy, so a client can claim any address; list the networks of your proxies"
                }
                Self::RawIpv6 => {
                    "IPv6 clients are counted by a prefix longer than /64; a client usually controls all addresses of a \
                     /64, and gets a separate count for each longer prefix; use 64 or less"
                }
            },
        );
        write!(f, "{code}: {problem}")
    }
}

/// Parses a network such as `10.0.0.0/8`, or a single address.
#[must_use]
pub fn network(text: &str) -> Option<IpNet> {
    let alone = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse().ok().or_else(alone)
}

fn is_in(nets: &[IpNet], address: IpAddr) -> bool {
    nets.iter()
        .any(|net| canonical_net(*net).contains(&address))
}

/// Returns the address in a header that occurs exactly once.
pub(crate) fn single(headers: &HeaderMap, name: &HeaderName) -> Option<IpAddr> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => address::read(line.to_str().ok()?),
        _ => None,
    }
}
