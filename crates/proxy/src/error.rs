//! Local replies: the responses that the proxy generates itself when no upstream response exists.

use http::{
    HeaderName, HeaderValue, Response, StatusCode,
    header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER},
};
use hyper::body::Bytes;
use tidegate_net::Problem;

/// A response extension that contains the reason for a local reply, under its name in the access
/// log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorReason(pub(crate) &'static str);

/// The reason why the proxy cannot return an upstream response. The message to the client never
/// names the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyError {
    /// The client sent a `CONNECT` request.
    Tunnel,
    /// The host is missing or invalid. The variant contains a description of the problem.
    Host(&'static str),
    /// The framing of the body is ambiguous or unsupported. The variant contains a description of
    /// the problem.
    Framing(&'static str),
    /// A header is malformed. The variant contains a description of the problem.
    Malformed(&'static str),
    /// The request is in a forwarding loop: it has passed through this proxy too often.
    Loop,
    /// The client has reached its limit of requests in flight. The variant contains the limit.
    ClientFull(usize),
    /// The request has too many header lines. The variant contains the maximum.
    TooManyHeaders(usize),
    /// The path has `.` or `..` segments, so the upstream cannot be determined reliably.
    DotSegments,
    /// The path or the host is too long to be matched against the upstreams' conditions.
    Unroutable,
    /// No upstream's conditions match the request.
    NoUpstream,
    /// The body exceeds the maximum size. The variant contains the maximum in bytes.
    TooLarge(u64),
    /// The request body did not arrive in time.
    BodyTooSlow,
    /// The client ended the request body early.
    BodyAborted,
    /// The upstream is at its adaptive concurrency limit.
    Overloaded,
    /// The endpoint is at its connection limit.
    Full,
    /// The proxy's machine has no free descriptor, port or memory for another connection.
    Local,
    /// The connection attempt failed.
    Unreachable,
    /// The connection attempt timed out.
    ConnectTimeout,
    /// The response head did not arrive in time.
    HeadTimeout,
    /// The upstream closed the connection early or sent invalid HTTP.
    BadResponse,
}

impl ProxyError {
    fn status(self) -> StatusCode {
        match self {
            Self::Tunnel => StatusCode::NOT_IMPLEMENTED,
            Self::Host(_)
            | Self::Framing(_)
            | Self::Malformed(_)
            | Self::DotSegments
            | Self::BodyAborted => StatusCode::BAD_REQUEST,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::ClientFull(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::TooManyHeaders(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Unroutable => StatusCode::URI_TOO_LONG,
            Self::NoUpstream => StatusCode::NOT_FOUND,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::Overloaded | Self::Full | Self::Local => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unreachable | Self::BadResponse => StatusCode::BAD_GATEWAY,
            Self::ConnectTimeout | Self::HeadTimeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn detail(self) -> String {
        let detail = match self {
            Self::Tunnel => "CONNECT tunnels are not supported; request the resource itself",
            Self::Host(problem) | Self::Framing(problem) | Self::Malformed(problem) => problem,
            Self::Loop => {
                "the request has passed through this proxy several times: the `Via` header shows a loop"
            }
            Self::ClientFull(max) => {
                return format!("{max} requests from this address are in flight; retry in 1s");
            }
            Self::TooManyHeaders(max) => {
                return format!("the number of header lines exceeds the maximum of {max}");
            }
            Self::DotSegments => "the path has segments `.` or `..`; send the resolved path",
            Self::Unroutable => "the path or the host is too long",
            Self::NoUpstream => "no upstream matches this host and path",
            Self::TooLarge(max) => {
                return format!("the body exceeds the maximum of {max} bytes");
            }
            Self::BodyTooSlow => "the body did not arrive in time",
            Self::BodyAborted => "the body ended early",
            Self::Overloaded => "the service is overloaded; retry in 1s",
            Self::Full => "the service has no free connection; try again",
            Self::Local => "the server cannot open another connection; try again",
            Self::Unreachable => "the service cannot be reached",
            Self::ConnectTimeout => "connecting to the service timed out",
            Self::HeadTimeout => "the service did not answer in time",
            Self::BadResponse => "invalid response from upstream",
        };
        detail.to_owned()
    }

    /// Returns the name of this error in metrics and in the access log.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Tunnel => "tunnel",
            Self::Host(_) => "host",
            Self::Framing(_) => "framing",
            Self::Malformed(_) => "malformed",
            Self::Loop => "loop",
            Self::ClientFull(_) => "client_full",
            Self::TooManyHeaders(_) => "too_many_headers",
            Self::DotSegments => "dot_segments",
            Self::Unroutable => "unroutable",
            Self::NoUpstream => "no_upstream",
            Self::TooLarge(_) => "too_large",
            Self::BodyTooSlow => "body_too_slow",
            Self::BodyAborted => "body_broke",
            Self::Overloaded => "overloaded",
            Self::Full => "full",
            Self::Local => "local",
            Self::Unreachable => "unreachable",
            Self::ConnectTimeout => "connect_timeout",
            Self::HeadTimeout => "head_timeout",
            Self::BadResponse => "bad_answer",
        }
    }

    /// The errors caused by the upstream, and not by the client or this machine. Outlier detection
    /// and the adaptive concurrency limit count only the errors in this list.
    pub(crate) const OF_UPSTREAM: [Self; 4] = [
        Self::Unreachable,
        Self::ConnectTimeout,
        Self::HeadTimeout,
        Self::BadResponse,
    ];

    /// Returns whether the upstream caused this error.
    pub(crate) fn is_of_upstream(self) -> bool {
        Self::OF_UPSTREAM.contains(&self)
    }

    /// Returns whether part of the request body is unread, so that the connection cannot be reused.
    const fn leaves_unread_body(self) -> bool {
        matches!(
            self,
            Self::TooLarge(_) | Self::BodyTooSlow | Self::BodyAborted
        )
    }

    /// Returns the gRPC status code that corresponds to an HTTP status.
    const fn grpc_code(status: StatusCode) -> u16 {
        const INVALID_ARGUMENT: u16 = 3;
        const RESOURCE_EXHAUSTED: u16 = 8;
        const UNIMPLEMENTED: u16 = 12;
        const UNAVAILABLE: u16 = 14;
        match status {
            StatusCode::NOT_FOUND | StatusCode::NOT_IMPLEMENTED => UNIMPLEMENTED,
            StatusCode::TOO_MANY_REQUESTS => RESOURCE_EXHAUSTED,
            // A retried call would loop again, so the status must be one for which clients do not
            // retry.
            StatusCode::LOOP_DETECTED => INVALID_ARGUMENT,
            _ if status.as_u16() >= 500 => UNAVAILABLE,
            _ => INVALID_ARGUMENT,
        }
    }

    /// Builds the reply to a gRPC call with this content type. A gRPC reply has a gRPC status
    /// instead of problem details.
    fn grpc_response(self, content_type: &HeaderValue) -> Response<Bytes> {
        let grpc_code = HeaderValue::from(Self::grpc_code(self.status()));
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type.clone());
        headers.insert(HeaderName::from_static("grpc-status"), grpc_code);
        // Every message is printable ASCII without `%`, so it needs no percent-encoding.
        if let Ok(message) = HeaderValue::try_from(self.detail()) {
            headers.insert(HeaderName::from_static("grpc-message"), message);
        }
        response
    }

    /// Builds the reply. The body contains problem details (RFC 9457). If `call` is the content
    /// type of a gRPC call, the reply has a gRPC status instead of problem details.
    pub(crate) fn response(self, call: Option<&HeaderValue>) -> Response<Bytes> {
        let mut response = match call {
            Some(content_type) => self.grpc_response(content_type),
            None => self.problem(),
        };
        response.extensions_mut().insert(ErrorReason(self.as_str()));
        response
    }

    fn problem(self) -> Response<Bytes> {
        let document = Problem::new(self.status(), self.detail()).document();
        let mut response = Response::new(Bytes::from(document));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if self.is_retryable() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.leaves_unread_body() {
            // hyper omits `Connection` over HTTP/2.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Returns whether the same request may succeed if the client retries it shortly.
    fn is_retryable(self) -> bool {
        matches!(
            self.status(),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_not_blamed_for_this_machine_or_the_client() {
        for error in all_errors() {
            assert_eq!(
                error.is_of_upstream(),
                is_caused_by_upstream(error),
                "{error:?}"
            );
        }
    }

    fn is_caused_by_upstream(error: ProxyError) -> bool {
        match error {
            ProxyError::Unreachable
            | ProxyError::ConnectTimeout
            | ProxyError::HeadTimeout
            | ProxyError::BadResponse => true,
            ProxyError::Tunnel
            | ProxyError::Host(_)
            | ProxyError::Framing(_)
            | ProxyError::Malformed(_)
            | ProxyError::Loop
            | ProxyError::ClientFull(_)
            | ProxyError::TooManyHeaders(_)
            | ProxyError::DotSegments
            | ProxyError::Unroutable
            | ProxyError::NoUpstream
            | ProxyError::TooLarge(_)
            | ProxyError::BodyTooSlow
            | ProxyError::BodyAborted
            | ProxyError::Overloaded
            | ProxyError::Full
            | ProxyError::Local => false,
        }
    }

    /// Returns one error of each variant. The `match` below does not compile if a variant is
    /// missing.
    fn all_errors() -> Vec<ProxyError> {
        let next = |error: &ProxyError| {
            Some(match error {
                ProxyError::Tunnel => ProxyError::Host(""),
                ProxyError::Host(_) => ProxyError::Framing(""),
                ProxyError::Framing(_) => ProxyError::Malformed(""),
                ProxyError::Malformed(_) => ProxyError::Loop,
                ProxyError::Loop => ProxyError::ClientFull(1),
                ProxyError::ClientFull(_) => ProxyError::TooManyHeaders(1),
                ProxyError::TooManyHeaders(_) => ProxyError::DotSegments,
                ProxyError::DotSegments => ProxyError::Unroutable,
                ProxyError::Unroutable => ProxyError::NoUpstream,
                ProxyError::NoUpstream => ProxyError::TooLarge(1),
                ProxyError::TooLarge(_) => ProxyError::BodyTooSlow,
                ProxyError::BodyTooSlow => ProxyError::BodyAborted,
                ProxyError::BodyAborted => ProxyError::Overloaded,
                ProxyError::Overloaded => ProxyError::Full,
                ProxyError::Full => ProxyError::Local,
                ProxyError::Local => ProxyError::Unreachable,
                ProxyError::Unreachable => ProxyError::ConnectTimeout,
                ProxyError::ConnectTimeout => ProxyError::HeadTimeout,
                ProxyError::HeadTimeout => ProxyError::BadResponse,
                ProxyError::BadResponse => return None,
            })
        };
        std::iter::successors(Some(ProxyError::Tunnel), next).collect()
    }
}
