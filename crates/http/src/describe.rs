//! What a proxy says about the request for which it asks leave.
//!
//! Proxies put the original request into headers, and each family has its own: nginx `auth_request` is
//! configured to send `X-Original-Method`, `X-Original-URI` (ingress-nginx: `X-Original-URL`) and
//! `X-Real-IP`; Caddy `forward_auth` and Traefik `ForwardAuth` send `X-Forwarded-Method`, `-Uri`, `-Host`,
//! `-Proto` and `-For`. A proxy passes on the headers of the other family as the client wrote them, so
//! the two are never mixed: a request that has both is refused, unless the proxy's configuration says which
//! family it is.
//!
//! | entry | where it comes from |
//! | --- | --- |
//! | `method` | the original method |
//! | `path` | the original path, without the query, in RFC 3986 normal form, runs of slashes as one |
//! | `host` | the original host in small letters, without the port; nginx: `Host` |
//! | `scheme` | `X-Forwarded-Proto` |
//! | `ip` | the client's address; of an IPv6 address its network (/64), so that one subscriber has one count |
//! | `ip.exact` | the client's address, whole |
//! | `country`, `asn` | where that address is, and in whose network, where there is an [`Atlas`] |
//! | `query.NAME` | the parameter NAME of the query, decoded |
//! | `cookie.NAME` | the cookie NAME, decoded |
//! | `header.NAME` | the header NAME |
//! | any other NAME | the header `X-NAME`, `_` being `-`: `customer` is `X-Customer`, `api_key` is `X-Api-Key` |
//!
//! The last four are the client's own words unless the proxy sets them. What is empty counts as absent: a rule
//! whose key it is does not apply. What has several values is [`Unclear`], because the service behind would
//! look at one of them and the client would be counted by another; so is a path with `.` or `..` segments, a header
//! that `Connection` names, which the proxy may remove before the service sees it, and one that another header spells
//! with `_`.

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

/// Who brought a forward-auth request, and how far they are believed.
#[derive(Clone, Copy, Debug)]
pub struct Source<'t> {
    /// The socket's other end: the proxy.
    pub peer: IpAddr,
    /// The family of headers that it sends.
    pub proxy: Proxy,
    /// Who is believed behind it. To nginx the other end was who stands in `X-Real-IP`.
    pub trust: &'t Trust,
    /// Entries that are parts of others, by their names. They come before those of the table.
    pub parts: &'t [(Box<str>, Part)],
    /// Who knows where addresses are. With one, no header stands in for what it does not know.
    pub atlas: Option<&'t dyn Atlas>,
}

/// The request that a proxy asks about.
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
    /// Reads the headers of a forward-auth request.
    ///
    /// # Errors
    ///
    /// [`Unclear`] if the proxy's family is unknown and headers of both are there, or if what it says of the request is
    /// there with several values.
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

    /// Whether the proxy said which path is asked for. If not, no rule with a path will match.
    #[must_use]
    pub fn names_a_path(&self) -> bool {
        self.target.is_some()
    }

    /// Whether the proxy said who the client is. If not, `ip` is the proxy's own, and all clients have one count.
    #[must_use]
    pub fn names_a_client(&self) -> bool {
        self.names_a_client
    }

    /// The value of the entry `name`, which is not empty; see the table in the module's documentation.
    ///
    /// # Errors
    ///
    /// [`Unclear`] if it could be several.
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

    /// The value of the header `known` for the entry `name`, if the service behind the proxy certainly gets the same: the
    /// proxy may remove what `Connection` names, and the service may read `_` in a name as `-`.
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

/// The value of an entry, if it has one.
pub(crate) type Value<'r> = Result<Option<Cow<'r, str>>, Unclear>;

/// The value of the entry `name`, which is not empty: a part of another, or what is `given`.
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

/// The client's own words for an entry: the header, cookie or parameter of the query that `name` names by its prefix.
/// `None` if it has no such prefix.
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

/// The value of the header `known` for the entry `name`. HTTP/2 may send each cookie in a line of its own.
pub(crate) fn header<'r>(name: &str, headers: &'r HeaderMap, known: &str) -> Value<'r> {
    if known.eq_ignore_ascii_case("cookie") {
        return Ok(joined(headers, known, "; "));
    }
    only(name, headers.get_all(known).iter().map(text))
}

/// Whether `Connection` names the header `known`, so that a proxy on the way may have removed it, or may yet.
fn is_named_by_connection(headers: &HeaderMap, known: &str) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(known.as_bytes()))
}

/// Whether a header has the name `known` but for `_` in the place of `-`, which CGI, WSGI and PHP read as the same name.
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

/// A header's value without the white space around it, which is no part of it (RFC 9110, section 5.5). It may hold any
/// other byte; what is not UTF-8 becomes U+FFFD, so that it has a count as well.
pub(crate) fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes().trim_ascii())
}

/// All lines of a header, with `separator` between them.
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

/// A host in small letters, without its port, and without the dot that may end it: `example.com.` is `example.com`.
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
