//! The headers that describe the client to an upstream: `X-Forwarded-*`, `Forwarded` and `Via`.
//!
//! If the client is untrusted, the proxy removes the values that the client sent. If the client is
//! a trusted proxy, this proxy appends to the lists that the client sent. Therefore the last
//! element of a list always comes from this proxy, and all other elements come from trusted
//! proxies. The proxy also removes forwarding headers spelt with `_` instead of `-`.

use std::{borrow::Cow, net::IpAddr};

use http::{
    HeaderMap, HeaderName, HeaderValue, Version,
    header::{FORWARDED, HOST, VIA},
};
use tidegate_config::{ForwardedHeaders, Via};

use super::lookup;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The prefix of the header names that only proxies may send.
const PROXY_HEADER_PREFIX: &str = "x-forwarded-";

/// Other header names that only proxies may send.
const PROXY_HEADERS: [&str; 7] = [
    "forwarded",
    "x-real-ip",
    "x-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
    "x-original-url",
    "x-rewrite-url",
];

/// The forwarding headers for the requests of one client connection.
#[derive(Clone, Debug)]
pub(crate) struct ForwardingHeaders {
    headers: ForwardedHeaders,
    is_trusted: bool,
    address: HeaderValue,
    scheme: &'static str,
    /// The client's address as a `node` (RFC 7239, section 6).
    node: Box<str>,
    /// The pseudonym of this proxy in the `Via` header, if configured.
    via: Option<Via>,
}

/// The client of a connection, as the forwarding headers describe it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientSide {
    pub(crate) peer: IpAddr,
    pub(crate) scheme: &'static str,
    /// Whether the peer is a trusted proxy. The forwarding headers of a trusted proxy are kept.
    pub(crate) is_trusted: bool,
}

impl ClientSide {
    pub(crate) const fn new(peer: IpAddr, scheme: &'static str, is_trusted: bool) -> Self {
        Self {
            peer,
            scheme,
            is_trusted,
        }
    }
}

impl ForwardingHeaders {
    /// Creates the forwarding headers for requests of `client`. `headers` selects which headers to
    /// write.
    pub(crate) fn new(headers: ForwardedHeaders, via: Option<Via>, client: ClientSide) -> Self {
        let ClientSide {
            peer,
            scheme,
            is_trusted,
        } = client;
        let peer = peer.to_canonical();
        let node = match peer {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("\"[{address}]\""),
        };
        let address = HeaderValue::try_from(peer.to_string());
        Self {
            headers,
            is_trusted,
            // An address consists of digits, letters, dots and colons, so the conversion never
            // fails.
            address: address.unwrap_or_else(|_| HeaderValue::from_static("unknown")),
            scheme,
            node: node.into(),
            via,
        }
    }

    /// Returns whether the peer is a trusted proxy.
    pub(crate) const fn is_trusted(&self) -> bool {
        self.is_trusted
    }

    /// Removes `X-Forwarded-Proto` and `X-Forwarded-Host` if this proxy does not write
    /// `X-Forwarded-*` headers and no trusted proxy has sent `X-Forwarded-For`.
    pub(crate) fn remove_unpaired(&self, headers: &mut HeaderMap) {
        if !self.writes_x_forwarded() && !self.has_trusted(&X_FORWARDED_FOR, headers) {
            for name in [X_FORWARDED_PROTO, X_FORWARDED_HOST] {
                lookup::remove(headers, &name);
            }
        }
    }

    const fn writes_x_forwarded(&self) -> bool {
        matches!(
            self.headers,
            ForwardedHeaders::XForwarded | ForwardedHeaders::Both
        )
    }

    const fn writes_forwarded(&self) -> bool {
        matches!(
            self.headers,
            ForwardedHeaders::Forwarded | ForwardedHeaders::Both
        )
    }

    /// Adds the forwarding headers to the `headers` of a request. The request was received over
    /// HTTP `version` and has exactly one `Host`.
    pub(crate) fn write(&self, version: Version, headers: &mut HeaderMap) {
        let mut added = Vec::new();
        self.emit(version, headers, |name, value| {
            added.push((name.clone(), value.clone()));
        });
        headers.extend(added);
    }

    /// Calls `line` with each forwarding header of a request. The request was received over HTTP
    /// `version` and has exactly one `Host`.
    ///
    /// Also removes the headers from `headers` that the forwarding headers replace. The caller
    /// sends the remaining `headers`. If the client is untrusted, the caller must have removed its
    /// forwarding headers before this call.
    pub(crate) fn emit(
        &self,
        version: Version,
        headers: &mut HeaderMap,
        mut line: impl FnMut(&HeaderName, &HeaderValue),
    ) {
        self.emit_x_forwarded(headers, &mut line);
        if self.writes_forwarded() || self.has_trusted(&FORWARDED, headers) {
            let element = self.element(lookup::first(headers, &HOST));
            line(
                &FORWARDED,
                &self.append_to_list(&FORWARDED, &element, headers),
            );
        }
        if let Some(via) = &self.via {
            let element = via.element(version);
            if lookup::has(headers, &VIA) {
                line(&VIA, &append_to_list(&VIA, element, headers));
            } else {
                line(&VIA, element);
            }
        }
    }

