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
    client::{self, Trust},
    cookies::cookie,
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
    /// Who is believed behind it. nginx names the client itself, in `X-Real-IP`.
    pub trust: &'t Trust,
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
}

impl<'r> Forwarded<'r> {
    /// Reads the headers of a forward-auth request.
    ///
    /// # Errors
    ///
    /// [`Ambiguous`] if the proxy's family is unknown and headers of both are there.
    pub fn read(headers: &'r HeaderMap, source: Source<'_>) -> Result<Self, Ambiguous> {
        let family = Family::of(headers, source.proxy)?;
        let ip = if family.has_real_ip {
            client::single(headers, &X_REAL_IP).unwrap_or_else(|| source.peer.to_canonical())
        } else {
            source.trust.client_of(source.peer, headers)
        };
        Ok(Self {
            headers,
            method: family.method(headers).map(text),
            target: family.target(headers).map(|uri| Target::read(text(uri))),
            host: family.host(headers).map(|host| bare_host(&text(host))),
            counted_ip: source.trust.counted(ip),
            ip,
        })
    }

    /// Whether the proxy said which path is asked for. If not, no rule with a path will match.
    #[must_use]
    pub fn names_a_path(&self) -> bool {
        self.target.is_some()
    }

    /// The value of the entry `name`, which is not empty; see the table in the module's documentation.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<Cow<'_, str>> {
        self.given_entry(name).filter(|value| !value.is_empty())
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
        if let Some(header) = name.strip_prefix("header.") {
            return joined(self.headers, header);
        }
        if let Some(name) = name.strip_prefix("cookie.") {
            return cookie(self.headers, name).map(Cow::Owned);
        }
        if let Some(parameter) = name.strip_prefix("query.") {
            return self.target.as_ref()?.parameter(parameter).map(Cow::Owned);
        }
        joined(self.headers, &format!("x-{}", name.replace('_', "-")))
    }
}

/// Header values may hold any octet; what is no UTF-8 becomes U+FFFD, so that it has a count as well.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

fn joined<'r>(headers: &'r HeaderMap, name: &str) -> Option<Cow<'r, str>> {
    let mut lines = headers.get_all(name).iter();
    let first = text(lines.next()?);
    Some(lines.fold(first, |joined, line| {
        Cow::Owned(format!("{joined}, {}", text(line)))
    }))
}

