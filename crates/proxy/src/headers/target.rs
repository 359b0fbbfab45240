//! Converts the request target to the form in which it is forwarded: a path, and exactly one
//! `Host`.

use http::{
    HeaderMap, HeaderValue, Method, Uri, Version,
    header::{CONTENT_LENGTH, COOKIE, HOST, TRANSFER_ENCODING, UPGRADE},
    request::Parts,
    uri::{Authority, PathAndQuery, Scheme},
};

use super::lookup::{self, has_any};
use crate::error::ProxyError;

/// The maximum length of a DNS name.
const MAX_HOST_BYTES: usize = 253;

/// Rejects ambiguous framing, and heads that are too large for HTTP/1.1.
///
/// # Errors
///
/// Returns an error in these cases:
///
/// - There are more than `max_headers` header lines. hyper does not limit their number in HTTP/2.
/// - There is a transfer coding other than `chunked`.
/// - There is a `Content-Length` that is not exactly one number.
pub(crate) fn check_framing(headers: &HeaderMap, max_headers: usize) -> Result<(), ProxyError> {
    if headers.len() > max_headers {
        return Err(ProxyError::TooManyHeaders(max_headers));
    }
    if !has_any(headers, &[TRANSFER_ENCODING, CONTENT_LENGTH]) {
        return Ok(());
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = codings
        .next()
        .is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    if !is_chunked || codings.next().is_some() {
        return Err(ProxyError::Framing(
            "the body has an encoding other than `chunked`",
        ));
    }
    let is_number = |length: &HeaderValue| {
        !length.is_empty() && length.as_bytes().iter().all(u8::is_ascii_digit)
    };
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    if !lengths.next().is_none_or(is_number) || lengths.next().is_some() {
        return Err(ProxyError::Framing(
            "`Content-Length` is not a single number",
        ));
    }
    Ok(())
}

/// Reduces the request target to path and query, and moves the host of the target to `Host`.
///
/// # Errors
///
/// Returns an error if the host is missing, repeated or invalid, and for a `CONNECT` request, which
/// a reverse proxy does not serve.
pub(crate) fn normalise_target(head: &mut Parts) -> Result<(), ProxyError> {
    const NO_HOST: ProxyError = ProxyError::Host("`Host` is missing");
    if head.method == Method::CONNECT {
        return Err(ProxyError::Tunnel);
    }
    if lookup::is_repeated(&head.headers, &HOST) {
        return Err(ProxyError::Host(
            "the request must have exactly one `Host` header",
        ));
    }
    // The host of an HTTP/2 target, or of an absolute-form target, takes precedence over `Host`.
    if let Some(authority) = head.uri.authority() {
        if head.uri.scheme().is_none() {
            return Err(ProxyError::Host("the request target is invalid"));
        }
        if authority.as_str().contains('@') {
            return Err(ProxyError::Host(
                "the request target must not contain a user name or password",
            ));
        }
        let host = HeaderValue::from_str(authority.as_str());
        let host = host.map_err(|_| ProxyError::Host("the host is not a valid header value"))?;
        head.headers.insert(HOST, host);
        let path = head.uri.path_and_query().cloned();
        head.uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    }
    match lookup::first(&head.headers, &HOST) {
        Some(host) if host.is_empty() => return Err(NO_HOST),
        Some(host) if is_simple_host(host.as_bytes()) => {}
        Some(host) => {
            let host = Authority::try_from(host.as_bytes());
            if !host.is_ok_and(|host| is_single_host(&host)) {
                return Err(ProxyError::Host("the host is invalid"));
            }
        }
        None => return Err(NO_HOST),
    }
    ensure_path(&head.method, &mut head.uri)?;
    join_cookies(&mut head.headers);
    Ok(())
}

/// Returns whether `host` is an ordinary name or IPv4 address, with or without a port. An ordinary
/// host is always valid, so this fast path avoids parsing.
fn is_simple_host(host: &[u8]) -> bool {
    let mut parts = host.splitn(2, |byte| *byte == b':');
    let (name, port) = (parts.next().unwrap_or_default(), parts.next());
    let is_name_byte = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let is_port = |port: &[u8]| !port.is_empty() && port.iter().all(u8::is_ascii_digit);
    let is_short = host.len() <= MAX_HOST_BYTES;
    is_short && !name.is_empty() && name.iter().all(is_name_byte) && port.is_none_or(is_port)
}

/// Returns whether `host` is exactly one host without user information. The port, if any, must be
/// numeric. The grammar allows a comma in a host, but in a request, a comma means that two `Host`
/// values were joined.
fn is_single_host(host: &Authority) -> bool {
    let port = host.as_str().strip_prefix(host.host());
    let is_port = |port: &str| {
        let digits = port.strip_prefix(':').unwrap_or(port);
        digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    !host.host().is_empty() && !host.as_str().contains(',') && port.is_some_and(is_port)
}

/// Adds the path `/` to a target without a path, so that the upstream receives the same path as the
/// rules.
fn ensure_path(method: &Method, uri: &mut Uri) -> Result<(), ProxyError> {
    const WRONG: ProxyError = ProxyError::Host("the request target is invalid");
    let target = uri.path_and_query().map_or("", PathAndQuery::as_str);
    if target.starts_with('?') {
        let whole = PathAndQuery::try_from(format!("/{target}"));
        *uri = Uri::from(whole.map_err(|_| WRONG)?);
        return Ok(());
    }
    let is_valid = target.starts_with('/') || (target == "*" && *method == Method::OPTIONS);
    is_valid.then_some(()).ok_or(WRONG)
}

/// Converts the head of a request for an HTTP/2 upstream: moves `Host` back into the target, and
/// removes `Upgrade`.
///
/// # Errors
///
/// Returns an error if the host is not valid in a target.
pub(crate) fn to_http2(head: &mut Parts, scheme: &Scheme) -> Result<(), ProxyError> {
    const WRONG: ProxyError = ProxyError::Host("the host is invalid");
    let host = head.headers.remove(HOST).ok_or(WRONG)?;
    let authority = Authority::try_from(host.as_bytes()).map_err(|_| WRONG)?;
    let mut uri = std::mem::take(&mut head.uri).into_parts();
    uri.scheme = Some(scheme.clone());
    uri.authority = Some(authority);
    head.uri = Uri::from_parts(uri).map_err(|_| WRONG)?;
    head.version = Version::HTTP_2;
    // The request may have been normalised for an HTTP/1.1 upstream, before a reload routed it to
    // this upstream.
    lookup::remove(&mut head.headers, &UPGRADE);
    Ok(())
}

/// Joins several `Cookie` lines, which HTTP/2 allows, into the single line that HTTP/1.1 requires.
fn join_cookies(headers: &mut HeaderMap) {
    if !lookup::is_repeated(headers, &COOKIE) {
        return;
    }
    let cookies: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .filter(|line| !line.is_empty())
        .collect();
    // Valid header values joined with `; ` form a valid header value.
    if let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..])) {
        headers.insert(COOKIE, joined);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_plain_host_is_valid(host in "[a-zA-Z0-9.:@%_\\-]{0,12}", is_long in any::<bool>()) {
            let host = if is_long { host.repeat(30) } else { host };
            let is_valid = Authority::try_from(host.as_bytes())
                .is_ok_and(|host| is_single_host(&host));
            prop_assert!(!is_simple_host(host.as_bytes()) || is_valid);
        }
    }

    #[test]
    fn a_host_is_one_name_with_an_optional_port() {
        let is_single_host = |host: &str| is_single_host(&Authority::try_from(host).unwrap());
        for host in ["a", "a_b", "a:", "a:80", "[::1]", "[::1]:80", "xn--a~b"] {
            assert!(is_single_host(host), "{host}");
        }
        for host in ["a,b", "a:x", "a:8x", ":80", "a@b", "a@a", "a:1@a:1"] {
            assert!(!is_single_host(host), "{host}");
        }
    }

    #[test]
    fn nearly_all_hosts_are_plain() {
        for host in [
            "localhost",
            "api.example.com",
            "h:8080",
            "192.0.2.1",
            "a--b.",
            "8",
        ] {
            assert!(is_simple_host(host.as_bytes()), "{host}");
        }
        for host in [
            "",
            ":80",
            "h:",
            "h:80:80",
            "[::1]",
            "u@h",
            "h:x",
            "h/",
            "h\u{e4}",
            &"h".repeat(254),
        ] {
            assert!(!is_simple_host(host.as_bytes()), "{host}");
        }
    }
}
