//! Protection against cross-site requests (CSRF).
//!
//! Any web page can make a visitor's browser send requests to addresses that only that browser can
//! reach. The page cannot read the response, but the request takes effect. Browsers mark such
//! requests with `Sec-Fetch-Site` and `Origin`.

use hyper::{
    HeaderMap, StatusCode,
    header::{HOST, HeaderName, HeaderValue, ORIGIN},
};

use super::http::Problem;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Returns whether `Sec-Fetch-Site` rules out a request caused by another site. Current browsers
/// send this header; other programs do not, and pass.
pub(super) fn is_own_fetch(headers: &HeaderMap) -> bool {
    let is_own_page = |value: &HeaderValue| {
        let value = value.as_bytes();
        value == b"same-origin" || value == b"none"
    };
    // All header lines must match: with several lines, it is unclear which one the browser sent.
    headers.get_all(SEC_FETCH_SITE).iter().all(is_own_page)
}

/// Rejects a request that a page of another site has caused.
pub(super) fn check(headers: &HeaderMap) -> Result<(), Problem> {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let is_own_origin = |value: &HeaderValue| {
        let authority = value
            .to_str()
            .ok()
            .and_then(|origin| origin.split_once("://"))
            .map(|(_, authority)| authority);
        matches!((authority, host), (Some(authority), Some(host)) if authority.eq_ignore_ascii_case(host))
    };
    if is_own_fetch(headers) && headers.get_all(ORIGIN).iter().all(is_own_origin) {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::FORBIDDEN,
        "requests from web pages of other sites are refused",
    ))
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
        check(&headers).is_err()
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
}
