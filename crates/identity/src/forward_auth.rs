//! Forward auth: parses the headers in which a proxy describes the original request. The proxy
//! sends an auth request for each original request before it forwards the original request.
//!
//! Proxies use one of two header dialects. nginx `auth_request` is configured to send
//! `X-Original-Method`, `X-Original-URI` (ingress-nginx: `X-Original-URL`) and `X-Real-IP`. Caddy
//! `forward_auth` and Traefik `ForwardAuth` send `X-Forwarded-Method`, `-Uri`, `-Host`, `-Proto`
//! and `-For`. Envoy describes the original request in the fields of a message, or sends it as the
//! auth request itself. For Envoy, the caller therefore passes the parts of the original request as
//! a [`DescribedRequest`].
//!
//! A proxy forwards the headers of the other dialect unchanged from the client, so the two dialects
//! are never mixed. A request with headers of both dialects is rejected, unless the configuration
//! names the dialect of the proxy.
//!
//! | entry | source |
//! | --- | --- |
//! | `method` | the original method |
//! | `path` | the original path without query, in RFC 3986 normal form, repeated slashes merged |
//! | `host` | the original host in lower case, without the port; nginx: `Host` |
//! | `scheme` | `X-Forwarded-Proto` |
//! | `ip` | the client address; for IPv6 the subscriber's network (default /64) |
//! | `ip.exact` | the complete client address |
//! | `country`, `asn` | the country and autonomous system of the client, with a [`GeoIpSource`] |
//! | `query.NAME` | the query parameter NAME, decoded |
//! | `cookie.NAME` | the cookie NAME, decoded |
//! | `header.NAME` | the header NAME |
//! | any other NAME | the header `X-NAME`, with `-` for `_`: `api_key` is `X-Api-Key` |
//!
//! The client controls the entries in the last four rows, unless the proxy sets them. An empty
//! value is treated as absent. A rule does not apply if an entry in its key is absent. A request
//! with an ambiguous value is rejected as [`AmbiguousRequest`], because the service might use a
//! different value than the rules. The following values are ambiguous:
//!
//! - an entry with several different values,
//! - a path with `.` or `..` segments,
//! - a header named by `Connection`, which the proxy may remove before the service sees it,
//! - a header that the request also contains with `_` instead of `-` in its name.

use std::{borrow::Cow, net::IpAddr};

use http::{HeaderMap, HeaderName, header::CONNECTION};

use crate::{
    AmbiguousRequest, DerivedEntry, Trust, address, client_ip,
    dialect::{DialectHeaders, HeaderDialect},
    geoip::{GeoIpField, GeoIpSource},
    normalize::bare_host,
    target::RequestTarget,
    value::{EntryValue, derived_or_given, header_entry, prefixed_entry},
};

/// The header `X-Real-IP`.
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// The sender of a forward-auth request, and the information about which headers are trusted.
#[derive(Clone, Copy, Debug)]
pub struct ForwardAuthContext<'t> {
    /// The address of the socket's peer, which is the proxy.
    pub peer: IpAddr,
    /// The dialect of the headers that the proxy sends.
    pub dialect: HeaderDialect,
    /// The trusted proxies in front of the sender. If the sender is nginx, `X-Real-IP` contains the
    /// address of nginx's own peer.
    pub trust: &'t Trust,
    /// The derived entries by name. The derived entries take precedence over the entries of the
    /// table in the module documentation.
    pub derived: &'t [(Box<str>, DerivedEntry)],
    /// The GeoIP source. With a source, the entries `country` and `asn` never come from headers,
    /// even for addresses that the source does not contain.
    pub geoip: Option<&'t dyn GeoIpSource>,
}

/// The parts of an original request, for a proxy that does not describe them in headers, such as
/// Envoy.
#[derive(Clone, Copy, Debug)]
pub struct DescribedRequest<'r> {
    /// The headers of the original request.
    pub headers: &'r HeaderMap,
    /// The original method.
    pub method: Option<&'r str>,
    /// The original request target.
    pub target: Option<&'r str>,
    /// The original host, with or without the port.
    pub host: Option<&'r str>,
    /// The original scheme. Without a scheme, the entry `scheme` comes from `X-Forwarded-Proto`.
    pub scheme: Option<&'r str>,
    /// The address of the proxy's own peer. If `peer` is `None`, the proxy must have appended the
    /// address to the address header. If `peer` is `Some` and the proxy has also appended the
    /// address to the header, the appended element counts as one more proxy with
    /// [`Proxies::Hops`](crate::Proxies::Hops).
    pub peer: Option<IpAddr>,
    /// The entries that the proxy's configuration sets, by name. The configured entries take
    /// precedence over all other entries, and their values are used unchanged.
    pub entries: &'r [(&'r str, &'r str)],
}

/// The original request, as described by a proxy.
#[derive(Clone, Debug)]
pub struct ForwardAuthRequest<'r> {
    headers: &'r HeaderMap,
    method: Option<Cow<'r, str>>,
    target: Option<RequestTarget<'r>>,
    host: Option<String>,
    scheme: Option<&'r str>,
    entries: &'r [(&'r str, &'r str)],
    ip: IpAddr,
    counted_ip: IpAddr,
    has_client_ip: bool,
    derived: &'r [(Box<str>, DerivedEntry)],
    geoip: Option<&'r dyn GeoIpSource>,
}

