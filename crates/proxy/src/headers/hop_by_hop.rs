//! Hop-by-hop headers (RFC 9110, section 7.6.1).

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        CONNECTION, CONTENT_LENGTH, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
        TRANSFER_ENCODING, UPGRADE, VIA,
    },
};

use super::{forwarded::is_proxy_header, lookup};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
/// The headers that are never forwarded, in addition to those named by `Connection`.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    TE,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHORIZATION,
    PROXY_AUTHENTICATE,
];

const TRAILERS: HeaderValue = HeaderValue::from_static("trailers");

/// Returns the protocol to which the client offers to switch: the first one in the `Upgrade` list,
/// in lower case. The proxy offers only the first protocol to the upstream. Protocol names are
/// case-insensitive (RFC 9110, section 7.8).
///
/// RFC 9113 deprecates the upgrade to HTTP/2 (`h2c`), so an offer of `h2c` is ignored.
pub(crate) fn offered_protocol(headers: &HeaderMap) -> Option<HeaderValue> {
    if !has_token(headers, &CONNECTION, "upgrade") || has_token(headers, &UPGRADE, "h2c") {
        return None;
    }
    let lines = headers.get_all(UPGRADE).iter();
    let first = lines.flat_map(tokens).find(|token| !token.is_empty())?;
    let is_protocol =
        |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~/".contains(byte);
    if !first.iter().all(is_protocol) {
        return None;
    }
    HeaderValue::from_bytes(&first.to_ascii_lowercase()).ok()
}

/// Returns the protocol to which a 101 response switches. Returns `None` if the response is
/// invalid, for example because it names another protocol than `offered` (RFC 9110, section 7.8).
pub(crate) fn switched_protocol(headers: &HeaderMap, offered: &HeaderValue) -> Option<HeaderValue> {
    let protocol = lookup::first(headers, &UPGRADE)?;
    let lines = headers.get_all(UPGRADE).iter();
    let mut named = lines.flat_map(tokens).filter(|token| !token.is_empty());
    let is_offered = |token: &[u8]| token.eq_ignore_ascii_case(offered.as_bytes());
    let is_valid = has_token(headers, &CONNECTION, "upgrade")
        && named.next().is_some_and(is_offered)
        && named.all(is_offered);
    is_valid.then(|| protocol.clone())
}

/// Sets the headers that switch the client connection to `protocol`.
pub(crate) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

/// Sets the `Connection` header of an HTTP/1.1 request to an upstream, so that it names the
/// request's hop-by-hop headers.
pub(crate) fn set_connection(headers: &mut HeaderMap) {
    if !lookup::has_any(headers, &[TE, UPGRADE]) {
        return;
    }
    let named = match (lookup::has(headers, &TE), lookup::has(headers, &UPGRADE)) {
        (true, true) => "te, upgrade",
        (true, false) => "te",
        (false, _) => "upgrade",
    };
    headers.insert(CONNECTION, HeaderValue::from_static(named));
}

/// Removes the hop-by-hop headers of a request. Also removes `Trailer`, because the proxy drops
/// request trailers. Keeps `TE: trailers`, because response trailers are forwarded.
pub(crate) fn strip_request(headers: &mut HeaderMap) {
    lookup::remove(headers, &TRAILER);
    if !lookup::has_any(headers, &HOP_BY_HOP) {
        return;
    }
    let takes_trailers = has_token(headers, &TE, "trailers");
    strip(headers);
    headers.remove(PROXY_AUTHORIZATION);
    if takes_trailers {
        headers.insert(TE, TRAILERS);
    }
}

/// Removes the hop-by-hop headers of a response.
pub(crate) fn strip_response(headers: &mut HeaderMap) {
    if !lookup::has_any(headers, &HOP_BY_HOP) {
        return;
    }
    strip(headers);
    headers.remove(PROXY_AUTHENTICATE);
}

fn strip(headers: &mut HeaderMap) {
    match headers.get(CONNECTION) {
        // Fast path for the most common value, which names no other header.
        Some(value) if value == "keep-alive" && !lookup::is_repeated(headers, &CONNECTION) => {
            headers.remove(CONNECTION);
            if !lookup::has_any(headers, &HOP_BY_HOP) {
                return;
            }
        }
        Some(_) => strip_named(headers),
        None => {}
    }
    headers.remove(KEEP_ALIVE);
    headers.remove(PROXY_CONNECTION);
    headers.remove(TE);
    headers.remove(UPGRADE);
    if headers.remove(TRANSFER_ENCODING).is_some() {
        // The proxy determines the framing of the body itself. A message with both `Content-Length`
        // and `Transfer-Encoding` would allow request smuggling.
        headers.remove(CONTENT_LENGTH);
    }
}

