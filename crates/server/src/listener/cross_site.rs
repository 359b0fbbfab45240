//! Protection against cross-site requests (CSRF).
//!
//! Any web page can make a visitor's browser send requests to addresses that only that browser can
//! reach. The page cannot read the response, but the server still executes the request. Browsers
//! mark requests from other sites with `Sec-Fetch-Site` and `Origin`.
//!
//! An attacker can also make the name of a site resolve to an address of this server (DNS
//! rebinding). A request to that name then has the same origin as the page, so the page can read
//! the response. Therefore, a request from a browser is accepted only for a host that no attacker
//! controls: an address, `localhost` or a configured name. The headers `Sec-Fetch-Site` and
//! `Origin` alone do not suffice. Browsers send `Origin` with each `POST`, but send neither
//! `Origin` nor `Sec-Fetch-Site` with a plaintext `GET` to a name.

use std::net::IpAddr;

use hyper::{
    HeaderMap, StatusCode,
    header::{HOST, HeaderName, HeaderValue, ORIGIN},
    http::uri::Authority,
};
use tidegate_net::Problem;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Returns false if `Sec-Fetch-Site` shows that another site has caused the request. Modern
/// browsers send this header. A request without `Sec-Fetch-Site` is accepted, for example a request
/// from a client that is not a browser.
pub(super) fn is_own_fetch(headers: &HeaderMap) -> bool {
    let is_own_page = |value: &HeaderValue| {
        let value = value.as_bytes();
        value == b"same-origin" || value == b"none"
    };
    // All header lines must match, because the server cannot tell which of several lines the
    // browser sent.
    headers.get_all(SEC_FETCH_SITE).iter().all(is_own_page)
}

/// Rejects a request that could have been caused by another site's page. `hosts` are the names
/// under which browsers may reach this listener, in lower case.
pub(super) fn check(headers: &HeaderMap, hosts: &[String]) -> Result<(), Problem> {
    if !is_from_browser(headers) {
        return Ok(());
    }
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let is_own_origin = |value: &HeaderValue| {
        let authority = value
            .to_str()
            .ok()
            .and_then(|origin| origin.split_once("://"))
            .map(|(_, authority)| authority);
        matches!(
            (authority, host),
            (Some(authority), Some(host)) if authority.eq_ignore_ascii_case(host)
        )
    };
    if !is_own_fetch(headers) || !headers.get_all(ORIGIN).iter().all(is_own_origin) {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "requests from web pages of other sites are refused",
        ));
    }
    check_host(headers, hosts)
}

/// Rejects a browser request with a host name that an attacker could control. `hosts` are the names
/// under which browsers may reach this listener, in lower case.
pub(super) fn check_host(headers: &HeaderMap, hosts: &[String]) -> Result<(), Problem> {
    let mut lines = headers.get_all(HOST).iter().peekable();
    if lines.peek().is_some() && lines.all(|host| is_known_host(host, hosts)) {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::FORBIDDEN,
        "browsers can use this listener only by IP address, as localhost, or by a name in `hosts` of the listener; add the name in the `Host` header to `hosts`",
    ))
}

/// Returns whether the request has a header that only browsers send.
fn is_from_browser(headers: &HeaderMap) -> bool {
    let mut names = headers.keys();
    names.any(|name| *name == ORIGIN || name.as_str().starts_with("sec-fetch-"))
}

/// Returns whether `host` is an address, `localhost`, or one of `hosts`.
fn is_known_host(host: &HeaderValue, hosts: &[String]) -> bool {
    let authority = host
        .to_str()
        .ok()
        .and_then(|host| host.parse::<Authority>().ok());
    let Some(authority) = authority.filter(|authority| !authority.as_str().contains('@')) else {
        return false;
    };
    let name = authority.host();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_refused(lines: &[(&'static str, &'static str)]) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("limits.internal:8080"));
        for &(name, value) in lines {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        check(&headers, &["limits.internal".to_owned()]).is_err()
    }

    #[test]
    fn cross_site_pages_are_rejected_and_programs_are_not() {
        for ours in [
            &[][..],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-site", "same-origin")],
            &[("origin", "http://limits.internal:8080")],
            &[("origin", "https://LIMITS.internal:8080")],
        ] {
            assert!(!is_refused(ours), "{ours:?}");
        }
        for theirs in [
            &[("sec-fetch-site", "cross-site")][..],
            &[("sec-fetch-site", "same-site")],
            &[
                ("sec-fetch-site", "same-origin"),
                ("sec-fetch-site", "cross-site"),
            ],
            &[("origin", "null")],
            &[("origin", "http://evil.example")],
            &[("origin", "http://limits.internal")],
            &[
                ("origin", "http://limits.internal:8080"),
                ("origin", "http://evil.example"),
            ],
        ] {
            assert!(is_refused(theirs), "{theirs:?}");
        }
    }

    #[test]
    fn browsers_must_use_a_known_host() {
        let refused = |hosts: &[&'static str]| {
            let mut headers = HeaderMap::new();
            headers.insert(SEC_FETCH_SITE, HeaderValue::from_static("same-origin"));
            for host in hosts {
                headers.append(HOST, HeaderValue::from_static(host));
            }
            check(&headers, &["limits.internal".to_owned()]).is_err()
        };
        for known in [
            "limits.internal",
            "Limits.Internal:8080",
            "localhost",
            "127.0.0.1:8080",
            "[::1]:8080",
        ] {
            assert!(!refused(&[known]), "{known}");
        }
        for unknown in [
            &[][..],
            &[""],
            &["evil.example"],
            &["limits.internal.evil.example"],
            &["localhost.evil.example"],
            &["127.0.0.1.evil.example"],
            &["localhost@evil.example"],
            &["evil.example@localhost"],
            &["localhost", "evil.example"],
            &["evil.example", "localhost"],
        ] {
            assert!(refused(unknown), "{unknown:?}");
        }
    }
}