fn bare_host(host: &str) -> String {
    let end = if host.starts_with('[') {
        host.find(']').map(|at| at + 1)
    } else {
        host.find(':')
    };
    host[..end.unwrap_or(host.len())].to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{AddressHeader, Proxies};

    static TRUST: Trust = Trust::new(Proxies::Hops(0), AddressHeader::XForwardedFor);

    const PEER: Source<'_> = Source {
        peer: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        proxy: Proxy::Unknown,
        trust: &TRUST,
    };

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
        lines
            .iter()
            .map(|(name, text)| (HeaderName::from_static(name), value(text)))
            .collect()
    }

    fn entries(
        lines: &[(&'static str, &str)],
        source: Source<'_>,
        names: &[&str],
    ) -> Vec<Option<String>> {
        let headers = headers(lines);
        let forwarded = Forwarded::read(&headers, source).unwrap();
        names
            .iter()
            .map(|name| forwarded.entry(name).map(Cow::into_owned))
            .collect()
    }

    fn some(texts: &[&str]) -> Vec<Option<String>> {
        texts.iter().map(|text| Some((*text).to_owned())).collect()
    }

    #[test]
    fn nginx_is_understood() {
        let lines = [
            ("x-original-method", "POST"),
            ("x-original-uri", "/login?next=%2Fhome&x=1"),
            ("x-real-ip", "203.0.113.9"),
            ("x-forwarded-for", "6.6.6.6"),
            ("host", "Example.org:8443"),
            ("x-customer", "acme"),
            ("cookie", "theme=dark; session=s1"),
        ];
        let names = [
            "cookie.session",
            "method",
            "path",
            "query.next",
            "ip",
            "host",
            "customer",
            "header.X-Customer",
        ];
        let expected = some(&[
            "s1",
            "POST",
            "/login",
            "/home",
            "203.0.113.9",
            "example.org",
            "acme",
            "acme",
        ]);
        assert_eq!(entries(&lines, PEER, &names), expected);
    }

    #[test]
    fn caddy_and_traefik_are_understood() {
        let lines = [
            ("x-forwarded-method", "GET"),
            ("x-forwarded-uri", "/a/../b"),
            ("x-forwarded-host", "[2001:DB8::1]:443"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-for", "6.6.6.6, 2001:db8:1:2:3::4"),
        ];
        let names = ["method", "path", "host", "scheme", "ip", "ip.exact"];
        let expected = some(&[
            "GET",
            "/b",
            "[2001:db8::1]",
            "https",
            "2001:db8:1:2::",
            "2001:db8:1:2:3::4",
        ]);
        assert_eq!(entries(&lines, PEER, &names), expected);
        assert_eq!(
            entries(&lines, PEER, &["query.x", "customer"]),
            [None, None]
        );
    }

    #[test]
    fn a_client_behind_caddy_cannot_choose_its_address() {
        let lines = [
            ("x-forwarded-uri", "/"),
            ("x-forwarded-for", "203.0.113.9"),
            ("x-real-ip", "6.6.6.6"),
        ];
        assert_eq!(entries(&lines, PEER, &["ip"]), some(&["203.0.113.9"]));
    }

    #[test]
    fn a_client_cannot_choose_its_path() {
        let lines = [
            ("x-original-uri", "/login"),
            ("x-forwarded-uri", "/harmless"),
        ];
        let found = headers(&lines);
        let refused = Forwarded::read(&found, PEER).unwrap_err();
        assert_eq!(
            (refused.original, refused.forwarded),
            ("x-original-uri", "x-forwarded-uri")
        );
        let told = |proxy| entries(&lines, Source { proxy, ..PEER }, &["path"]);
        assert_eq!(told(Proxy::Nginx), some(&["/login"]));
        assert_eq!(told(Proxy::Forwarding), some(&["/harmless"]));
    }

    #[test]
    fn a_client_cannot_say_what_its_proxy_does_not() {
        for (proxys, clients) in [
            (("x-original-uri", "/login"), ("x-forwarded-method", "GET")),
            (("x-original-uri", "/login"), ("x-forwarded-uri", "/login")),
            (("x-forwarded-uri", "/login"), ("x-original-method", "GET")),
        ] {
            let found = headers(&[proxys, clients, ("x-real-ip", "6.6.6.6")]);
            assert!(Forwarded::read(&found, PEER).is_err(), "{clients:?}");
        }
        let lines = [
            ("x-original-uri", "/login"),
            ("host", "example.org"),
            ("x-forwarded-host", "chosen.example"),
            ("x-forwarded-for", "6.6.6.6"),
        ];
        let expected = some(&["example.org", "127.0.0.1"]);
        assert_eq!(entries(&lines, PEER, &["host", "ip"]), expected);
    }

    #[test]
    fn without_a_word_of_the_proxy_the_peer_is_the_client() {
        assert_eq!(
            entries(&[], PEER, &["ip", "path"]),
            [Some("127.0.0.1".to_owned()), None]
        );
    }

    #[test]
    fn what_is_repeated_or_no_text_still_counts() {
        let lines = [
            ("x-customer", "a"),
            ("x-customer", "b"),
            ("x-original-url", "https://h.example/p?q=1"),
        ];
        assert_eq!(
            entries(&lines, PEER, &["customer", "path", "query.q"]),
            some(&["a, b", "/p", "1"])
        );
        let mut found = HeaderMap::new();
        found.insert("x-customer", HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(
            Forwarded::read(&found, PEER)
                .unwrap()
                .entry("customer")
                .unwrap(),
            "\u{fffd}"
        );
    }

    #[test]
    fn what_is_empty_is_absent() {
        let lines = [
            ("x-customer", ""),
            ("x-original-method", ""),
            ("x-original-uri", "/?user=&x=1"),
            ("cookie", "id="),
        ];
        let names = [
            "customer",
            "header.x-customer",
            "method",
            "query.user",
            "cookie.id",
        ];
        assert_eq!(entries(&lines, PEER, &names), [const { None }; 5]);
    }

    proptest::proptest! {
        #[test]
        fn no_header_makes_it_panic(uri in "\\PC{0,40}", query in "[%+&=a-f0-9]{0,20}", host in "\\PC{0,20}") {
            let uri = format!("{uri}?{query}");
            let headers = headers(&[("x-original-uri", &uri), ("host", &host), ("x-forwarded-for", &host)]);
            let forwarded = Forwarded::read(&headers, PEER).unwrap();
            for name in ["path", "query.a", "host", "ip", "header.", "", "\u{e9} "] {
                let _ = forwarded.entry(name);
            }
        }
    }
}
