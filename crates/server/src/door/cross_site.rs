//! Requests that a web page makes a browser send.
//!
//! A page from anywhere can let the browser of whoever looks at it post to addresses that only that browser reaches. The
//! page cannot read the answer, but the request counts. Browsers say where such a request comes from.

use hyper::{
    HeaderMap, StatusCode,
    header::{HOST, HeaderName, HeaderValue, ORIGIN},
};

use super::http::Problem;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Whether no page of another site has caused a request, by what browsers of today say. Programs say nothing.
pub(super) fn is_own_fetch(headers: &HeaderMap) -> bool {
    let is_own_page = |value: &HeaderValue| {
        let value = value.as_bytes();
        value == b"same-origin" || value == b"none"
    };
    // Every line counts: of two, nobody knows which one the browser wrote.
    headers.get_all(SEC_FETCH_SITE).iter().all(is_own_page)
}

/// Refuses a request that a page of another site has caused.
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
        "requests that a web page of another site causes are refused",
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
    fn pages_of_other_sites_are_refused_and_programs_are_not() {
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
