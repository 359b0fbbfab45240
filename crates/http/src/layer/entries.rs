//! The entries of a request: those sent by the client, and those set by the application.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
};

use http::{Extensions, request::Parts};
use smallvec::SmallVec;
use tidegate_core::RuleSet;

use crate::{
    Part, Trust, Unclear, address,
    atlas::{Atlas, Place},
    describe::{Value, bare_host, header, named, whole_or_part},
    target::Target,
};

/// The socket's peer, as a request extension. The code that accepts connections sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Entries set by the application, as a request extension: claims of a verified token, the tenant,
/// or the name in a TLS client certificate. They override the entries of the request itself.
///
/// # Examples
///
/// ```
/// use tidegate_http::Entries;
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(Entries::new().with("customer", "acme"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries(Vec<(Box<str>, Box<str>)>);

impl Entries {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the entry `name` to `value` and replaces any previous value. An empty value counts as
    /// absent.
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

/// How the entries of a request are extracted.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) trust: Trust,
    pub(super) parts: Vec<(Box<str>, Part)>,
    pub(super) peer: PeerOf,
    pub(super) atlas: Option<Arc<dyn Atlas>>,
}

/// Where the socket's peer address comes from.
#[derive(Clone, Debug)]
pub(super) enum PeerOf {
    /// From an extension of each request.
    Extensions(fn(&Extensions) -> Option<IpAddr>),
    /// From the connection, for all of its requests.
    Connection(IpAddr, Spelled),
}

impl PeerOf {
    fn of(&self, request: &Parts) -> Option<IpAddr> {
        match self {
            Self::Extensions(peer) => peer(&request.extensions),
            Self::Connection(peer, _) => Some(*peer),
        }
    }

    /// Returns the address as text.
    fn spell(&self, ip: IpAddr) -> Cow<'_, str> {
        match self {
            Self::Extensions(_) => Cow::Owned(address::text(ip)),
            Self::Connection(_, spelled) => spelled.spell(ip),
        }
    }
}

/// Caches the text of the first address that was formatted. On most connections it is the only one.
#[derive(Clone, Debug, Default)]
pub(super) struct Spelled(OnceLock<(IpAddr, Box<str>)>);

impl Spelled {
    fn spell(&self, ip: IpAddr) -> Cow<'_, str> {
        let first = || (ip, address::text(ip).into());
        let (known, text) = self.0.get_or_init(first);
        if *known == ip {
            Cow::Borrowed(text)
        } else {
            Cow::Owned(address::text(ip))
        }
    }
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            trust: Trust::default(),
            parts: Vec::new(),
            peer: PeerOf::Extensions(|extensions| {
                extensions.get().map(|Peer(address)| address.ip())
            }),
            atlas: None,
        }
    }
}

/// A list with inline capacity for the number of entries that rules usually use.
pub(super) type Few<T> = SmallVec<[T; 4]>;

/// A request, with access to its entries.
#[derive(Debug)]
pub(super) struct Described<'r> {
    parts: &'r Parts,
    identity: &'r Identity,
    target: Target<'r>,
    known: Option<&'r Entries>,
}

impl<'r> Described<'r> {
    pub(super) fn new(parts: &'r Parts, identity: &'r Identity) -> Self {
        Self {
            parts,
            identity,
            target: Target::of(&parts.uri),
            known: parts.extensions.get(),
        }
    }

