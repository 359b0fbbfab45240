//! The admin listener's address, in the forms that `--admin` accepts.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::print;

const DEFAULT_HOST: &str = "127.0.0.1";
const DEFAULT_PORT: u16 = 8082;

/// The address of the admin listener. The address is displayed as `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdminAddress {
    /// A host name or an IP address. An IPv6 address is stored without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) scheme: Option<Scheme>,
}

/// The scheme of an admin address that is given as a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    Http,
    Https,
}

impl AdminAddress {
    /// Parses `PORT`, `HOST`, `HOST:PORT`, or an HTTP or HTTPS URL. The URL's path must be empty or
    /// `/`.
    ///
    /// Without a scheme, the default host is 127.0.0.1 and the default port 8082. For a URL, the
    /// default port is the default port of its scheme.
    pub(crate) fn parse(given: &str) -> Result<Self, String> {
        let (scheme, rest) = match given.split_once("://") {
            None => (None, given),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => {
                (Some(Scheme::Http), rest)
            }
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => {
                (Some(Scheme::Https), rest)
            }
            Some(_) => return Err(not_an_address(given)),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        // Each character in the list starts a path, a query or a fragment. Each character in the
        // list can also occur in a password, but an address with a password is invalid too.
        if rest.contains(['/', '?', '#']) {
            return Err(format!(
                "\"{}\" is not an address; remove everything after the host and port; {FORMS}",
                shown(given)
            ));
        }
        let default_port = match scheme {
            None => DEFAULT_PORT,
            Some(Scheme::Http) => 80,
            Some(Scheme::Https) => 443,
        };
        let is_port = scheme.is_none() && is_number(rest);
        let (host, port) = if is_port {
            (Some(DEFAULT_HOST.to_owned()), parse_port(rest))
        } else {
            match split(rest) {
                (host, None) => (parse_host(host), Some(default_port)),
                (host, Some(port)) => (parse_host(host), parse_port(port)),
            }
        };
        match (host, port) {
            (Some(host), Some(port)) => Ok(Self { host, port, scheme }),
            (Some(_), None) => Err(format!(
                "the port in \"{}\" is not a number from 1 to 65535; {}",
                shown(given),
                FORMS
            )),
            (None, _) => Err(not_an_address(given)),
        }
    }

    pub(crate) fn is_ip(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok()
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, .. } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// Splits off the port. An IPv6 address has a port only if it is in brackets.
fn split(text: &str) -> (&str, Option<&str>) {
    if text.parse::<Ipv6Addr>().is_ok() {
        return (text, None);
    }
    match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    }
}

/// Returns the host without brackets; `None` if the host is neither an IP address nor a name.
/// Numbers such as `8082` and `127.1` are rejected, because resolvers would interpret them as IPv4
/// addresses, which the user never intends.
fn parse_host(host: &str) -> Option<String> {
    let in_brackets = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    if let Some(host) = in_brackets {
        let address: Ipv6Addr = host.parse().ok()?;
        return Some(address.to_string());
    }
    if let Ok(address) = host.parse::<Ipv6Addr>() {
        return Some(address.to_string());
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let is_numeric = host.chars().all(|c| c.is_ascii_digit() || c == '.');
    let is_host = if is_numeric {
        host.parse::<Ipv4Addr>().is_ok()
    } else {
        host.chars().all(is_name)
    };
    is_host.then(|| host.to_owned())
}

fn parse_port(port: &str) -> Option<u16> {
    let port = is_number(port).then(|| port.parse().ok())?;
    port.filter(|port| *port > 0)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

const FORMS: &str = "pass HOST:PORT with --admin or TIDEGATE_ADMIN, such as 127.0.0.1:8082; PORT, HOST and \
    http://HOST:PORT are accepted too";

fn not_an_address(given: &str) -> String {
    format!("\"{}\" is not an address; {FORMS}", shown(given))
}

/// Returns the address in the form for messages, which hides a user name and password.
fn shown(given: &str) -> String {
    match given.rsplit_once('@') {
        Some((_, rest)) => format!("…@{}", print::printable(rest)),
        None => print::printable(given),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_form_is_one_address() {
        for (given, expected, scheme) in [
            ("18082", "127.0.0.1:18082", None),
            ("localhost", "localhost:8082", None),
            ("127.0.0.1", "127.0.0.1:8082", None),
            ("limits_1.internal:9", "limits_1.internal:9", None),
            ("::1", "[::1]:8082", None),
            ("[::1]", "[::1]:8082", None),
            ("[::1]:9", "[::1]:9", None),
            ("http://127.0.0.1:9/", "127.0.0.1:9", Some(Scheme::Http)),
            ("HTTP://a", "a:80", Some(Scheme::Http)),
            ("https://a", "a:443", Some(Scheme::Https)),
            ("https://[::1]:9", "[::1]:9", Some(Scheme::Https)),
        ] {
            let address = AdminAddress::parse(given).unwrap();
            assert_eq!(
                (address.to_string().as_str(), address.scheme),
                (expected, scheme)
            );
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_forms() {
        for (given, begins) in [
            ("", "\"\" is not an address; pass HOST:PORT"),
            (":18082", "\":18082\" is not an address; pass HOST:PORT"),
            (
                "0",
                "the port in \"0\" is not a number from 1 to 65535; pass HOST:PORT",
            ),
            (
                "99999",
                "the port in \"99999\" is not a number from 1 to 65535; ",
            ),
            ("a:", "the port in \"a:\" is not a number from 1 to 65535; "),
            (
                "a:b",
                "the port in \"a:b\" is not a number from 1 to 65535; ",
            ),
            (
                "a:99999",
                "the port in \"a:99999\" is not a number from 1 to 65535; ",
            ),
            ("127.1:9", "\"127.1:9\" is not an address; "),
            ("http://8082", "\"http://8082\" is not an address; "),
            ("http://a/x", "\"http://a/x\" is not an address; "),
            ("http://", "\"http://\" is not an address; "),
            (
                "http://a:9/metrics",
                "\"http://a:9/metrics\" is not an address; remove everything after the host and port; ",
            ),
            ("a:9/x", "\"a:9/x\" is not an address; remove everything"),
            (
                "http://a:9?x",
                "\"http://a:9?x\" is not an address; remove everything",
            ),
            ("redis://a", "\"redis://a\" is not an address; "),
            ("no address", "\"no address\" is not an address; "),
            ("http://u:secret@a:9", "\"…@a:9\" is not an address; "),
            ("u@a:x", "\"…@a:x\" is not an address; "),
        ] {
            let problem = AdminAddress::parse(given).unwrap_err();
            assert!(problem.starts_with(begins), "{given}: {problem}");
            assert!(problem.contains("127.0.0.1:8082") && !problem.contains("secret"));
        }
    }
}
