//! Forward auth: parses how a proxy describes the original request.
//!
//! Proxies put the original request into headers, and there are two families. nginx `auth_request`
//! is configured to send `X-Original-Method`, `X-Original-URI` (ingress-nginx: `X-Original-URL`)
//! and `X-Real-IP`. Caddy `forward_auth` and Traefik `ForwardAuth` send `X-Forwarded-Method`,
//! `-Uri`, `-Host`, `-Proto` and `-For`. A proxy forwards the headers of the other family as the
//! client wrote them, so the two are never mixed. A request with headers of both families is
//! rejected, unless the configuration says which family the proxy uses.
//!
//! | entry | source |
//! | --- | --- |
//! | `method` | the original method |
//! | `path` | the original path without query, in RFC 3986 normal form, repeated slashes merged |
//! | `host` | the original host in lower case, without the port; nginx: `Host` |
//! | `scheme` | `X-Forwarded-Proto` |
//! | `ip` | the client address; for IPv6 its network (/64), so that a subscriber has one count |
//! | `ip.exact` | the complete client address |
//! | `country`, `asn` | the country and the autonomous system of that address, with an [`Atlas`] |
//! | `query.NAME` | the query parameter NAME, decoded |
//! | `cookie.NAME` | the cookie NAME, decoded |
//! | `header.NAME` | the header NAME |
//! | any other NAME | the header `X-NAME`, with `-` for `_`: `api_key` is `X-Api-Key` |
//!
//! The client controls the last four unless the proxy sets them. An empty value counts as absent: a
//! rule with this entry in its key does not apply. A value that is ambiguous is rejected as
//! [`Unclear`], because the service might use another value than the one that is counted. These are
//! ambiguous:
//!
//! - an entry with several different values,
//! - a path with `.` or `..` segments,
//! - a header named by `Connection`, which the proxy may remove before the service sees it,
//! - a header that is also sent with `_` in place of `-` in its name.

use std::{borrow::Cow, net::IpAddr};

use http::{HeaderMap, HeaderName, HeaderValue, header::CONNECTION};

use crate::{
    Unclear, address,
    atlas::{Atlas, Place},
    client::{self, Trust},
    cookies::cookie,
    part::Part,
    proxy::{Family, Proxy},
    target::Target,
    unclear::only,
};

/// `X-Real-IP`.
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// The sender of a forward-auth request, and how far it is trusted.
#[derive(Clone, Copy, Debug)]
pub struct Source<'t> {
    /// The socket's peer, which is the proxy.
    pub peer: IpAddr,
    /// The family of headers that the proxy sends.
    pub proxy: Proxy,
    /// The trusted proxies in front of it. With nginx, `X-Real-IP` is the address of nginx's own
    /// peer.
    pub trust: &'t Trust,
    /// Entries derived from parts of others, by name. They take precedence over those of the table.
    pub parts: &'t [(Box<str>, Part)],
    /// The GeoIP source. If it is set, no header is used for an address that it does not know.
    pub atlas: Option<&'t dyn Atlas>,
}

/// The original request, as described by a proxy.
#[derive(Clone, Debug)]
pub struct Forwarded<'r> {
    headers: &'r HeaderMap,
    method: Option<Cow<'r, str>>,
    target: Option<Target<'r>>,
    host: Option<String>,
    ip: IpAddr,
    counted_ip: IpAddr,
    names_a_client: bool,
    parts: &'r [(Box<str>, Part)],
    atlas: Option<&'r dyn Atlas>,
}

impl<'r> Forwarded<'r> {
    /// Parses the headers of a forward-auth request.
    ///
    /// # Errors
    ///
    /// Returns [`Unclear`] if the proxy's family is unknown and headers of both are present, or if
    /// a header that describes the request has several values.
    pub fn read(headers: &'r HeaderMap, source: Source<'r>) -> Result<Self, Unclear> {
        let family = Family::of(headers, source.proxy)?;
        let named = if family.has_real_ip {
            let real = client::single(headers, &X_REAL_IP);
            real.map(|real| source.trust.client(real, headers))
        } else {
            source.trust.named_by_proxy(headers)
        };
        let ip = named.unwrap_or_else(|| source.peer.to_canonical());
        Ok(Self {
            headers,
            method: family.method(headers)?,
            target: family.target(headers)?.map(Target::read),
            host: family.host(headers)?.map(|host| bare_host(&host)),
            counted_ip: source.trust.counted(ip),
            names_a_client: named.is_some(),
            ip,
            parts: source.parts,
            atlas: source.atlas,
        })
    }

    /// Returns true if the proxy sent the path. Without it, rules with a path never match.
    #[must_use]
    pub fn names_a_path(&self) -> bool {
        self.target.is_some()
    }

    /// Returns true if the proxy sent the client address. Without it, `ip` is the proxy's address,
    /// and all clients share one count.
    #[must_use]
    pub fn names_a_client(&self) -> bool {
        self.names_a_client
    }