    fn emit_x_forwarded(
        &self,
        headers: &mut HeaderMap,
        line: &mut impl FnMut(&HeaderName, &HeaderValue),
    ) {
        if !(self.writes_x_forwarded() || self.has_trusted(&X_FORWARDED_FOR, headers)) {
            return;
        }
        let list = self.append_to_list(&X_FORWARDED_FOR, &self.address, headers);
        line(&X_FORWARDED_FOR, &list);
        // Keep the values of a trusted proxy: it is closer to the client and knows the original
        // scheme and host.
        if !self.has_trusted(&X_FORWARDED_PROTO, headers) {
            line(&X_FORWARDED_PROTO, &HeaderValue::from_static(self.scheme));
        }
        if !self.has_trusted(&X_FORWARDED_HOST, headers)
            && let Some(host) = lookup::first(headers, &HOST)
        {
            line(&X_FORWARDED_HOST, host);
        }
    }

    /// Returns whether the header is present and comes from a trusted proxy.
    fn has_trusted(&self, name: &HeaderName, headers: &HeaderMap) -> bool {
        self.is_trusted && headers.contains_key(name)
    }

    /// Appends `element` to the list that a trusted proxy has sent, and removes the list from
    /// `headers`. Without a list, returns `element` alone.
    fn append_to_list<'e>(
        &self,
        name: &HeaderName,
        element: &'e HeaderValue,
        headers: &mut HeaderMap,
    ) -> Cow<'e, HeaderValue> {
        if !self.has_trusted(name, headers) {
            return Cow::Borrowed(element);
        }
        append_to_list(name, element, headers)
    }

    fn element(&self, host: Option<&HeaderValue>) -> HeaderValue {
        let mut element = format!("for={};proto={}", self.node, self.scheme);
        if let Some(host) = host.and_then(|host| host.to_str().ok()) {
            element.push_str(";host=\"");
            for c in host.chars() {
                if matches!(c, '"' | '\\') {
                    element.push('\\');
                }
                element.push(c);
            }
            element.push('"');
        }
        // The conversion cannot fail: the host was a header value, and the rest is ASCII.
        HeaderValue::try_from(element).unwrap_or_else(|_| self.address.clone())
    }
}

/// Returns the list in the header `name` with `element` appended, and removes the header.
fn append_to_list<'e>(
    name: &HeaderName,
    element: &'e HeaderValue,
    headers: &mut HeaderMap,
) -> Cow<'e, HeaderValue> {
    let values = headers.get_all(name).iter().chain([element]);
    let list: Vec<&[u8]> = values.map(HeaderValue::as_bytes).collect();
    // Valid header values joined with `, ` form a valid header value.
    let joined = HeaderValue::from_bytes(&list.join(&b", "[..]));
    headers.remove(name);
    joined.map_or(Cow::Borrowed(element), Cow::Owned)
}

