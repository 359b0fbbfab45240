//! Normalises a request head before any rule is evaluated, so that the rules are evaluated on the
//! same head that the upstream receives.
//!
//! If the rules were evaluated on a different head, clients could bypass them. For example, a key
//! could use a header that the proxy removes later, or a condition could miss a header in another
//! spelling. Therefore, only this module removes or rewrites request headers. Rules,
//! `upstreams[].when` and the classes of `adaptive` are evaluated on the result. Other code adds
//! headers later: `X-Forwarded-*`, `Forwarded`, `Via`, and the framing headers.
//!
//! ```text
//! target::check_framing      one length, one encoding, not too many header lines
//! check_values               HTTP/2: no white space around values
//! remove_names               names with `_`, and forwarding headers of untrusted clients
//! target::normalise_target   one host, a path, one line of cookies
//! hop_by_hop                 hop-by-hop headers; an `Upgrade` in one spelling
//! ```

use http::{
    HeaderMap, HeaderName, HeaderValue, Version,
    header::{CONTENT_LENGTH, EXPECT, UPGRADE, VIA},
    request::Parts,
};
use tidegate_config::{Underscores, Via};

use super::{
    error::ProxyError,
    headers::{
        forwarded::{ForwardingHeaders, is_proxy_header},
        hop_by_hop, lookup, target,
    },
    upstream::config::RuntimeConfig,
};

/// A request with this number of `Via` elements with this proxy's pseudonym is treated as looping.
/// The number is above 1, because two or three tiers of proxies may share a pseudonym.
const MAX_PASSES: usize = 4;

/// Normalises `head` according to the settings of `current`. `forwarding` says whether the client
/// is a trusted proxy.
///
/// # Errors
///
/// Returns an error if the head is malformed or ambiguous, or if the request is in a loop.
pub(crate) fn normalise(
    head: &mut Parts,
    current: &RuntimeConfig,
    forwarding: &ForwardingHeaders,
) -> Result<(), ProxyError> {
    let settings = &current.settings;
    target::check_framing(&head.headers, settings.max_headers)?;
    if head.version == Version::HTTP_2 {
        check_values(&head.headers)?;
    }
    remove_names(&mut head.headers, settings.heads.underscores, forwarding)?;
    if let Some(via) = &settings.heads.via {
        check_loop(&head.headers, via)?;
    }
    forwarding.remove_unpaired(&mut head.headers);
    target::normalise_target(head)?;
    trim_length(&mut head.headers);
    // Remove `Expect`: the proxy sends `100 Continue` itself when it reads the body.
    lookup::remove(&mut head.headers, &EXPECT);
    // `Upgrade` is only defined in HTTP/1.1 (RFC 9110, section 7.8; RFC 9113, section 8.2.2).
    let is_http11 = head.version == Version::HTTP_11;
    let protocol = is_http11
        .then(|| hop_by_hop::offered_protocol(&head.headers))
        .flatten();
    hop_by_hop::strip_request(&mut head.headers);
    if let Some(protocol) = protocol {
        let upstream = current.upstreams.route(head);
        // An HTTP/2 upstream cannot switch protocols, so the upgrade offer is dropped.
        if upstream.is_ok_and(|upstream| upstream.http2.is_none()) {
            head.headers.insert(UPGRADE, protocol);
        }
    }
    Ok(())
}

/// Rejects header values that begin or end with white space. White space at the beginning or end of
/// a value makes an HTTP/2 request malformed (RFC 9113, section 8.2.1). HTTP/1.1 parsers strip the
/// white space, so the values of HTTP/1.1 requests never begin or end with it.
fn check_values(headers: &HeaderMap) -> Result<(), ProxyError> {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    for value in headers.values().map(HeaderValue::as_bytes) {
        if is_blank(value.first()) || is_blank(value.last()) {
            return Err(ProxyError::Malformed(
                "a header value begins or ends with white space",
            ));
        }
    }
    Ok(())
}

