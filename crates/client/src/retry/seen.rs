//! The outcome of a try, and what it means for a retry.

use std::{error::Error as StdError, io};

use http::{HeaderMap, Method, StatusCode, header::CONTENT_TYPE};

use crate::{
    Health,
    advice::{Advice, Wait, grpc_status, refuses},
};

/// The outcome of a try.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// The server responded.
    Answer {
        /// The status of the response.
        status: StatusCode,
        /// The headers of the response.
        headers: &'a HeaderMap,
    },
    /// Nothing was sent, because the connection failed.
    NeverSent,
    /// The request was sent, and no response arrived. It is unknown whether the server processed
    /// it.
    NoAnswer,
}

/// The meaning of an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Final: a success, or an error that a retry would repeat.
    Done,
    /// The server refused the request without processing it: 429, 503, any other 4xx with a time to
    /// retry, and gRPC's `RESOURCE_EXHAUSTED` and `UNAVAILABLE`.
    Refused,
    /// The request failed, and may have been processed: 408, 425, 500, 502, 504, or no response.
    Failed,
    /// Nothing was sent.
    NeverSent,
}

/// Whether a request may be processed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Safety {
    /// Yes: the method is idempotent, or there is an `Idempotency-Key`.
    Idempotent,
    /// Unknown, as for every gRPC method. A refusal is trusted to mean that nothing was processed.
    Grpc,
    /// No.
    Once,
}

impl Seen<'_> {
    /// Classifies the outcome.
    #[must_use]
    pub fn kind(&self, advice: &Advice) -> Kind {
        let (status, headers) = match self {
            Self::Answer { status, headers } => (*status, *headers),
            Self::NeverSent => return Kind::NeverSent,
            Self::NoAnswer => return Kind::Failed,
        };
        if refuses(status, headers) {
            return Kind::Refused;
        }
        if grpc_status(headers).is_some() {
            return Kind::Done;
        }
        match status.as_u16() {
            408 | 425 | 500 | 502 | 504 => Kind::Failed,
            400..=499 if matches!(advice.wait, Some(Wait::After(_))) => Kind::Refused,
            _ => Kind::Done,
        }
    }
}

impl Seen<'_> {
    /// Returns whether the server accepted the request, whatever its response.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        match self {
            Self::Answer { status, headers } => !refuses(*status, headers),
            Self::NeverSent | Self::NoAnswer => false,
        }
    }

    /// Returns what the outcome says about the health of the server.
    #[must_use]
    pub fn health(&self) -> Health {
        /// `UNKNOWN`, `DEADLINE_EXCEEDED`, `INTERNAL`, `UNAVAILABLE` and `DATA_LOSS`.
        const SERVERS_FAULT: [u32; 5] = [2, 4, 13, 14, 15];
        let failed = match self {
            Self::Answer { status, headers } => match grpc_status(headers) {
                Some(code) => SERVERS_FAULT.contains(&code),
                None => status.is_server_error(),
            },
            Self::NeverSent | Self::NoAnswer => true,
        };
        if failed {
            Health::Failure
        } else {
            Health::Success
        }
    }
}

impl Safety {
    /// Classifies a request by its method and headers.
    #[must_use]
    pub fn of(method: &Method, headers: &HeaderMap) -> Self {
        let grpc = |value: &http::HeaderValue| value.as_bytes().starts_with(b"application/grpc");
        if method.is_idempotent() || headers.contains_key("idempotency-key") {
            Self::Idempotent
        } else if headers.get(CONTENT_TYPE).is_some_and(grpc) {
            Self::Grpc
        } else {
            Self::Once
        }
    }
}

/// Returns whether the connection was refused. Only `connect` fails with that error.
pub(super) fn connection_refused(error: &(dyn StdError + 'static)) -> bool {
    /// A longer chain of sources must be a cycle.
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
            let advice = Advice::of(status, &headers, tidegate_core::Timestamp::default());
            let headers = &headers;
            Seen::Answer { status, headers }.kind(&advice)
        };
        for status in [200, 204, 301, 400, 401, 403, 404, 413, 501] {
            assert_eq!(kind(status, &[]), Kind::Done, "{status}");
        }
        for status in [408, 425, 500, 502, 504] {
            assert_eq!(kind(status, &[]), Kind::Failed, "{status}");
        }
        assert_eq!(
            (kind(429, &[]), kind(503, &[])),
            (Kind::Refused, Kind::Refused)
        );
        assert_eq!(kind(403, &[("retry-after", "3")]), Kind::Refused);
        assert_eq!(kind(200, &[("retry-after", "3")]), Kind::Done);
        assert_eq!(kind(200, &[("grpc-status", "14")]), Kind::Refused);
        assert_eq!(kind(200, &[("grpc-status", "13")]), Kind::Done);
    }

    #[test]
    fn idempotency_is_classified() {
        let safety = |method: Method, name: &'static str, value: &'static str| {
            let pair = (
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            );
            Safety::of(&method, &HeaderMap::from_iter([pair]))
        };
        assert_eq!(safety(Method::PUT, "accept", "*/*"), Safety::Idempotent);
        assert_eq!(safety(Method::PATCH, "accept", "*/*"), Safety::Once);
        assert_eq!(
            safety(Method::POST, "idempotency-key", "7"),
            Safety::Idempotent
        );
        assert_eq!(
            safety(Method::POST, "content-type", "application/grpc+proto"),
            Safety::Grpc
        );
    }

    #[test]
    fn a_refused_connection_is_found_at_any_depth() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert!(connection_refused(&refused));
        let wrapped = crate::Error::Failed {
            tries: 1,
            gave_up: super::super::GiveUp::Tries,
            source: Box::new(refused),
        };
        assert!(connection_refused(&wrapped));
        assert!(!connection_refused(&io::Error::from(
            io::ErrorKind::ConnectionReset
        )));
    }
}