/// Returns whether only proxies may send the header `name`. Treats `_` as `-`, because many
/// applications do not distinguish the two.
pub(crate) fn is_proxy_header(name: &str) -> bool {
    // Fast path: the first letter rules out most names.
    if !name.starts_with(['x', 'f', 't', 'c']) {
        return false;
    }
    let is = |written: &str| {
        written.len() <= name.len()
            && written
                .bytes()
                .zip(name.bytes())
                .all(|(a, b)| a == b || a == b'-' && b == b'_')
    };
    let is_whole = |written: &&str| written.len() == name.len() && is(written);
    is(PROXY_HEADER_PREFIX) || PROXY_HEADERS.iter().any(is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(
        forwarding: &ForwardingHeaders,
        lines: &[(&'static str, &str)],
    ) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("h.example:8000"));
        let is_trusted = forwarding.is_trusted();
        for (name, value) in lines {
            if !name.contains('_') && (is_trusted || !is_proxy_header(name)) {
                headers.append(*name, value.parse().unwrap());
            }
        }
        let pair = |name: &HeaderName, value: &HeaderValue| {
            (name.to_string(), value.to_str().unwrap().to_owned())
        };
        forwarding.remove_unpaired(&mut headers);
        let mut left = headers.clone();
        let mut added = Vec::new();
        let version = Version::HTTP_11;
        forwarding.emit(version, &mut left, |name, value| {
            added.push(pair(name, value))
        });
        added.extend(left.iter().map(|(name, value)| pair(name, value)));
        added.sort();
        forwarding.write(version, &mut headers);
        let mut written: Vec<_> = headers
            .iter()
            .map(|(name, value)| pair(name, value))
            .collect();
        written.sort();
        assert_eq!(added, written);
        written.retain(|(name, _)| name != "host");
        written
    }

    fn forwarding(
        headers: ForwardedHeaders,
        peer: &str,
        scheme: &'static str,
        is_trusted: bool,
    ) -> ForwardingHeaders {
        let client = ClientSide {
            peer: peer.parse().unwrap(),
            scheme,
            is_trusted,
        };
        ForwardingHeaders::new(headers, None, client)
    }

    fn own(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(own).collect()
    }

    const CLAIMS: [(&str, &str); 8] = [
        ("x_forwarded_for", "6.6.6.6"),
        ("x-forwarded-for", "6.6.6.6"),
        ("x-forwarded-for", "7.7.7.7, 8.8.8.8"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "evil.example"),
        ("x-forwarded-port", "444"),
        ("x-real-ip", "6.6.6.6"),
        ("forwarded", "for=6.6.6.6"),
    ];

    #[test]
    fn headers_of_an_untrusted_client_are_replaced() {
        let peer = "203.0.113.9";
        let strangers = forwarding(ForwardedHeaders::XForwarded, peer, "http", false);
        let expected = own(&[
            ("x-forwarded-for", "203.0.113.9"),
            ("x-forwarded-host", "h.example:8000"),
            ("x-forwarded-proto", "http"),
        ]);
        assert_eq!(written(&strangers, &CLAIMS), expected);
        let forwarding = forwarding(ForwardedHeaders::Forwarded, peer, "http", false);
        let expected = own(&[(
            "forwarded",
            "for=203.0.113.9;proto=http;host=\"h.example:8000\"",
        )]);
        assert_eq!(written(&forwarding, &CLAIMS), expected);
    }

    #[test]
    fn proxy_headers_are_removed_in_every_spelling() {
        let removed = [
            ("x-forwarded-client-cert", "Subject=admin"),
            ("x-forwarded-user", "admin"),
            ("x_forwarded_for", "6.6.6.6"),
            ("x-forwarded_proto", "https"),
            ("true-client-ip", "6.6.6.6"),
            ("cf_connecting_ip", "6.6.6.6"),
        ];
        let kept = [
            ("x-forward", "1"),
            ("true-client-ip-seen", "1"),
            ("accept", "1"),
        ];
        for (name, _) in removed {
            assert!(is_proxy_header(name), "{name}");
        }
        for (name, _) in kept {
            assert!(!is_proxy_header(name), "{name}");
        }
    }

    #[test]
    fn headers_of_a_trusted_proxy_are_extended() {
        let peer = "2001:db8::7";
        let forwarding = forwarding(ForwardedHeaders::XForwarded, peer, "http", true);
        let expected = own(&[
            (
                "forwarded",
                "for=6.6.6.6, for=\"[2001:db8::7]\";proto=http;host=\"h.example:8000\"",
            ),
            ("x-forwarded-for", "6.6.6.6, 7.7.7.7, 8.8.8.8, 2001:db8::7"),
            ("x-forwarded-host", "evil.example"),
            ("x-forwarded-port", "444"),
            ("x-forwarded-proto", "https"),
            ("x-real-ip", "6.6.6.6"),
        ]);
        assert_eq!(written(&forwarding, &CLAIMS), expected);
    }

    #[test]
    fn the_list_of_proxies_is_extended() {
        let client = ClientSide {
            peer: "203.0.113.9".parse().unwrap(),
            scheme: "http",
            is_trusted: false,
        };
        let forwarding =
            ForwardingHeaders::new(ForwardedHeaders::Forwarded, Via::new("edge"), client);
        for (values, expected) in [
            (&[][..], "1.1 edge"),
            (&[("via", "1.0 a"), ("via", "2 b")], "1.0 a, 2 b, 1.1 edge"),
        ] {
            let written = written(&forwarding, values);
            let via: Vec<_> = written.iter().filter(|(name, _)| name == "via").collect();
            assert_eq!(via, [&("via".to_owned(), expected.to_owned())]);
        }
    }

    #[test]
    fn an_ipv4_mapped_address_is_written_as_ipv4() {
        let peer = "::ffff:203.0.113.9";
        let forwarding = forwarding(ForwardedHeaders::Both, peer, "https", true);
        let expected = own(&[
            (
                "forwarded",
                "for=203.0.113.9;proto=https;host=\"h.example:8000\"",
            ),
            ("x-forwarded-for", "203.0.113.9"),
            ("x-forwarded-host", "h.example:8000"),
            ("x-forwarded-proto", "https"),
        ]);
        assert_eq!(written(&forwarding, &[]), expected);
    }
}