/// Removes headers with `_` in their name, as `underscores` configures, and the forwarding headers
/// of untrusted clients.
fn remove_names(
    headers: &mut HeaderMap,
    underscores: Underscores,
    forwarding: &ForwardingHeaders,
) -> Result<(), ProxyError> {
    let mut removed: Vec<HeaderName> = Vec::new();
    for name in headers.keys() {
        let mut has_underscore = false;
        for byte in name.as_str().bytes() {
            match byte {
                b'_' => has_underscore = true,
                // The `http` crate allows `"` in HTTP/2 names, but `"` is not a token character
                // (RFC 9110, section 5.6.2).
                b'"' => return Err(ProxyError::Malformed("a header name contains `\"`")),
                _ => {}
            }
        }
        let is_removed = match (has_underscore, underscores) {
            (true, Underscores::Refuse) => {
                return Err(ProxyError::Malformed(
                    "a header name contains `_`; use `-` instead",
                ));
            }
            (true, Underscores::Drop) => true,
            // No proxy spells its forwarding headers with `_`, so remove such headers even from the
            // requests of trusted proxies.
            (true, Underscores::Pass) => is_proxy_header(name.as_str()),
            (false, _) => !forwarding.is_trusted() && is_proxy_header(name.as_str()),
        };
        if is_removed {
            removed.push(name.clone());
        }
    }
    for name in removed {
        headers.remove(name);
    }
    Ok(())
}

/// Rejects a request that has passed through proxies with this proxy's pseudonym too often.
fn check_loop(headers: &HeaderMap, via: &Via) -> Result<(), ProxyError> {
    if !lookup::has(headers, &VIA) {
        return Ok(());
    }
    let elements = headers
        .get_all(VIA)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    // A `Via` element is a protocol, white space, a pseudonym, and optionally a comment.
    let is_ours = |element: &&[u8]| {
        let mut words = element
            .split(|byte| matches!(byte, b' ' | b'\t'))
            .filter(|word| !word.is_empty());
        let pseudonym = words.nth(1).unwrap_or_default();
        pseudonym.eq_ignore_ascii_case(via.pseudonym().as_bytes())
    };
    let passes = elements.filter(is_ours).count();
    if passes >= MAX_PASSES {
        return Err(ProxyError::Loop);
    }
    Ok(())
}

/// Removes leading zeros from `Content-Length`: `005` becomes `5`.
fn trim_length(headers: &mut HeaderMap) {
    let Some(length) = lookup::first(headers, &CONTENT_LENGTH) else {
        return;
    };
    let digits = length.as_bytes();
    if digits.len() < 2 || digits[0] != b'0' {
        return;
    }
    let end = digits.len() - 1;
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    if let Ok(trimmed) = HeaderValue::from_bytes(&digits[zeros.min(end)..]) {
        headers.insert(CONTENT_LENGTH, trimmed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_written_as_a_number() {
        for (written, expected) in [("0", "0"), ("00", "0"), ("005", "5"), ("50", "50")] {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_LENGTH, HeaderValue::from_static(written));
            trim_length(&mut headers);
            assert_eq!(headers[CONTENT_LENGTH], expected);
        }
    }

    #[test]
    fn passes_are_counted_by_pseudonym() {
        let via = Via::new("edge").unwrap();
        for (lines, is_loop) in [
            (vec!["1.1 edge, 2 edge, 1.1 edge"], false),
            (
                vec!["1.1 other, 1.1 edge-2, 1.1 edge (edge), 1.1 a, 1.1 b"],
                false,
            ),
            (
                vec!["1.1 edge, HTTP/2  Edge (x),1.1\tedge", "1.0 edge"],
                true,
            ),
            (vec!["edge, edge, edge, edge, edge"], false),
        ] {
            let mut headers = HeaderMap::new();
            for line in &lines {
                headers.append(VIA, HeaderValue::from_str(line).unwrap());
            }
            let checked = check_loop(&headers, &via);
            assert_eq!(checked == Err(ProxyError::Loop), is_loop, "{lines:?}");
        }
    }
}
