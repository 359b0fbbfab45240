//! Normalises entries sent by a service. The result has the same form as entries extracted from a
//! proxy's request.
//!
//! Rules expect a single notation of each path and each address. Forward auth and the tower layer
//! derive paths and addresses from the request itself. A service that sends entries may pass on
//! values in its client's notation.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr},
};

use crate::{AmbiguousRequest, Trust, address, target::RequestTarget};

impl Trust {
    /// Returns the value of the entry `name` in the same form as
    /// [`ForwardAuthRequest`](crate::ForwardAuthRequest):
    ///
    /// - `path` is in normal form, without the query.
    /// - `host` is in lower case, without the port.
    /// - `ip` is the address by which the client is counted.
    /// - `ip.exact` is the complete address.
    ///
    /// Other entries and empty values are returned unchanged.
    ///
    /// # Errors
    ///
    /// Returns [`AmbiguousRequest::DotSegments`] for a path with `.` or `..` segments, and
    /// [`AmbiguousRequest::NotAnAddress`] for an `ip` or `ip.exact` that is not a single IP
    /// address.
    pub fn normalize<'v>(
        &self,
        name: &str,
        value: &'v str,
    ) -> Result<Cow<'v, str>, AmbiguousRequest> {
        if value.is_empty() {
            return Ok(Cow::Borrowed(value));
        }
        match name {
            "path" => path(value),
            "host" => Ok(host(value)),
            "ip" => ip(name, value, |ip| self.counted(ip)),
            "ip.exact" => ip(name, value, |ip| ip),
            _ => Ok(Cow::Borrowed(value)),
        }
    }
}

fn ip<'v>(
    name: &str,
    value: &'v str,
    counted: impl Fn(IpAddr) -> IpAddr,
) -> Result<Cow<'v, str>, AmbiguousRequest> {
    // Fast path: the standard library accepts only the canonical notation of an IPv4 address.
    if value.parse::<Ipv4Addr>().is_ok() {
        return Ok(Cow::Borrowed(value));
    }
    let ip = address::read(value).ok_or_else(|| AmbiguousRequest::NotAnAddress(name.into()))?;
    let text = address::text(counted(ip));
    Ok(if text == value {
        Cow::Borrowed(value)
    } else {
        Cow::Owned(text)
    })
}

fn path(value: &str) -> Result<Cow<'_, str>, AmbiguousRequest> {
    let is_plain = !value.contains(['%', '\\', '?', '#'])
        && !value.contains("/.")
        && !value.contains("//")
        && value.starts_with('/');
    if is_plain {
        return Ok(Cow::Borrowed(value));
    }
    let target = RequestTarget::parse(Cow::Borrowed(value));
    let normal = target.path()?;
    Ok(if normal == value {
        Cow::Borrowed(value)
    } else {
        Cow::Owned(normal.into_owned())
    })
}

fn host(value: &str) -> Cow<'_, str> {
    let bare = bare_host(value);
    if bare == value {
        Cow::Borrowed(value)
    } else {
        Cow::Owned(bare)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_normalized_as_in_forward_auth() {
        let trust = Trust::default().with_ipv6_prefix(48).unwrap();
        for (name, given, expected) in [
            ("path", "/login", "/login"),
            ("path", "//login", "/login"),
            ("path", "/%6Cogin?next=%2F", "/login"),
            ("path", "https://shop.example/login#top", "/login"),
            ("path", "login", "/login"),
            ("path", "/.well-known/x", "/.well-known/x"),
            ("path", "", ""),
            ("host", "Shop.Example.:8443", "shop.example"),
            ("host", "shop.example", "shop.example"),
            ("ip", "203.0.113.9", "203.0.113.9"),
            ("ip", "203.0.113.9:4711", "203.0.113.9"),
            ("ip", "::ffff:203.0.113.9", "203.0.113.9"),
            ("ip", "2001:DB8:1:2::5", "2001:db8:1::"),
            ("ip", "", ""),
            ("ip.exact", "[2001:DB8:1:2::5]:443", "2001:db8:1:2::5"),
            ("Path", "//login", "//login"),
            ("customer", "//a%62", "//a%62"),
        ] {
            assert_eq!(
                trust.normalize(name, given).unwrap(),
                expected,
                "{name} {given}"
            );
        }
    }

    #[test]
    fn an_ambiguous_value_is_refused() {
        let trust = Trust::default();
        for path in ["/x/../login", "/x/..;a/login", "/x%2F..%2Flogin"] {
            assert_eq!(
                trust.normalize("path", path),
                Err(AmbiguousRequest::DotSegments)
            );
        }
        for ip in [
            "unknown",
            "203.0.113.9, 10.0.0.1",
            "10.0.0.0/8",
            "localhost",
        ] {
            let refused = Err(AmbiguousRequest::NotAnAddress("ip".into()));
            assert_eq!(trust.normalize("ip", ip), refused, "{ip}");
        }
    }
}