    /// Returns the value of the entry `name`, never empty; see the table in the module
    /// documentation.
    ///
    /// # Errors
    ///
    /// Returns [`Unclear`] if the value is ambiguous.
    pub fn entry(&self, name: &str) -> Value<'_> {
        whole_or_part(self.parts, name, |name| self.given_entry(name))
    }

    fn given_entry(&self, name: &str) -> Value<'_> {
        Ok(match name {
            "method" => self.method.as_deref().map(Cow::Borrowed),
            "path" => self.target.as_ref().map(Target::path).transpose()?,
            "host" => self.host.as_deref().map(Cow::Borrowed),
            "scheme" => header(name, self.headers, "x-forwarded-proto")?,
            "ip" => Some(address::text(self.counted_ip).into()),
            "ip.exact" => Some(address::text(self.ip).into()),
            _ => self.named_entry(name)?,
        })
    }

    fn named_entry(&self, name: &str) -> Value<'_> {
        if let (Some(place), Some(atlas)) = (Place::named(name), self.atlas) {
            return Ok(place.of(self.ip, atlas).map(Cow::Owned));
        }
        if let Some(known) = name.strip_prefix("header.") {
            return self.header(name, known);
        }
        let of_proxy = || self.header(name, &format!("x-{}", name.replace('_', "-")));
        named(name, self.headers, self.target.as_ref()).unwrap_or_else(of_proxy)
    }

    /// Returns the value of the header `known` for the entry `name`, if the service certainly
    /// receives the same. The proxy may remove headers that `Connection` names, and the service may
    /// treat `_` in a name as `-`.
    fn header(&self, name: &str, known: &str) -> Value<'_> {
        if is_named_by_connection(self.headers, known) {
            return Err(Unclear::HopByHop(name.into()));
        }
        if has_alias(self.headers, known) {
            return Err(Unclear::Alias(name.into()));
        }
        header(name, self.headers, known)
    }
}

/// The value of an entry, if it is present.
pub(crate) type Value<'r> = Result<Option<Cow<'r, str>>, Unclear>;

/// Returns the value of the entry `name`, never empty: a part of another entry, or else the value
/// that `given` returns.
pub(crate) fn whole_or_part<'r>(
    parts: &[(Box<str>, Part)],
    name: &str,
    given: impl Fn(&str) -> Value<'r>,
) -> Value<'r> {
    let part = parts.iter().find(|(known, _)| **known == *name);
    let value = match part {
        None => given(name)?,
        Some((_, part)) => given(part.source())?.and_then(|whole| match whole {
            Cow::Borrowed(whole) => part.of(whole).map(Cow::Borrowed),
            Cow::Owned(whole) => part.of(&whole).map(|part| Cow::Owned(part.to_owned())),
        }),
    };
    Ok(value.filter(|value| !value.is_empty()))
}

/// Returns an entry that the client controls: the header, cookie or query parameter that `name`
/// selects by its prefix. Returns `None` if `name` has no such prefix.
pub(crate) fn named<'r>(
    name: &str,
    headers: &'r HeaderMap,
    target: Option<&Target<'_>>,
) -> Option<Value<'r>> {
    Some(if let Some(known) = name.strip_prefix("header.") {
        header(name, headers, known)
    } else if let Some(known) = name.strip_prefix("cookie.") {
        cookie(name, headers, known)
    } else {
        let known = name.strip_prefix("query.")?;
        target.map_or(Ok(None), |target| only(name, target.parameters(known)))
    })
}

/// Returns the value of the header `known` for the entry `name`. `Cookie` lines are joined, because
/// HTTP/2 may send each cookie in its own line.
pub(crate) fn header<'r>(name: &str, headers: &'r HeaderMap, known: &str) -> Value<'r> {
    if known.eq_ignore_ascii_case("cookie") {
        return Ok(joined(headers, known, "; "));
    }
    only(name, headers.get_all(known).iter().map(text))
}

/// Returns true if `Connection` names the header `known`, so that a proxy may have removed it or
/// may still remove it.
fn is_named_by_connection(headers: &HeaderMap, known: &str) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(known.as_bytes()))
}

/// Returns true if there is a header named like `known` but with `_` for `-`. CGI, WSGI and PHP
/// treat the two names as equal.
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

/// Returns a header's value without surrounding white space, which is not part of it (RFC 9110,
/// section 5.5). The value may contain any other byte. Invalid UTF-8 becomes U+FFFD, so that it can
/// be counted as well.
pub(crate) fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes().trim_ascii())
}

/// Joins all lines of a header with `separator`.
pub(crate) fn joined<'r>(
    headers: &'r HeaderMap,
    name: &str,
    separator: &str,
) -> Option<Cow<'r, str>> {
    let mut lines = headers.get_all(name).iter();
    let first = text(lines.next()?);
    Some(lines.fold(first, |joined, line| {
        Cow::Owned(format!("{joined}{separator}{}", text(line)))
    }))
}

/// Returns a host in lower case, without its port and without a trailing dot: `example.com.`
/// becomes `example.com`.
#[must_use]
pub fn bare_host(host: &str) -> String {
    let end = if host.starts_with('[') {
        host.find(']').map(|at| at + 1)
    } else {
        host.find(':')
    };
    let bare = &host[..end.unwrap_or(host.len())];
    bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase()
}
