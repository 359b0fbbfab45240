//! Adds explanations to hyper's replies to HTTP/1.1 heads that are too large or invalid.
//!
//! hyper writes the replies to malformed requests itself, without an explanation and without a
//! callback. The proxy can detect hyper's own reply only because hyper writes bytes to the client
//! when the proxy is not sending a response. [`BadRequests::explain`] recognises and counts hyper's
//! replies, and adds problem details (RFC 9457).

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::StatusCode;
use tidegate_net::{
    Problem,
    prometheus::{Metric, Page},
};

use super::error::ProxyError;

/// The status codes with which hyper rejects a head, and their explanations.
const REASONS: [(StatusCode, &str); 3] = [
    (
        StatusCode::BAD_REQUEST,
        "the request head is not valid HTTP/1.1, or is ambiguous",
    ),
    (StatusCode::URI_TOO_LONG, "the request target is too long"),
    (
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "the request head is too large, or has too many lines",
    ),
];

/// The errors for which the proxy rejects a request before any rule is evaluated, by their names
/// from [`ProxyError::as_str`].
const EARLY_ERRORS: [&str; 12] = [
    BODY_COST,
    "body_broke",
    "body_too_slow",
    "client_full",
    "framing",
    "host",
    "loop",
    "malformed",
    "overloaded",
    "too_large",
    "too_many_headers",
    "tunnel",
];

/// The reason for rejecting a request whose body does not contain the cost that a rule reads from
/// it.
pub(crate) const BODY_COST: &str = "body_cost";

const REJECTED: Metric<1> = Metric::counter(
    "tidegate_proxy_rejected_total",
    ["status"],
    "HTTP/1.1 request heads rejected as invalid or too large, by status.",
);
const REFUSED: Metric<1> = Metric::counter(
    "tidegate_proxy_refused_total",
    ["reason"],
    "Requests that the proxy refused before any rule was evaluated, by reason.",
);

/// Counts the heads rejected by hyper, by status, and the requests rejected by the proxy, by
/// reason.
#[derive(Debug, Default)]
pub(crate) struct BadRequests {
    heads: [AtomicU64; REASONS.len()],
    refused: [AtomicU64; EARLY_ERRORS.len()],
}

impl BadRequests {
    /// Returns hyper's reply with problem details added, and counts the reply. Returns `None` if
    /// `bytes` is not exactly one of hyper's rejections.
    pub(crate) fn explain(&self, bytes: &[u8]) -> Option<Bytes> {
        const EMPTY: &str = "content-length: 0\r\n";
        let head = std::str::from_utf8(bytes).ok()?;
        let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?;
        let at = REASONS
            .iter()
            .position(|(known, _)| known.as_str() == status)?;
        let (before, after) = head.split_once(EMPTY)?;
        if !after.ends_with("\r\n\r\n") && after != "\r\n" {
            return None;
        }
        self.heads[at].fetch_add(1, Ordering::Relaxed);
        let (status, detail) = REASONS[at];
        let document = Problem::new(status, detail).document();
        let mut response = BytesMut::with_capacity(512);
        response.put_slice(before.as_bytes());
        response.put_slice(b"content-type: application/problem+json\r\ncontent-length: ");
        response.put_slice(itoa::Buffer::new().format(document.len()).as_bytes());
        response.put_slice(b"\r\n");
        response.put_slice(after.as_bytes());
        response.put_slice(&document);
        Some(response.freeze())
    }

    /// Counts a request that the proxy rejects before any rule is evaluated.
    pub(crate) fn count(&self, error: ProxyError) {
        self.count_reason(error.as_str());
    }

    /// Counts a request that the proxy rejects for this reason.
    pub(crate) fn count_reason(&self, reason: &str) {
        let at = EARLY_ERRORS.iter().position(|known| *known == reason);
        debug_assert!(at.is_some(), "{reason} is not counted");
        if let Some(at) = at {
            self.refused[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds the counters to `page`.
    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let rejected = REASONS
            .iter()
            .zip(&self.heads)
            .map(|((status, _), count)| ([status.as_str()], count.load(Ordering::Relaxed)));
        page.family(&REJECTED, rejected);
        let refused = EARLY_ERRORS.iter().zip(&self.refused);
        let refused = refused.map(|(reason, count)| ([*reason], count.load(Ordering::Relaxed)));
        page.family(&REFUSED, refused);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_net::prometheus::{Format, encode};

    use super::*;

    fn page_of(bad_requests: BadRequests) -> String {
        encode(Format::Text, move |page| bad_requests.collect(page))
    }

    #[test]
    fn rejected_heads_get_an_explanation() {
        let bad_requests = BadRequests::default();
        for bytes in [
            "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\ndate: now\r\n\r\n",
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n\r\n",
        ] {
            let response = bad_requests.explain(bytes.as_bytes()).unwrap();
            let response = std::str::from_utf8(&response).unwrap();
            let (head, body) = response.split_once("\r\n\r\n").unwrap();
            let length = format!("content-length: {}", body.len());
            assert_eq!(head.matches(&length).count(), 1, "{response}");
            assert!(body.contains("the request head is too large"), "{response}");
        }
        let counted = "tidegate_proxy_rejected_total{status=\"431\"} 2\n";
        assert!(page_of(bad_requests).contains(counted));
    }

    #[test]
    fn refused_requests_are_counted_by_reason() {
        let bad_requests = BadRequests::default();
        for error in [
            ProxyError::ClientFull(1),
            ProxyError::Framing(""),
            ProxyError::Host(""),
            ProxyError::Loop,
            ProxyError::Malformed(""),
            ProxyError::TooManyHeaders(1),
            ProxyError::Tunnel,
            ProxyError::BodyAborted,
            ProxyError::BodyTooSlow,
            ProxyError::Overloaded,
            ProxyError::TooLarge(1),
        ] {
            bad_requests.count(error);
        }
        bad_requests.count_reason(BODY_COST);
        let text = page_of(bad_requests);
        let counted = text.lines().filter(|line| line.ends_with("\"} 1")).count();
        assert_eq!(counted, EARLY_ERRORS.len(), "{text}");
    }

    #[test]
    fn other_responses_are_unchanged() {
        for bytes in [
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nhello",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n",
            "hello",
            "",
        ] {
            assert_eq!(BadRequests::default().explain(bytes.as_bytes()), None);
        }
    }
}
