//! Access control of the admin listener.
//!
//! If tokens are configured, each request must include one of these tokens. Liveness and the
//! console files are exempt. On a loopback address, readiness and metrics are exempt too. Without a
//! configured token, the server listens only on loopback addresses. Even on a loopback address, a
//! web page in a browser on this machine could send requests. Therefore `Host` must be a loopback
//! address or `localhost`, which prevents DNS rebinding, and the request must not come from another
//! site's page.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hyper::{
    HeaderMap, Request, StatusCode, Uri,
    body::Incoming,
    header::{HOST, HeaderValue, ORIGIN},
};
use tidegate::Clock;
use tidegate_config::TokenScope;
use tidegate_net::{
    Problem,
    auth::{AuthOutcome, Authenticator},
    input::shown,
};

use super::console;
use crate::listener::{cross_site, http::bearer};

/// An access token for the admin listener.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminCredential {
    /// The operator's name in the audit log.
    pub name: String,
    /// The operations that the token permits.
    pub scope: TokenScope,
    /// The token.
    pub token: String,
}

/// Hides the token, because `Debug` output can reach logs.
impl fmt::Debug for AdminCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminCredential")
            .field("name", &self.name)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// The sender of a request, identified by its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Operator {
    pub(super) name: Arc<str>,
    pub(super) scope: TokenScope,
}

impl Operator {
    fn new(name: &str, scope: TokenScope) -> Self {
        Self {
            name: name.into(),
            scope,
        }
    }

    /// Refuses a change if the token permits only reading.
    pub(super) fn may_operate(&self) -> Result<(), Problem> {
        if self.scope == TokenScope::Operate {
            return Ok(());
        }
        let detail = format!(
            "the token \"{}\" permits only reading; use a token with `scope: operate`",
            shown(&self.name)
        );
        Err(Problem::new(StatusCode::FORBIDDEN, detail))
    }
}

#[derive(Debug)]
pub(super) struct Access {
    authenticator: Arc<Authenticator>,
    /// The operators, in the same order as the authenticator's tokens.
    operators: Vec<Operator>,
    /// The host names that browsers may use to reach this listener, in addition to `localhost`.
    hosts: Vec<String>,
    /// Whether the listener is reachable only from this machine.
    is_loopback: bool,
}

impl Access {
    /// Creates the access control for a listener on `address`. If `credentials` is not empty, each
    /// request must include one of its tokens, and browsers may use the names in `hosts`.
    ///
    /// # Errors
    ///
    /// Fails if other machines can reach the listener and no token is configured.
    pub(super) fn new(
        credentials: &[AdminCredential],
        hosts: Vec<String>,
        address: SocketAddr,
        clock: Clock,
    ) -> io::Result<Self> {
        let is_loopback = address.ip().is_loopback();
        let credentials = credentials.iter();
        let credentials: Vec<&AdminCredential> = credentials
            .filter(|credential| !credential.token.is_empty())
            .collect();
        let tokens = credentials
            .iter()
            .map(|credential| credential.token.as_bytes());
        let authenticator = Authenticator::new("admin", tokens, clock);
        if authenticator.is_open() && !is_loopback {
            let problem = format!(
                "{address} can be reached from other machines; set a token, or listen on 127.0.0.1"
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        Ok(Self {
            authenticator: Arc::new(authenticator),
            operators: credentials
                .iter()
                .map(|credential| Operator::new(&credential.name, credential.scope))
                .collect(),
            hosts,
            is_loopback,
        })
    }

    pub(super) fn authenticator(&self) -> Arc<Authenticator> {
        Arc::clone(&self.authenticator)
    }

    /// Returns the request's sender, or a problem if the request is not allowed.
    pub(super) fn check(
        &self,
        request: &Request<Incoming>,
        peer: IpAddr,
    ) -> Result<Operator, Problem> {
        let headers = request.headers();
        let is_link = console::is_opened(request);
        if self.authenticator.is_open() {
            if is_local(headers) && (is_link || cross_site::is_own_fetch(headers)) {
                return Ok(Operator::new("local", TokenScope::Operate));
            }
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "without an admin token, the admin listener accepts only local requests to 127.0.0.1, [::1] or localhost, and none from web pages; set `admin.token_env` to allow others",
            ));
        }
        if is_link {
            cross_site::check_host(headers, &self.hosts)?;
        } else {
            cross_site::check(headers, &self.hosts)?;
        }
        if self.is_open(request) {
            return Ok(Operator::new("anonymous", TokenScope::Read));
        }
        let unauthorized = |detail| Problem::new(StatusCode::UNAUTHORIZED, detail);
        let token = bearer(headers)
            .ok_or_else(|| unauthorized("send the admin token: `Authorization: Bearer TOKEN`"))?;
        match self.authenticator.check(peer, token) {
            AuthOutcome::Accepted { secret } => {
                let operator = self.operators.get(secret).cloned();
                operator.ok_or_else(|| unauthorized("unknown token"))
            }
            AuthOutcome::Wrong => Err(unauthorized(
                "invalid admin token; send the token that `admin` sets in the rules file: `Authorization: Bearer TOKEN`",
            )),
            AuthOutcome::Limited { retry_after } => Err(Problem::too_many_guesses(retry_after)),
        }
    }

    /// Returns whether the request needs no token. Liveness and the console files never need a
    /// token. Readiness and metrics need no token on loopback.
    fn is_open(&self, request: &Request<Incoming>) -> bool {
        match request.uri().path() {
            "/healthz" => true,
            "/readyz" | "/metrics" => self.is_loopback && is_local(request.headers()),
            path => console::has_file(path),
        }
    }
}

/// Returns true if the request uses a host name that no attacker controls, and was not caused by
/// another site's page.
fn is_local(headers: &HeaderMap) -> bool {
    let is_ours = |value: &HeaderValue, scheme: &str| {
        let text = value.to_str();
        text.is_ok_and(|text| is_loopback_name(&format!("{scheme}{text}")))
    };
    // All header lines must match, because the server cannot tell which of several lines the
    // browser sent.
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
        .parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_open_to_other_machines_needs_a_token() {
        let access = |address: &str, token: Option<&str>| {
            let clock = Clock::manual(tidegate_core::Timestamp::from_micros(1));
            let credentials: Vec<AdminCredential> = token
                .into_iter()
                .map(|token| AdminCredential {
                    name: "alice".to_owned(),
                    scope: TokenScope::Read,
                    token: token.to_owned(),
                })
                .collect();
            Access::new(&credentials, Vec::new(), address.parse().unwrap(), clock)
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
}
