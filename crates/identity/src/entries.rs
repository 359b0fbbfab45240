//! The entries of a request: the named values that rules use in conditions and keys. Some entries
//! come from the client, and others from the application.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
};

use http::{Extensions, request::Parts};

use crate::{
    AmbiguousRequest, DerivedEntry, Trust, address,
    geoip::{GeoIpField, GeoIpSource},
    normalize::bare_host,
    target::RequestTarget,
    value::{EntryValue, derived_or_given, header_entry, prefixed_entry},
};

/// The address of the socket's peer, stored as a request extension. The code that accepts
/// connections must set the extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// The entries that the application sets, stored as a request extension. Examples are claims of a
/// verified token, the tenant, or the name in a TLS client certificate. The application's entries
/// take precedence over the entries of the request itself.
///
/// # Examples
///
/// ```
/// use tidegate_identity::Entries;
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(Entries::new().with("customer", "acme"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries(Vec<(Box<str>, Box<str>)>);

impl Entries {
    /// Creates an empty set of entries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the entry `name` to `value`, and replaces any previous value. An empty value is treated
    /// as absent.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Box<str>>) -> Self {
        self.0.retain(|(known, _)| **known != *name);
        self.0.push((name.into(), value.into()));
        self
    }

    /// Returns the value of the entry `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let named = self.0.iter().find(|(known, _)| **known == *name);
        named.map(|(_, value)| &**value)
    }
}

/// The sources of a request's entries. By default, no proxy is trusted, there is no GeoIP source,
/// and the socket's peer comes from the [`Peer`] extension.
#[derive(Clone, Debug)]
pub struct EntrySources {
    trust: Trust,
    derived: Vec<(Box<str>, DerivedEntry)>,
    peer: PeerSource,
    geoip: Option<Arc<dyn GeoIpSource>>,
}

impl EntrySources {
    /// Sets the function that reads the socket's peer from the extensions of each request.
    pub fn set_peer_extension(&mut self, peer: fn(&Extensions) -> Option<IpAddr>) {
        self.peer = PeerSource::Extensions(peer);
    }

    /// Sets `peer` as the socket's peer of all requests. All requests must arrive on the same
    /// connection.
    pub fn set_connection_peer(&mut self, peer: IpAddr) {
        self.peer = PeerSource::Connection(peer, AddressTextCache::default());
    }

    /// Sets the proxies that are trusted to report the client address.
    pub fn set_trust(&mut self, trust: Trust) {
        self.trust = trust;
    }

    /// Sets the source of the entries `country` and `asn`.
    pub fn set_geoip(&mut self, geoip: Arc<dyn GeoIpSource>) {
        self.geoip = Some(geoip);
    }

    /// Adds the entry `name`, derived from another entry.
    pub fn add_derived(&mut self, name: &str, derived: DerivedEntry) {
        self.derived.push((name.into(), derived));
    }
}

/// The source of the socket's peer address.
#[derive(Clone, Debug)]
enum PeerSource {
    /// The peer address is in an extension of each request.
    Extensions(fn(&Extensions) -> Option<IpAddr>),
    /// All requests arrive on one connection and have this peer address.
    Connection(IpAddr, AddressTextCache),
}

impl PeerSource {
    fn of(&self, request: &Parts) -> Option<IpAddr> {
        match self {
            Self::Extensions(peer) => peer(&request.extensions),
            Self::Connection(peer, _) => Some(*peer),
        }
    }

    /// Returns the address `ip` as a string.
    fn text_of(&self, ip: IpAddr) -> Cow<'_, str> {
        match self {
            Self::Extensions(_) => Cow::Owned(address::text(ip)),
            Self::Connection(_, text) => text.text_of(ip),
        }
    }
}

/// Caches the first formatted address. Most connections need only one address.
#[derive(Clone, Debug, Default)]
struct AddressTextCache(OnceLock<(IpAddr, Box<str>)>);

impl AddressTextCache {
    fn text_of(&self, ip: IpAddr) -> Cow<'_, str> {
        let first = || (ip, address::text(ip).into());
        let (known, text) = self.0.get_or_init(first);
        if *known == ip {
            Cow::Borrowed(text)
        } else {
            Cow::Owned(address::text(ip))
        }
    }
}

impl Default for EntrySources {
    fn default() -> Self {
        Self {
            trust: Trust::default(),
            derived: Vec::new(),
            peer: PeerSource::Extensions(|extensions| {
                extensions.get().map(|Peer(address)| address.ip())
            }),
            geoip: None,
        }
    }
}

/// A request head, with access to the entries of the request.
#[derive(Debug)]
pub struct RequestEntries<'r> {
    parts: &'r Parts,
    sources: &'r EntrySources,
    target: RequestTarget<'r>,
    known: Option<&'r Entries>,
}

