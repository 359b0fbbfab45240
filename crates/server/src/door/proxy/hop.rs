//! Headers that belong to one connection, and not to the message: RFC 9110, section 7.6.1.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        CONNECTION, CONTENT_LENGTH, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING,
        UPGRADE,
    },
};

use super::lines;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
/// All that never go on, but for those that `Connection` names.
const OF_THE_CONNECTION: [HeaderName; 8] = [
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

/// The protocol that a request wants to go on with, or an answer goes on with.
///
/// HTTP/2 in this way was given up by RFC 9113, and here as well: a client that can do without is answered without.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let protocol = lines::first(headers, &UPGRADE)?;
    let is_meant =
        has_token(headers, &CONNECTION, "upgrade") && !has_token(headers, &UPGRADE, "h2c");
    is_meant.then(|| protocol.clone())
}

/// Says that the connection goes on with `protocol`.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

/// Removes what belongs to the connection on which a request came. `TE: trailers` is said anew, because trailers are
/// passed on.
pub(super) fn strip_request(headers: &mut HeaderMap) {
    if !lines::has_some(headers, &OF_THE_CONNECTION) {
        return;
    }
    let takes_trailers = has_token(headers, &TE, "trailers");
    strip(headers);
    headers.remove(PROXY_AUTHORIZATION);
    if takes_trailers {
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
        headers.insert(TE, TRAILERS);
    }
}

/// Removes what belongs to the connection on which an answer came.
pub(super) fn strip_answer(headers: &mut HeaderMap) {
    if !lines::has_some(headers, &OF_THE_CONNECTION) {
        return;
    }
    strip(headers);
    headers.remove(PROXY_AUTHENTICATE);
}

fn strip(headers: &mut HeaderMap) {
    match headers.get(CONNECTION) {
        // What nearly everybody says names no header but one that is removed in any case.
        Some(value) if value == "keep-alive" && !lines::is_repeated(headers, &CONNECTION) => {
            headers.remove(CONNECTION);
            if !lines::has_some(headers, &OF_THE_CONNECTION) {
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
        // The body is framed anew; a length beside the encoding is a lie that somebody may believe.
        headers.remove(CONTENT_LENGTH);
    }
}

/// Removes `Connection` and the headers that it names.
fn strip_named(headers: &mut HeaderMap) {
    let lines: Vec<HeaderValue> = headers.get_all(CONNECTION).iter().cloned().collect();
    headers.remove(CONNECTION);
    for name in lines.iter().flat_map(tokens) {
        // A message whose end is not where it was when it came would be another message.
        if let Ok(name) = HeaderName::from_bytes(name)
            && name != CONTENT_LENGTH
            && name != http::header::HOST
        {
            headers.remove(name);
        }
    }
}

/// Whether the list in the header `name` has this word.
pub(super) fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    lines::has(headers, name)
        && headers
            .get_all(name)
            .iter()
            .flat_map(tokens)
            .any(|token| token.eq_ignore_ascii_case(word.as_bytes()))
}

fn tokens(line: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    line.as_bytes()
        .split(|octet| *octet == b',')
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
    fn what_belongs_to_the_connection_is_removed() {
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
    fn trailers_are_asked_for_anew() {
        let mut request = headers(&[("te", "deflate;q=0.5, trailers"), ("connection", "te")]);
        strip_request(&mut request);
        assert_eq!(
            request,
            headers(&[("connection", "te"), ("te", "trailers")])
        );
    }

    #[test]
    fn a_client_cannot_have_the_length_or_the_host_removed() {
        let lines = [("content-length", "5"), ("host", "h")];
        let mut request = headers(&lines);
        request.insert(CONNECTION, "content-length, host".parse().unwrap());
        strip_request(&mut request);
        assert_eq!(request, headers(&lines));
    }

    #[test]
    fn a_length_beside_an_encoding_goes_with_it() {
        let mut answer = headers(&[("transfer-encoding", "chunked"), ("content-length", "5")]);
        strip_answer(&mut answer);
        assert_eq!(answer, HeaderMap::new());
    }
}
