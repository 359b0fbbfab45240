//! The outcome of an attempt, and its classification for retries.

use std::{error::Error as StdError, io};

use http::{HeaderMap, Method, StatusCode, header::CONTENT_TYPE};

use crate::{
    HealthSignal,
    advice::{Advice, Wait, grpc_status, is_refusal},
};

/// The outcome of an attempt to send a request.
#[derive(Clone, Copy, Debug)]
pub enum AttemptOutcome<'a> {
    /// The server responded.
    Response {
        /// The status of the response.
        status: StatusCode,
        /// The headers of the response.
        headers: &'a HeaderMap,
    },
    /// Nothing was sent, because no connection could be established.
    NeverSent,
    /// The request was sent, but no response arrived. The server may or may not have processed the
    /// request.
    NoResponse,
}

/// The classification of an outcome for retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutcomeKind {
    /// The outcome is final: a success, or an error that would occur again after a retry.
    Done,
    /// The server refused the request without processing it. The response is 429, 503, any other
    /// 4xx with a time to retry, or gRPC's `RESOURCE_EXHAUSTED` or `UNAVAILABLE`.
    Refused,
    /// The request failed, and the server may have processed it. The response is 408, 425, 500, 502
    /// or 504, or there is no response.
    Failed,
    /// Nothing was sent.
    NeverSent,
}

/// Whether a request may be processed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idempotency {
    /// The request may be processed twice, because its method is idempotent or because it has an
    /// `Idempotency-Key`.
    Idempotent,
    /// The request is a gRPC call. The client cannot know whether the call may be processed twice.
    /// A refused call is assumed not to have been processed.
    Grpc,
    /// The request must not be processed twice.
    NotIdempotent,
}

impl AttemptOutcome<'_> {
    /// Classifies the outcome for retries.
    #[must_use]
    pub fn kind(&self, advice: &Advice) -> OutcomeKind {
        let (status, headers) = match self {
            Self::Response { status, headers } => (*status, *headers),
            Self::NeverSent => return OutcomeKind::NeverSent,
            Self::NoResponse => return OutcomeKind::Failed,
        };
        if is_refusal(status, headers) {
            return OutcomeKind::Refused;
        }
        if grpc_status(headers).is_some() {
            return OutcomeKind::Done;
        }
        match status.as_u16() {
            408 | 425 | 500 | 502 | 504 => OutcomeKind::Failed,
            400..=499 if matches!(advice.wait, Some(Wait::After(_))) => OutcomeKind::Refused,
            _ => OutcomeKind::Done,
        }
    }

    /// Returns whether the server accepted the request, even if the response is an error.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        match self {
            Self::Response { status, headers } => !is_refusal(*status, headers),
            Self::NeverSent | Self::NoResponse => false,
        }
    }

    /// Returns what the outcome says about the server's health.
    #[must_use]
    pub fn health_signal(&self) -> HealthSignal {
        /// The gRPC statuses that indicate a server error: `UNKNOWN`, `DEADLINE_EXCEEDED`,
        /// `INTERNAL`, `UNAVAILABLE` and `DATA_LOSS`.
        const SERVERS_FAULT: [u32; 5] = [2, 4, 13, 14, 15];
        let failed = match self {
            Self::Response { status, headers } => match grpc_status(headers) {
                Some(code) => SERVERS_FAULT.contains(&code),
                None => status.is_server_error(),
            },
            Self::NeverSent | Self::NoResponse => true,
        };
        if failed {
            HealthSignal::Failure
        } else {
            HealthSignal::Success
        }
    }
}

impl Idempotency {
    /// Classifies a request by its method and headers.
    #[must_use]
    pub fn of_request(method: &Method, headers: &HeaderMap) -> Self {
        let grpc = |value: &http::HeaderValue| value.as_bytes().starts_with(b"application/grpc");
        if method.is_idempotent() || headers.contains_key("idempotency-key") {
            Self::Idempotent
        } else if headers.get(CONTENT_TYPE).is_some_and(grpc) {
            Self::Grpc
        } else {
            Self::NotIdempotent
        }
    }
}

/// Returns whether the connection was refused. Only `connect` fails with a refused connection, so
/// nothing was sent.
pub(super) fn is_connection_refused(error: &(dyn StdError + 'static)) -> bool {
    /// The maximum number of error sources to follow. A longer chain is probably a cycle.
    const MAX_DEPTH: usize = 16;
    std::iter::successors(Some(error), |error| (*error).source())
        .take(MAX_DEPTH)
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_classified() {
        let kind = |status: u16, pairs: &[(&'static str, &'static str)]| {
            let named = pairs.iter().map(|(name, value)| {
                let value = http::HeaderValue::from_static(value);
                (http::HeaderName::from_static(name), value)
            });
            let headers: HeaderMap = named.collect();
            let status = StatusCode::from_u16(status).unwrap();
            let advice =
                Advice::from_response(status, &headers, tidegate_core::Timestamp::default());
            let headers = &headers;
            AttemptOutcome::Response { status, headers }.kind(&advice)
        };
        for status in [200, 204, 301, 400, 401, 403, 404, 413, 501] {
            assert_eq!(kind(status, &[]), OutcomeKind::Done, "{status}");
        }
        for status in [408, 425, 500, 502, 504] {
            assert_eq!(kind(status, &[]), OutcomeKind::Failed, "{status}");
        }
        assert_eq!(
            (kind(429, &[]), kind(503, &[])),
            (OutcomeKind::Refused, OutcomeKind::Refused)
        );
        assert_eq!(kind(403, &[("retry-after", "3")]), OutcomeKind::Refused);
        assert_eq!(kind(200, &[("retry-after", "3")]), OutcomeKind::Done);
        assert_eq!(kind(200, &[("grpc-status", "14")]), OutcomeKind::Refused);
        assert_eq!(kind(200, &[("grpc-status", "13")]), OutcomeKind::Done);
    }

    #[test]
    fn idempotency_is_classified() {
        let idempotency = |method: Method, name: &'static str, value: &'static str| {
            let pair = (
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            );
            Idempotency::of_request(&method, &HeaderMap::from_iter([pair]))
        };
        assert_eq!(
            idempotency(Method::PUT, "accept", "*/*"),
            Idempotency::Idempotent
        );
        assert_eq!(
            idempotency(Method::PATCH, "accept", "*/*"),
            Idempotency::NotIdempotent
        );
        assert_eq!(
            idempotency(Method::POST, "idempotency-key", "7"),
            Idempotency::Idempotent
        );
        assert_eq!(
            idempotency(Method::POST, "content-type", "application/grpc+proto"),
            Idempotency::Grpc
        );
    }

    #[test]
    fn a_refused_connection_is_found_at_any_depth() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert!(is_connection_refused(&refused));
        let wrapped = crate::Error::Failed {
            tries: 1,
            gave_up: super::super::GiveUpReason::Tries,
            source: Box::new(refused),
        };
        assert!(is_connection_refused(&wrapped));
        assert!(!is_connection_refused(&io::Error::from(
            io::ErrorKind::ConnectionReset
        )));
    }
}