impl<'r> RequestEntries<'r> {
    /// Creates the entries of the request with this head.
    #[must_use]
    pub fn new(parts: &'r Parts, sources: &'r EntrySources) -> Self {
        Self {
            parts,
            sources,
            target: RequestTarget::of(&parts.uri),
            known: parts.extensions.get(),
        }
    }

    /// Returns the value of the entry `name`. An empty value is treated as absent.
    ///
    /// # Errors
    ///
    /// Returns [`AmbiguousRequest`] if the value is ambiguous.
    pub fn entry(&self, name: &str) -> EntryValue<'_> {
        match self.known(name) {
            Some(value) => Ok((!value.is_empty()).then_some(Cow::Borrowed(value))),
            None => derived_or_given(&self.sources.derived, name, |name| self.given(name)),
        }
    }

    /// Returns true if the peer address is known.
    #[must_use]
    pub fn has_peer(&self) -> bool {
        self.sources.peer.of(self.parts).is_some()
    }

    fn known(&self, name: &str) -> Option<&str> {
        self.known.and_then(|known| known.get(name))
    }

    fn given(&self, name: &str) -> EntryValue<'_> {
        if let Some(value) = self.known(name) {
            return Ok(Some(Cow::Borrowed(value)));
        }
        let address = |ip: IpAddr| self.sources.peer.text_of(ip);
        Ok(match name {
            "method" => Some(Cow::Borrowed(self.parts.method.as_str())),
            "path" => Some(self.target.path()?),
            "host" => self.host()?.map(Cow::Owned),
            "ip" => {
                let trust = &self.sources.trust;
                self.client().map(|ip| address(trust.counted(ip)))
            }
            "ip.exact" => self.client().map(address),
            _ => match prefixed_entry(name, &self.parts.headers, Some(&self.target)) {
                Some(value) => value?,
                None => self.geoip_entry(name).map(Cow::Owned),
            },
        })
    }

    /// Returns the requested host in lower case, without the port.
    fn host(&self) -> Result<Option<String>, AmbiguousRequest> {
        let host = match self.parts.uri.host() {
            Some(host) => Some(Cow::Borrowed(host)),
            None => header_entry("host", &self.parts.headers, "host")?,
        };
        Ok(host.map(|host| bare_host(&host)))
    }

    /// Returns the GeoIP entry `name` of the client address.
    fn geoip_entry(&self, name: &str) -> Option<String> {
        let geoip = self.sources.geoip.as_deref()?;
        GeoIpField::named(name)?.of(self.client()?, geoip)
    }

    fn client(&self) -> Option<IpAddr> {
        let peer = self.sources.peer.of(self.parts)?;
        Some(self.sources.trust.client_ip(peer, &self.parts.headers))
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;
    use crate::{AddressHeader, Proxies};

    fn request(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut builder = http::Request::builder().method("PUT").uri(uri);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap().into_parts().0
    }

    fn found(parts: &Parts, identity: &EntrySources, name: &str) -> Option<String> {
        let described = RequestEntries::new(parts, identity);
        described.entry(name).unwrap().map(Cow::into_owned)
    }

    #[test]
    fn a_request_is_described_by_its_head() {
        let parts = request(
            "https://Example.org:8443/%6Cogin?next=%2Fhome",
            &[
                ("host", "other.org"),
                ("cookie", "s=1"),
                ("x-key", "acme.secret"),
            ],
        );
        let identity = EntrySources {
            derived: vec![(
                "key".into(),
                DerivedEntry::split("header.x-key", ".", 1).unwrap(),
            )],
            ..EntrySources::default()
        };
        for (name, expected) in [
            ("method", Some("PUT")),
            ("path", Some("/login")),
            ("host", Some("example.org")),
            ("query.next", Some("/home")),
            ("cookie.s", Some("1")),
            ("key", Some("acme")),
            ("header.x-none", None),
            ("ip", None),
        ] {
            assert_eq!(
                found(&parts, &identity, name).as_deref(),
                expected,
                "{name}"
            );
        }
        for (written, expected) in [
            ("[::1]:80", "[::1]"),
            ("API.example.com.", "api.example.com"),
            ("api.example.com.:443", "api.example.com"),
        ] {
            let parts = request("/", &[("host", written)]);
            let host = found(&parts, &EntrySources::default(), "host");
            assert_eq!(host.as_deref(), Some(expected));
        }
    }

    /// HTTP/2 libraries do not trim white space. If a value kept its white space, the rule would
    /// count it as a different client.
    #[test]
    fn white_space_around_a_value_is_trimmed() {
        for value in ["a", " a", "a\t", "\t a "] {
            let parts = request("/", &[("x-key", value)]);
            let key = found(&parts, &EntrySources::default(), "header.x-key");
            assert_eq!(key.as_deref(), Some("a"));
        }
    }

    /// Behind a proxy, the header `X-Customer` may be trusted. In an application without a proxy,
    /// the client controls the header `X-Customer`.
    #[test]
    fn application_entries_come_first_and_no_header_replaces_them() {
        let mut parts = request("/login", &[("x-customer", "evil")]);
        let identity = EntrySources::default();
        assert_eq!(found(&parts, &identity, "customer"), None);
        let known = Entries::new().with("customer", "old").with("path", "/");
        parts.extensions.insert(known.with("customer", "acme"));
        assert_eq!(
            found(&parts, &identity, "customer").as_deref(),
            Some("acme")
        );
        assert_eq!(found(&parts, &identity, "path").as_deref(), Some("/"));
        let header = DerivedEntry::split("header.x-customer", ".", 1).unwrap();
        let parted = EntrySources {
            derived: vec![("customer".into(), header)],
            ..EntrySources::default()
        };
        parts
            .headers
            .insert("x-customer", "evil.1".parse().unwrap());
        let customer = found(&parts, &parted, "customer");
        assert_eq!(customer.as_deref(), Some("acme"));
        parts.extensions.insert(Entries::new().with("customer", ""));
        assert_eq!(found(&parts, &parted, "customer"), None);
        assert_eq!(found(&parts, &identity, "customer"), None);
    }

    /// A GeoIP source that contains only one address.
    #[derive(Debug)]
    struct Island(IpAddr);

    impl GeoIpSource for Island {
        fn country(&self, address: IpAddr) -> Option<String> {
            (address == self.0).then(|| "IS".into())
        }

        fn asn(&self, _address: IpAddr) -> Option<u32> {
            None
        }
    }

    #[test]
    fn a_geoip_source_provides_country_and_asn() {
        let mut parts = request("/", &[("x-country", "AQ")]);
        let here: IpAddr = "192.0.2.1".parse().unwrap();
        parts.extensions.insert(Peer(SocketAddr::new(here, 1)));
        assert_eq!(found(&parts, &EntrySources::default(), "country"), None);
        let identity = EntrySources {
            geoip: Some(Arc::new(Island(here))),
            ..EntrySources::default()
        };
        assert_eq!(found(&parts, &identity, "country").as_deref(), Some("IS"));
        assert_eq!(found(&parts, &identity, "asn"), None);
        parts
            .extensions
            .insert(Entries::new().with("country", "NO"));
        assert_eq!(found(&parts, &identity, "country").as_deref(), Some("NO"));
    }

    #[test]
    fn the_client_is_the_peer_unless_a_trusted_proxy_names_another() {
        let mut parts = request("/", &[("x-forwarded-for", "6.6.6.6, 2001:db8:1:2:3::4")]);
        let socket = |ip: &str| Peer(SocketAddr::new(ip.parse().unwrap(), 4_711));
        parts.extensions.insert(socket("::ffff:10.0.0.7"));
        let nobody = EntrySources::default();
        assert_eq!(found(&parts, &nobody, "ip").as_deref(), Some("10.0.0.7"));
        let nets: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap()];
        let proxies = EntrySources {
            trust: Trust::new(Proxies::Nets(nets), AddressHeader::XForwardedFor),
            ..EntrySources::default()
        };
        assert_eq!(
            found(&parts, &proxies, "ip").as_deref(),
            Some("2001:db8:1:2::")
        );
        let exact = found(&parts, &proxies, "ip.exact");
        assert_eq!(exact.as_deref(), Some("2001:db8:1:2:3::4"));
        parts.extensions.insert(socket("192.0.2.1"));
        assert_eq!(found(&parts, &proxies, "ip").as_deref(), Some("192.0.2.1"));
    }

    #[test]
    fn clients_on_one_connection_are_distinguished() {
        let proxy = "10.0.0.7".parse().unwrap();
        let nets: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap()];
        let identity = EntrySources {
            trust: Trust::new(Proxies::Nets(nets), AddressHeader::XForwardedFor),
            peer: PeerSource::Connection(proxy, AddressTextCache::default()),
            ..EntrySources::default()
        };
        for (client, network) in [
            ("2001:db8::1", "2001:db8::"),
            ("192.0.2.1", "192.0.2.1"),
            ("2001:db8::1", "2001:db8::"),
        ] {
            let parts = request("/", &[("x-forwarded-for", client)]);
            assert_eq!(found(&parts, &identity, "ip").as_deref(), Some(network));
            assert_eq!(
                found(&parts, &identity, "ip.exact").as_deref(),
                Some(client)
            );
        }
    }
}