impl<'r> ForwardAuthRequest<'r> {
    /// Creates the original request from parts that the proxy does not describe in headers. The
    /// dialect of `context` has no effect.
    #[must_use]
    pub fn described(request: DescribedRequest<'r>, context: ForwardAuthContext<'r>) -> Self {
        let headers = request.headers;
        let named = match request.peer {
            // This code cannot tell whether the proxy has appended `peer` to the list. Even if the
            // last element equals `peer`, the proxy may have taken `peer` from the list. Therefore,
            // do not skip a last element that equals `peer`. Skipping the element would allow a
            // client to choose its own address.
            Some(peer) => Some(context.trust.client_ip(peer, headers)),
            None => context.trust.client_ip_from_proxy(headers),
        };
        let ip = named.unwrap_or_else(|| context.peer.to_canonical());
        Self {
            headers,
            method: request.method.map(Cow::Borrowed),
            target: request
                .target
                .map(|target| RequestTarget::parse(Cow::Borrowed(target))),
            host: request.host.map(bare_host),
            scheme: request.scheme,
            entries: request.entries,
            counted_ip: context.trust.counted(ip),
            has_client_ip: named.is_some(),
            ip,
            derived: context.derived,
            geoip: context.geoip,
        }
    }

    /// Parses the headers of a forward-auth request.
    ///
    /// # Errors
    ///
    /// Returns [`AmbiguousRequest`] if a header that describes the request has several values. With
    /// [`HeaderDialect::Detect`], also returns it if headers of both dialects are present.
    pub fn parse(
        headers: &'r HeaderMap,
        context: ForwardAuthContext<'r>,
    ) -> Result<Self, AmbiguousRequest> {
        let dialect = DialectHeaders::of(headers, context.dialect)?;
        let named = if dialect.has_real_ip {
            let real = client_ip::single(headers, &X_REAL_IP);
            real.map(|real| context.trust.client_ip(real, headers))
        } else {
            context.trust.client_ip_from_proxy(headers)
        };
        let ip = named.unwrap_or_else(|| context.peer.to_canonical());
        Ok(Self {
            headers,
            method: dialect.method(headers)?,
            target: dialect.target(headers)?.map(RequestTarget::parse),
            host: dialect.host(headers)?.map(|host| bare_host(&host)),
            scheme: None,
            entries: &[],
            counted_ip: context.trust.counted(ip),
            has_client_ip: named.is_some(),
            ip,
            derived: context.derived,
            geoip: context.geoip,
        })
    }

    /// Returns true if the proxy sent the path. If the path is missing, rules with a path never
    /// match.
    #[must_use]
    pub fn has_path(&self) -> bool {
        self.target.is_some()
    }

    /// Returns true if the proxy sent the client address. If the client address is missing, the
    /// entry `ip` is the proxy's address, and all clients share one count.
    #[must_use]
    pub fn has_client_ip(&self) -> bool {
        self.has_client_ip
    }

    /// Returns the value of the entry `name`, as listed in the table of the module documentation.
    /// An empty value is treated as absent.
    ///
    /// # Errors
    ///
    /// Returns [`AmbiguousRequest`] if the value is ambiguous.
    pub fn entry(&self, name: &str) -> EntryValue<'_> {
        let mut set = self.entries.iter();
        if let Some((_, value)) = set.find(|(known, _)| *known == name) {
            return Ok((!value.is_empty()).then_some(Cow::Borrowed(*value)));
        }
        derived_or_given(self.derived, name, |name| self.given_entry(name))
    }

    fn given_entry(&self, name: &str) -> EntryValue<'_> {
        Ok(match name {
            "method" => self.method.as_deref().map(Cow::Borrowed),
            "path" => self.target.as_ref().map(RequestTarget::path).transpose()?,
            "host" => self.host.as_deref().map(Cow::Borrowed),
            "scheme" => match self.scheme {
                Some(scheme) => Some(Cow::Borrowed(scheme)),
                None => header_entry(name, self.headers, "x-forwarded-proto")?,
            },
            "ip" => Some(address::text(self.counted_ip).into()),
            "ip.exact" => Some(address::text(self.ip).into()),
            _ => self.named_entry(name)?,
        })
    }

    fn named_entry(&self, name: &str) -> EntryValue<'_> {
        if let (Some(field), Some(geoip)) = (GeoIpField::named(name), self.geoip) {
            return Ok(field.of(self.ip, geoip).map(Cow::Owned));
        }
        if let Some(known) = name.strip_prefix("header.") {
            return self.header(name, known);
        }
        let of_proxy = || self.header(name, &format!("x-{}", name.replace('_', "-")));
        prefixed_entry(name, self.headers, self.target.as_ref()).unwrap_or_else(of_proxy)
    }

    /// Returns the value of the header `known`, which is the source of the entry `name`. Fails if
    /// the service might receive a different value. There are two reasons: a proxy may remove
    /// headers that `Connection` names, and the service may treat `_` in a header name as `-`.
    fn header(&self, name: &str, known: &str) -> EntryValue<'_> {
        if is_named_by_connection(self.headers, known) {
            return Err(AmbiguousRequest::HopByHop(name.into()));
        }
        if has_alias(self.headers, known) {
            return Err(AmbiguousRequest::Alias(name.into()));
        }
        header_entry(name, self.headers, known)
    }
}

/// Returns true if `Connection` names the header `known`. If so, a proxy may have removed the
/// header, or may still remove it.
fn is_named_by_connection(headers: &HeaderMap, known: &str) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(known.as_bytes()))
}

/// Returns true if there is a header whose name is `known` with `_` instead of `-`. CGI, WSGI and
/// PHP treat the two names as equal.
fn has_alias(headers: &HeaderMap, known: &str) -> bool {
    let same = |(written, known): (u8, u8)| written == known || (written, known) == (b'_', b'-');
    headers.keys().any(|name| {
        let name = name.as_str();
        name.len() == known.len()
            && name.contains('_')
            && !name.eq_ignore_ascii_case(known)
            && name
                .bytes()
                .zip(known.bytes().map(|byte| byte.to_ascii_lowercase()))
                .all(same)
    })
}
