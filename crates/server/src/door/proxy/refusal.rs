//! What the proxy answers itself, because no upstream did.

use http::{
    HeaderName, HeaderValue, Response, StatusCode,
    header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER},
};
use hyper::body::Bytes;

use super::body::Body;
use crate::door::http::Problem;

/// What a refusal is called in the access log, as an extension of the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused(pub(super) &'static str);

/// Why there is no answer of an upstream. None of them names the upstream to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A client wants a tunnel to somewhere.
    Tunnel,
    /// The host is missing or makes no sense; with what is wrong.
    Host(&'static str),
    /// It is not clear where the body ends, or what it is; with what is wrong.
    Framing(&'static str),
    /// A header is malformed; with what is wrong.
    Malformed(&'static str),
    /// The request has passed this proxy too often.
    Loop,
    /// The client has this many requests in flight, which is all that it may have.
    ClientFull(usize),
    /// There are more than so many header lines.
    TooManyHeaders(usize),
    /// The path has segments `.` or `..`, so that it is not clear which upstream it is for.
    DotSegments,
    /// The path or the host is too long to choose an upstream by.
    Unroutable,
    /// No upstream is for this request.
    NoUpstream,
    /// The body is over so many bytes.
    TooLarge(u64),
    /// The body did not arrive in time.
    BodyTooSlow,
    /// The body broke off.
    BodyBroke,
    /// The upstream has as many requests as it bears.
    Overloaded,
    /// The upstream has as many connections as it may have.
    Full,
    /// This machine cannot open another connection: no descriptor, port or memory is left.
    Local,
    /// Nobody took the connection.
    Unreachable,
    /// Nobody took the connection in time.
    ConnectTimeout,
    /// The head of the answer did not come in time.
    HeadTimeout,
    /// The upstream broke off, or sent what is no HTTP.
    BadAnswer,
}

impl Refusal {
    fn status(self) -> StatusCode {
        match self {
            Self::Tunnel => StatusCode::NOT_IMPLEMENTED,
            Self::Host(_)
            | Self::Framing(_)
            | Self::Malformed(_)
            | Self::DotSegments
            | Self::BodyBroke => StatusCode::BAD_REQUEST,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::ClientFull(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::TooManyHeaders(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Unroutable => StatusCode::URI_TOO_LONG,
            Self::NoUpstream => StatusCode::NOT_FOUND,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::Overloaded | Self::Full | Self::Local => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unreachable | Self::BadAnswer => StatusCode::BAD_GATEWAY,
            Self::ConnectTimeout | Self::HeadTimeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn detail(self) -> String {
        let detail = match self {
            Self::Tunnel => "tunnels are not made here; ask for the resource itself",
            Self::Host(problem) | Self::Framing(problem) | Self::Malformed(problem) => problem,
            Self::Loop => "the request has passed this proxy several times: `Via` shows a loop",
            Self::ClientFull(most) => {
                return format!("{most} requests from this address are in flight; ask again in 1s");
            }
            Self::TooManyHeaders(most) => {
                return format!("the header lines are over the maximum of {most}");
            }
            Self::DotSegments => "the path has segments `.` or `..`; send it with these resolved",
            Self::Unroutable => "the path or the host is too long",
            Self::NoUpstream => "there is nothing here for this host and path",
            Self::TooLarge(most) => {
                return format!("the body is over the maximum of {most} bytes");
            }
            Self::BodyTooSlow => "the body did not arrive in time",
            Self::BodyBroke => "the body broke off",
            Self::Overloaded => "the service has too much to do; ask again in 1s",
            Self::Full => "the service has as many requests as it can take; try again",
            Self::Local => "the server cannot open another connection; try again",
            Self::Unreachable => "the service cannot be reached",
            Self::ConnectTimeout => "the service cannot be reached in time",
            Self::HeadTimeout => "the service did not answer in time",
            Self::BadAnswer => "the service gave no answer that makes sense",
        };
        detail.to_owned()
    }

    /// What this is called in metrics.
    pub(super) const fn as_str(self) -> &'static str {
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
            Self::BodyBroke => "body_broke",
            Self::Overloaded => "overloaded",
            Self::Full => "full",
            Self::Local => "local",
            Self::Unreachable => "unreachable",
            Self::ConnectTimeout => "connect_timeout",
            Self::HeadTimeout => "head_timeout",
            Self::BadAnswer => "bad_answer",
        }
    }

    /// Whether it is the upstream that has failed.
    pub(super) const fn is_upstreams(self) -> bool {
        matches!(
            self,
            Self::Full
                | Self::Local
                | Self::Unreachable
                | Self::ConnectTimeout
                | Self::HeadTimeout
                | Self::BadAnswer
        )
    }

    /// Whether some of the request was not read, so that no other one can follow it.
    const fn leaves_a_body(self) -> bool {
        matches!(
            self,
            Self::TooLarge(_) | Self::BodyTooSlow | Self::BodyBroke
        )
    }

    /// What it is called in gRPC.
    const fn code(status: StatusCode) -> u16 {
        const INVALID_ARGUMENT: u16 = 3;
        const RESOURCE_EXHAUSTED: u16 = 8;
        const UNIMPLEMENTED: u16 = 12;
        const UNAVAILABLE: u16 = 14;
        match status {
            StatusCode::NOT_FOUND | StatusCode::NOT_IMPLEMENTED => UNIMPLEMENTED,
            StatusCode::TOO_MANY_REQUESTS => RESOURCE_EXHAUSTED,
            // A call that goes round in a loop does so the next time, too.
            StatusCode::LOOP_DETECTED => INVALID_ARGUMENT,
            _ if status.as_u16() >= 500 => UNAVAILABLE,
            _ => INVALID_ARGUMENT,
        }
    }

    /// The answer to a call of this content type, which knows statuses and no documents.
    fn answer_call(self, content_type: &HeaderValue) -> Response<Bytes> {
        let code = HeaderValue::from(Self::code(self.status()));
        let mut answer = Response::new(Bytes::new());
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, content_type.clone());
        headers.insert(HeaderName::from_static("grpc-status"), code);
        // It is printable ASCII without `%`.
        if let Ok(message) = HeaderValue::try_from(self.detail()) {
            headers.insert(HeaderName::from_static("grpc-message"), message);
        }
        answer
    }

    /// The problem document, or the status for a gRPC call of this content type.
    pub(super) fn answer(self, call: Option<&HeaderValue>) -> Response<Body> {
        self.whole_answer(call).map(Body::whole)
    }

    /// The same with its body as it is.
    pub(super) fn whole_answer(self, call: Option<&HeaderValue>) -> Response<Bytes> {
        let mut answer = match call {
            Some(content_type) => self.answer_call(content_type),
            None => self.problem(),
        };
        answer.extensions_mut().insert(Refused(self.as_str()));
        answer
    }

    fn problem(self) -> Response<Bytes> {
        let document = Problem::new(self.status(), self.detail()).document();
        let mut answer = Response::new(Bytes::from(document));
        *answer.status_mut() = self.status();
        let headers = answer.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if self.asks_again() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.leaves_a_body() {
            // In HTTP/2 hyper leaves it out.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }

    /// Whether the same request may succeed in a moment.
    fn asks_again(self) -> bool {
        matches!(
            self.status(),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        )
    }
}
