//! Who may ask.
//!
//! With a token: whoever shows it. Without one the door listens on loopback only, and still a web page open
//! in a browser on this machine could make it ask: so the request must be addressed to this machine by
//! address or as `localhost`, which a rebound name is not, and must not come from a page elsewhere.

use hyper::{
    Request, StatusCode, Uri,
    body::Incoming,
    header::{AUTHORIZATION, HOST, ORIGIN},
};

use super::Problem;

#[derive(Debug)]
pub(super) struct Access {
    token: Option<Token>,
}

/// The token, kept from debug output.
struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Access {
    pub(super) fn new(token: Option<String>) -> Self {
        Self {
            token: token.map(Token),
        }
    }

    pub(super) fn check(&self, request: &Request<Incoming>) -> Result<(), Problem> {
        match &self.token {
            Some(token) if request.uri().path() == "/healthz" || token.is_shown_in(request) => {
                Ok(())
            }
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
}

impl Token {
    fn is_shown_in(&self, request: &Request<Incoming>) -> bool {
        let shown = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| equal_in_constant_time(shown, self.0.as_bytes()))
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
