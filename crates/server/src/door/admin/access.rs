//! Who may ask.
//!
//! With a token: whoever shows it; health and metrics need none on loopback. Without one the door listens on
//! loopback only, and still a web page open in a browser on this machine could make it ask: so the request must
//! be addressed to this machine by address or as `localhost`, which a rebound name is not, and must not come from a page elsewhere.

use std::{io, net::SocketAddr};

use hyper::{
    Request, StatusCode, Uri,
    body::Incoming,
    header::{AUTHORIZATION, HOST, ORIGIN},
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
    let host = request
        .headers()
        .get(HOST)
        .and_then(|host| host.to_str().ok());
    let origin = request.headers().get(ORIGIN);
    let named_locally = host.is_none_or(|host| is_loopback_name(&format!("http://{host}")));
    let from_here = origin.is_none_or(|origin| origin.to_str().is_ok_and(is_loopback_name));
    named_locally && from_here
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
