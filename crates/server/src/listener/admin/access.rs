//! Access control of the admin listener.
//!
//! If a token is configured, requests must include it, except for health and metrics on loopback.
//! Without a token the server listens only on loopback. Even then a web page in a browser on this
//! machine could send requests. So `Host` must be a loopback address or `localhost`, which prevents
//! DNS rebinding, and the request must not come from a page of another site.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hyper::{
    Request, StatusCode, Uri,
    body::Incoming,
    header::{HOST, HeaderValue, ORIGIN},
};
use tidegate::Clock;
use tidegate_net::{
    Problem,
    auth::{Attempt, Authenticator},
};

use crate::listener::{cross_site, http::bearer};

#[derive(Debug)]
pub(super) struct Access {
    authenticator: Arc<Authenticator>,
    /// The host names that browsers may use in addition to `localhost`.
    hosts: Vec<String>,
    /// Whether the listener is reachable only from this machine.
    is_loopback: bool,
}

impl Access {
    /// Creates the access control of a listener on `address`, with `token` if there is one. With a
    /// token, browsers may use `hosts`.
    ///
    /// # Errors
    ///
    /// Fails if other machines can reach the listener and there is no token.
    pub(super) fn new(
        token: Option<&str>,
        hosts: Vec<String>,
        address: SocketAddr,
        clock: Clock,
    ) -> io::Result<Self> {
        let is_loopback = address.ip().is_loopback();
        let authenticator = Authenticator::new("admin", token.map(str::as_bytes), clock);
        if authenticator.is_open() && !is_loopback {
            let problem = format!(
                "{address} can be reached from other machines; set a token, or listen on 127.0.0.1"
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        Ok(Self {
            authenticator: Arc::new(authenticator),
            hosts,
            is_loopback,
        })
    }

    pub(super) fn authenticator(&self) -> Arc<Authenticator> {
        Arc::clone(&self.authenticator)
    }

    pub(super) fn check(&self, request: &Request<Incoming>, peer: IpAddr) -> Result<(), Problem> {
        if self.authenticator.is_open() {
            if is_local(request) {
                return Ok(());
            }
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "without an admin token, the admin listener accepts only local requests to 127.0.0.1, [::1] or localhost, and none from web pages; set `admin.token_env` to allow others",
            ));
        }
        cross_site::check(request.headers(), &self.hosts)?;
        if self.is_open(request) {
            return Ok(());
        }
        let missing = || {
            Problem::new(
                StatusCode::UNAUTHORIZED,
                "send the admin token: `Authorization: Bearer TOKEN`",
            )
        };
        let token = bearer(request.headers()).ok_or_else(missing)?;
        match self.authenticator.check(peer, token) {
            Attempt::Accepted => Ok(()),
            Attempt::Wrong => Err(missing()),
            Attempt::Limited { retry_after } => Err(Problem::too_many_guesses(retry_after)),
        }
    }

    /// Returns whether the request needs no token: liveness never needs one, readiness and metrics
    /// do not need one on loopback.
    fn is_open(&self, request: &Request<Incoming>) -> bool {
        match request.uri().path() {
            "/healthz" => true,
            "/readyz" | "/metrics" => self.is_loopback && is_local(request),
            _ => false,
        }
    }
}

fn is_local(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    if !cross_site::is_own_fetch(headers) {
        return false;
    }
    let is_ours = |value: &HeaderValue, scheme: &str| {
        let text = value.to_str();
        text.is_ok_and(|text| is_loopback_name(&format!("{scheme}{text}")))
    };
    // All header lines must match: with several lines, it is unclear which one the browser sent.
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
            Access::new(token, Vec::new(), address.parse().unwrap(), clock)
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
