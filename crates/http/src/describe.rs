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
//! | `path` | the original path, without the query, in RFC 3986 normal form |
//! | `host` | the original host in small letters, without the port; nginx: `Host` |
//! | `scheme` | `X-Forwarded-Proto` |
//! | `ip` | the client's address; of an IPv6 address its network (/64), so that one subscriber has one count |
//! | `ip.exact` | the client's address, whole |
//! | `country`, `asn` | where that address is, and in whose network, where there is an [`Atlas`] |
//! | `query.NAME` | the first parameter NAME of the query, decoded |
//! | `cookie.NAME` | the first cookie NAME |
//! | `header.NAME` | the header NAME; several lines are joined by `, ` |
//! | any other NAME | the header `X-NAME`, `_` being `-`: `customer` is `X-Customer`, `api_key` is `X-Api-Key` |
//!
//! The last four are the client's own words unless the proxy sets them. What is empty counts as absent: a rule
//! whose key it is does not apply.

use std::{borrow::Cow, net::IpAddr};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{
    atlas::{Atlas, Place},
    client::{self, Trust},
    cookies::cookie,
    part::Part,
    proxy::{Ambiguous, Family, Proxy},
    target::Target,
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
    proxy_ip: IpAddr,
    parts: &'r [(Box<str>, Part)],
    atlas: Option<&'r dyn Atlas>,
}

impl<'r> Forwarded<'r> {
    /// Reads the headers of a forward-auth request.
    ///
    /// # Errors
    ///
    /// [`Ambiguous`] if the proxy's family is unknown and headers of both are there.
    pub fn read(headers: &'r HeaderMap, source: Source<'r>) -> Result<Self, Ambiguous> {
        let family = Family::of(headers, source.proxy)?;
        let ip = if family.has_real_ip {
            match client::single(headers, &X_REAL_IP) {
                Some(real) => source.trust.client(real, headers),
                None => source.peer.to_canonical(),
            }
        } else {
            source.trust.client_of(source.peer, headers)
        };
        Ok(Self {
            headers,
            method: family.method(headers).map(text),
            target: family.target(headers).map(|uri| Target::read(text(uri))),
            host: family.host(headers).map(|host| bare_host(&text(host))),
            counted_ip: source.trust.counted(ip),
            proxy_ip: source.peer.to_canonical(),
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
        self.ip != self.proxy_ip
    }

    /// The value of the entry `name`, which is not empty; see the table in the module's documentation.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<Cow<'_, str>> {
        whole_or_part(self.parts, name, |name| self.given_entry(name))
    }

    fn given_entry(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "method" => self.method.as_deref().map(Cow::Borrowed),
            "path" => self
                .target
                .as_ref()
                .map(|target| Cow::Borrowed(&*target.path)),
            "host" => self.host.as_deref().map(Cow::Borrowed),
            "scheme" => self.headers.get("x-forwarded-proto").map(text),
            "ip" => Some(self.counted_ip.to_string().into()),
            "ip.exact" => Some(self.ip.to_string().into()),
            _ => self.named_entry(name),
        }
    }

    fn named_entry(&self, name: &str) -> Option<Cow<'_, str>> {
        if let (Some(place), Some(atlas)) = (Place::named(name), self.atlas) {
            return place.of(self.ip, atlas).map(Cow::Owned);
        }
        match named(name, self.headers, self.target.as_ref()) {
            Named::Found(value) => Some(value),
            Named::Missing => None,
            Named::Other => joined(self.headers, &format!("x-{}", name.replace('_', "-"))),
        }
    }
}

/// The value of the entry `name`, which is not empty: a part of another, or what is `given`.
pub(crate) fn whole_or_part<'r>(
    parts: &[(Box<str>, Part)],
    name: &str,
    given: impl Fn(&str) -> Option<Cow<'r, str>>,
) -> Option<Cow<'r, str>> {
    let part = parts.iter().find(|(known, _)| **known == *name);
    let value = match part {
        None => given(name)?,
        Some((_, part)) => match given(part.source())? {
            Cow::Borrowed(whole) => Cow::Borrowed(part.of(whole)?),
            Cow::Owned(whole) => Cow::Owned(part.of(&whole)?.to_owned()),
        },
    };
    (!value.is_empty()).then_some(value)
}

/// What the client's own words are for an entry.
pub(crate) enum Named<'r> {
    Found(Cow<'r, str>),
    Missing,
    /// The name is not of the kind that clients have words for.
    Other,
}

/// The header, cookie or parameter of the query that `name` names, by its prefix.
pub(crate) fn named<'r>(
    name: &str,
    headers: &'r HeaderMap,
    target: Option<&Target<'_>>,
) -> Named<'r> {
    let value = if let Some(header) = name.strip_prefix("header.") {
        joined(headers, header)
    } else if let Some(name) = name.strip_prefix("cookie.") {
        cookie(headers, name).map(Cow::Owned)
    } else if let Some(parameter) = name.strip_prefix("query.") {
        target.and_then(|target| target.parameter(parameter).map(Cow::Owned))
    } else {
        return Named::Other;
    };
    value.map_or(Named::Missing, Named::Found)
}

/// Header values may hold any octet; what is no UTF-8 becomes U+FFFD, so that it has a count as well.
pub(crate) fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

fn joined<'r>(headers: &'r HeaderMap, name: &str) -> Option<Cow<'r, str>> {
    let mut lines = headers.get_all(name).iter();
    let first = text(lines.next()?);
    Some(lines.fold(first, |joined, line| {
        Cow::Owned(format!("{joined}, {}", text(line)))
    }))
}

/// A host in small letters, without its port.
#[must_use]
pub fn bare_host(host: &str) -> String {
    let end = if host.starts_with('[') {
        host.find(']').map(|at| at + 1)
    } else {
        host.find(':')
    };
    host[..end.unwrap_or(host.len())].to_ascii_lowercase()
}