    /// Returns the value of the entry `name`, never empty.
    pub(super) fn entry(&self, name: &str) -> Value<'_> {
        match self.known(name) {
            Some(value) => Ok((!value.is_empty()).then_some(Cow::Borrowed(value))),
            None => whole_or_part(&self.identity.parts, name, |name| self.given(name)),
        }
    }

    /// Returns the entries that `rules` use.
    pub(super) fn entries<'n>(
        &self,
        rules: &'n RuleSet,
    ) -> Result<Few<(&'n str, Cow<'_, str>)>, Unclear> {
        let mut found = Few::new();
        for name in rules.entry_names() {
            if let Some(value) = self.entry(name)? {
                found.push((name, value));
            }
        }
        Ok(found)
    }

    /// Returns true if the peer address is known.
    pub(super) fn has_peer(&self) -> bool {
        self.identity.peer.of(self.parts).is_some()
    }

    fn known(&self, name: &str) -> Option<&str> {
        self.known.and_then(|known| known.get(name))
    }

    fn given(&self, name: &str) -> Value<'_> {
        if let Some(value) = self.known(name) {
            return Ok(Some(Cow::Borrowed(value)));
        }
        let address = |ip: IpAddr| self.identity.peer.spell(ip);
        Ok(match name {
            "method" => Some(Cow::Borrowed(self.parts.method.as_str())),
            "path" => Some(self.target.path()?),
            "host" => self.host()?.map(Cow::Owned),
            "ip" => {
                let trust = &self.identity.trust;
                self.client().map(|ip| address(trust.counted(ip)))
            }
            "ip.exact" => self.client().map(address),
            _ => match named(name, &self.parts.headers, Some(&self.target)) {
                Some(value) => value?,
                None => self.place(name).map(Cow::Owned),
            },
        })
    }

    /// Returns the requested host in lower case, without the port.
    fn host(&self) -> Result<Option<String>, Unclear> {
        let host = match self.parts.uri.host() {
            Some(host) => Some(Cow::Borrowed(host)),
            None => header("host", &self.parts.headers, "host")?,
        };
        Ok(host.map(|host| bare_host(&host)))
    }

    /// Returns the GeoIP entry `name` of the client address.
    fn place(&self, name: &str) -> Option<String> {
        let atlas = self.identity.atlas.as_deref()?;
        Place::named(name)?.of(self.client()?, atlas)
    }

    fn client(&self) -> Option<IpAddr> {
        let peer = self.identity.peer.of(self.parts)?;
        Some(self.identity.trust.client(peer, &self.parts.headers))
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

    fn found(parts: &Parts, identity: &Identity, name: &str) -> Option<String> {
        let described = Described::new(parts, identity);
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
        let identity = Identity {
            parts: vec![("key".into(), Part::split("header.x-key", ".", 1).unwrap())],
            ..Identity::default()
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
            let host = found(&parts, &Identity::default(), "host");
            assert_eq!(host.as_deref(), Some(expected));
        }
    }

    /// HTTP/2 libraries do not trim white space, and a key with white space would be a different
    /// key.
    #[test]
    fn white_space_around_a_value_is_trimmed() {
        for value in ["a", " a", "a\t", "\t a "] {
            let parts = request("/", &[("x-key", value)]);
            let key = found(&parts, &Identity::default(), "header.x-key");
            assert_eq!(key.as_deref(), Some("a"));
        }
    }

    /// Behind a proxy `X-Customer` may be trusted; in an application the client controls it.
    #[test]
    fn application_entries_come_first_and_no_header_replaces_them() {
        let mut parts = request("/login", &[("x-customer", "evil")]);
        let identity = Identity::default();
        assert_eq!(found(&parts, &identity, "customer"), None);
        let known = Entries::new().with("customer", "old").with("path", "/");
        parts.extensions.insert(known.with("customer", "acme"));
        assert_eq!(
            found(&parts, &identity, "customer").as_deref(),
            Some("acme")
        );
        assert_eq!(found(&parts, &identity, "path").as_deref(), Some("/"));
        let header = Part::split("header.x-customer", ".", 1).unwrap();
        let parted = Identity {
            parts: vec![("customer".into(), header)],
            ..Identity::default()
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

    /// A GeoIP source that knows one address.
    #[derive(Debug)]
    struct Island(IpAddr);

    impl Atlas for Island {
        fn country(&self, address: IpAddr) -> Option<String> {
            (address == self.0).then(|| "IS".into())
        }

        fn asn(&self, _address: IpAddr) -> Option<u32> {
            None
        }
    }

    #[test]
    fn an_atlas_provides_country_and_asn() {
        let mut parts = request("/", &[("x-country", "AQ")]);
        let here: IpAddr = "192.0.2.1".parse().unwrap();
        parts.extensions.insert(Peer(SocketAddr::new(here, 1)));
        assert_eq!(found(&parts, &Identity::default(), "country"), None);
        let identity = Identity {
            atlas: Some(Arc::new(Island(here))),
            ..Identity::default()
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
        let nobody = Identity::default();
        assert_eq!(found(&parts, &nobody, "ip").as_deref(), Some("10.0.0.7"));
        let nets: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap()];
        let proxies = Identity {
            trust: Trust::new(Proxies::Nets(nets), AddressHeader::XForwardedFor),
            ..Identity::default()
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
        let identity = Identity {
            trust: Trust::new(Proxies::Nets(nets), AddressHeader::XForwardedFor),
            peer: PeerOf::Connection(proxy, Spelled::default()),
            ..Identity::default()
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