/// Removes `Connection` and the headers that `Connection` names.
fn strip_named(headers: &mut HeaderMap) {
    let lines: Vec<HeaderValue> = headers.get_all(CONNECTION).iter().cloned().collect();
    headers.remove(CONNECTION);
    for name in lines.iter().flat_map(tokens) {
        // Keep `Content-Length`, because without it, the upstream would see the end of the message
        // at a different byte. Keep proxy headers, so that a client cannot remove a trusted proxy's
        // headers by naming them in `Connection`.
        if let Ok(name) = HeaderName::from_bytes(name)
            && !matches!(name, CONTENT_LENGTH | HOST | VIA)
            && !is_proxy_header(name.as_str())
        {
            headers.remove(name);
        }
    }
}

/// Returns whether the comma-separated list in the header `name` contains `word`.
pub(crate) fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    lookup::has(headers, name)
        && headers
            .get_all(name)
            .iter()
            .flat_map(tokens)
            .any(|token| token.eq_ignore_ascii_case(word.as_bytes()))
}

fn tokens(line: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    line.as_bytes()
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name: HeaderName = name.parse().unwrap();
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut request = headers(&[
            ("connection", "close, X-Mine"),
            ("connection", "x-other"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic x"),
            ("te", "gzip"),
            ("upgrade", "h2c"),
            ("x-mine", "1"),
            ("x-other", "2"),
            ("x-kept", "3"),
            ("authorization", "Bearer x"),
        ]);
        strip_request(&mut request);
        let kept = headers(&[("x-kept", "3"), ("authorization", "Bearer x")]);
        assert_eq!(request, kept);
    }

    #[test]
    fn te_trailers_is_set_again() {
        let mut request = headers(&[("te", "deflate;q=0.5, trailers"), ("connection", "te")]);
        strip_request(&mut request);
        assert_eq!(request, headers(&[("te", "trailers")]));
        set_connection(&mut request);
        assert_eq!(
            request,
            headers(&[("connection", "te"), ("te", "trailers")])
        );
    }

    #[test]
    fn upgrade_is_written_in_one_spelling() {
        for (written, expected) in [
            ("websocket", Some("websocket")),
            ("WebSocket", Some("websocket")),
            (", Echo/1 , websocket", Some("echo/1")),
            ("h2c, websocket", None),
            ("web socket", None),
            ("", None),
        ] {
            let mut request = headers(&[("connection", "keep-alive, Upgrade")]);
            request.insert(UPGRADE, written.parse().unwrap());
            let expected = expected.map(HeaderValue::from_static);
            assert_eq!(offered_protocol(&request), expected, "{written}");
            request.remove(CONNECTION);
            assert_eq!(offered_protocol(&request), None, "{written}");
        }
    }

    #[test]
    fn a_switch_names_only_the_offered_protocol() {
        let offered = HeaderValue::from_static("websocket");
        for (lines, is_valid) in [
            (&["websocket"][..], true),
            (&["WebSocket"], true),
            (&["websocket, "], true),
            (&["websocket", "websocket"], true),
            (&["echo"], false),
            (&["websocket, echo"], false),
            (&["websocket", "echo"], false),
            (&[", "], false),
            (&[], false),
        ] {
            let mut response = headers(&[("connection", "upgrade")]);
            for line in lines {
                response.append(UPGRADE, line.parse().unwrap());
            }
            let switched = switched_protocol(&response, &offered);
            assert_eq!(switched.is_some(), is_valid, "{lines:?}");
            response.remove(CONNECTION);
            assert_eq!(switched_protocol(&response, &offered), None, "{lines:?}");
        }
    }

    #[test]
    fn connection_cannot_remove_the_length_or_the_host() {
        let lines = [
            ("content-length", "5"),
            ("host", "h"),
            ("via", "1.1 a"),
            ("x-forwarded-for", "192.0.2.1"),
        ];
        let mut request = headers(&lines);
        let named = "content-length, host, Via, X-Forwarded-For";
        request.insert(CONNECTION, named.parse().unwrap());
        strip_request(&mut request);
        assert_eq!(request, headers(&lines));
    }

    #[test]
    fn content_length_beside_transfer_encoding_is_removed() {
        let mut response = headers(&[("transfer-encoding", "chunked"), ("content-length", "5")]);
        strip_response(&mut response);
        assert_eq!(response, HeaderMap::new());
    }
}
