//! Who may ask.
//!
//! With a token: whoever shows it; health and metrics need none on loopback. Without one the door listens on
//! loopback only, and still a web page open in a browser on this machine could make it ask: so the request must
//! be addressed to this machine by address or as `localhost`, which a rebound name is not, and must not come from a page elsewhere.

use std::{io, net::SocketAddr};

use hyper::{
    Request, StatusCode, Uri,
    body::Incoming,
    header::{AUTHORIZATION, HOST, HeaderValue, ORIGIN},
};

use super::Problem;

#[derive(Debug)]
pub(super) struct Access {
    token: Option<Token>,
    /// Whether only this machine reaches the door.
    is_loopback: bool,
}

/// The token, kept from debug output.
struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Access {
    /// Access with `token`, if there is one, to a door that listens on `address`.
    ///
    /// # Errors
    ///
    /// Refuses a door that other machines reach and that asks for no token.
    pub(super) fn new(token: Option<String>, address: SocketAddr) -> io::Result<Self> {
        let is_loopback = address.ip().is_loopback();
        let token = token.filter(|token| !token.is_empty()).map(Token);
        if token.is_none() && !is_loopback {
            let problem = format!(
                "{address} can be reached from other machines; set a token, or listen on 127.0.0.1"
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        Ok(Self { token, is_loopback })
    }

    pub(super) fn check(&self, request: &Request<Incoming>) -> Result<(), Problem> {
        match &self.token {
            Some(token) if token.is_shown_in(request) || self.is_open(request) => Ok(()),
            Some(_) => Err(Problem::new(
                StatusCode::UNAUTHORIZED,
                "show the admin token: `Authorization: Bearer TOKEN`",
            )),
            None if is_local(request) => Ok(()),
            None => Err(Problem::new(
                StatusCode::FORBIDDEN,
                "without an admin token this door answers this machine only, asked as 127.0.0.1, [::1] or localhost and from no web page; set `admin.token_env` to open it",
            )),
        }
    }

    /// What needs no token: that the process lives, and for who watches it from this machine how it does.
    fn is_open(&self, request: &Request<Incoming>) -> bool {
        match request.uri().path() {
            "/healthz" => true,
            "/readyz" | "/metrics" => self.is_loopback && is_local(request),
            _ => false,
        }
    }
}

impl Token {
    fn is_shown_in(&self, request: &Request<Incoming>) -> bool {
        let shown = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()));
        shown.is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case(b"Bearer ")
                && equal_in_constant_time(token, self.0.as_bytes())
        })
    }
}

/// Takes as long for a token that differs in its first byte as for one that differs in its last.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    let difference = a
        .iter()
        .zip(b)
        .fold(a.len() ^ b.len(), |difference, (a, b)| {
            difference | usize::from(a ^ b)
        });
    std::hint::black_box(difference) == 0
}

fn is_local(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let is_ours = |value: &HeaderValue, scheme: &str| {
        let text = value.to_str();
        text.is_ok_and(|text| is_loopback_name(&format!("{scheme}{text}")))
    };
    // Every line counts: of two, who knows which one a browser's page has written.
    headers
        .get_all(HOST)
        .iter()
        .all(|host| is_ours(host, "http://"))
        && headers
            .get_all(ORIGIN)
            .iter()
            .all(|origin| is_ours(origin, ""))
}

fn is_loopback_name(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else {
        return false;
    };
    let host = uri.host().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_that_others_reach_needs_a_token() {
        let access = |address: &str, token: Option<&str>| {
            Access::new(token.map(str::to_owned), address.parse().unwrap())
        };
        for open in ["0.0.0.0:9090", "192.0.2.1:9090", "[::]:9090"] {
            for token in [None, Some("")] {
                let refused = access(open, token).unwrap_err().to_string();
                assert!(refused.starts_with(open), "{refused}");
            }
            assert!(access(open, Some("secret")).is_ok_and(|access| !access.is_loopback));
        }
        assert!(access("127.0.0.1:9090", None).is_ok());
        assert!(access("[::1]:9090", None).is_ok_and(|access| access.is_loopback));
    }

    #[test]
    fn tokens_are_equal_if_every_octet_is() {
        assert!(equal_in_constant_time(b"secret", b"secret"));
        for other in [&b"secreT"[..], b"Secret", b"secre", b"secrets", b""] {
            assert!(!equal_in_constant_time(b"secret", other));
        }
    }
}
