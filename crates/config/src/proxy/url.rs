//! The URL of an upstream endpoint: a scheme, a host and a port, without a path.

use std::fmt;

use http::{Uri, uri::Authority};

/// The protocol of an upstream connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The connection is plaintext.
    Http,
    /// The connection uses TLS.
    Https,
}

impl Scheme {
    /// Returns `http` or `https`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// The URL of an upstream endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Url {
    /// The protocol of the connection.
    pub scheme: Scheme,
    /// The host name, or the IP address without brackets.
    pub host: Box<str>,
    /// The port. If the URL has no port, the default port of the scheme is used.
    pub port: u16,
}

impl Url {
    /// Parses `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    ///
    /// # Errors
    ///
    /// Returns a message that describes the problem if `text` has another form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |problem: &str| format!("{problem}; give a URL such as http://127.0.0.1:3000");
        let uri: Uri = text.parse().map_err(|_| wrong("this is not a URL"))?;
        let scheme = match uri.scheme_str() {
            Some("http") => Scheme::Http,
            Some("https") => Scheme::Https,
            Some(_) => return Err(wrong("only http:// and https:// are supported")),
            None => return Err(wrong("the scheme is missing")),
        };
        let authority = uri
            .authority()
            .map(Authority::as_str)
            .ok_or_else(|| wrong("the host is missing"))?;
        if authority.contains('@') {
            return Err(wrong("a user name is not allowed"));
        }
        if uri.path() != "/" || uri.query().is_some() {
            return Err(wrong(
                "a path is not allowed, because the client's path is forwarded unchanged",
            ));
        }
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong("the host is missing"));
        }
        let port = match (uri.port_u16(), authority.rsplit_once(':')) {
            (Some(0), _) => return Err(wrong("port 0 is not valid")),
            (Some(port), _) => port,
            (None, Some((_, port))) if !port.contains(']') => {
                return Err(wrong("the port is not valid"));
            }
            (None, _) if scheme == Scheme::Https => 443,
            (None, _) => 80,
        };
        Ok(Self {
            scheme,
            host: host.to_ascii_lowercase().into(),
            port,
        })
    }

    /// Returns the host and the port in the form of a `Host` header. The port is always included.
    #[must_use]
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.as_str(), self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_host_and_a_port() {
        for (text, shown) in [
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("http://App.internal/", "http://app.internal:80"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("http://[::1]", "http://[::1]:80"),
            ("https://app", "https://app:443"),
        ] {
            assert_eq!(Url::parse(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn invalid_urls_are_rejected() {
        for (text, problem) in [
            ("127.0.0.1:3000", "the scheme is missing"),
            ("ftp://h", "only http:// and https:// are supported"),
            ("http://u:p@h", "a user name is not allowed"),
            ("http://h/v1", "a path is not allowed"),
            ("http://h?x", "a path is not allowed"),
            ("http://h:0", "port 0 is not valid"),
            ("http://h:99999", "the port is not valid"),
            ("http://", "this is not a URL"),
            ("http://h h", "this is not a URL"),
        ] {
            let error = Url::parse(text).unwrap_err();
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }
}
