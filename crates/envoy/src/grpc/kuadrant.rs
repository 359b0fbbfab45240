//! `kuadrant.service.ratelimit.v1.RateLimitService`: decodes requests and encodes responses.
//!
//! Messages are decoded by the same code as for `ShouldRateLimit`. The decoder limits the length of
//! the lists in a message.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tidegate_core::Span;
use tidegate_limiter::metrics::ListenerKind;
use tonic::Status;

use super::{
    fields::{MalformedMessage, MessageFields},
    proto::{
        envoy::service::ratelimit::v3::{RateLimitResponse, rate_limit_response::Code as WireCode},
        kuadrant::service::ratelimit::v1::{CommitResponse, ReserveResponse},
    },
    rate_limit::{add_descriptor, code, request, status, written},
};
use crate::{CommitRequest, RateLimitService, ReserveRequest, ReserveResult, RlsError};

/// A method of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KuadrantMethod {
    CheckRateLimit,
    Report,
    Reserve,
    Commit,
}

impl KuadrantMethod {
    const ALL: [Self; 4] = [
        Self::CheckRateLimit,
        Self::Report,
        Self::Reserve,
        Self::Commit,
    ];

    /// Returns the method with this path, if it belongs to the service.
    pub(super) fn of(path: &str) -> Option<Self> {
        let service = path.strip_prefix('/')?.strip_prefix(super::KUADRANT)?;
        let name = service.strip_prefix('/')?;
        Self::ALL.into_iter().find(|method| method.name() == name)
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::CheckRateLimit => "CheckRateLimit",
            Self::Report => "Report",
            Self::Reserve => "Reserve",
            Self::Commit => "Commit",
        }
    }
}

/// Checks the request in `message` without counting it. Store queries may take at most the time
/// `within`.
pub(super) async fn check_rate_limit(
    service: Option<&RateLimitService>,
    message: Result<Bytes, Status>,
    within: Duration,
) -> Result<RateLimitResponse, Status> {
    let (service, request) = (known(service)?, request(&message?)?);
    if request.domain.is_empty() {
        return Ok(unknown());
    }
    let answer = service.check_rate_limit(ListenerKind::Grpc, &request, Some(within));
    answer.await.map(written).map_err(|error| status(&error))
}

/// Counts the request in `message` without checking it.
pub(super) async fn report(
    service: Option<&RateLimitService>,
    message: Result<Bytes, Status>,
    within: Duration,
) -> Result<RateLimitResponse, Status> {
    let (service, request) = (known(service)?, request(&message?)?);
    if request.domain.is_empty() {
        return Ok(unknown());
    }
    let reported = service.report(&request, Some(within));
    reported.await.map_err(|error| status(&error))?;
    Ok(RateLimitResponse {
        overall_code: WireCode::Ok.into(),
        ..RateLimitResponse::default()
    })
}

/// Reserves the amount in `message`.
pub(super) async fn reserve(
    service: Option<&Arc<RateLimitService>>,
    message: Result<Bytes, Status>,
    within: Duration,
) -> Result<ReserveResponse, Status> {
    let (service, request) = (known(service)?, reserve_request(&message?)?);
    if request.domain.is_empty() {
        return Ok(ReserveResponse {
            code: WireCode::Unknown.into(),
            reservation_id: String::new(),
        });
    }
    let reserved = service.reserve(ListenerKind::Grpc, request, Some(within));
    let reserved = reserved.await.map_err(|error| status(&error))?;
    let ReserveResult {
        code: answer,
        reservation_id,
    } = reserved;
    Ok(ReserveResponse {
        code: code(answer),
        reservation_id,
    })
}

/// Settles the reservation in `message`.
pub(super) async fn commit(
    service: Option<&Arc<RateLimitService>>,
    message: Result<Bytes, Status>,
    within: Duration,
) -> Result<CommitResponse, Status> {
    let (service, request) = (known(service)?, commit_request(&message?)?);
    if request.domain.is_empty() {
        return Ok(CommitResponse {
            reservation_released: false,
        });
    }
    let committed = service.commit(request, Some(within));
    let reservation_released = committed.await.map_err(|error| status(&error))?;
    Ok(CommitResponse {
        reservation_released,
    })
}

fn known<S>(service: Option<&S>) -> Result<&S, Status> {
    service.ok_or_else(|| status(&RlsError::NoConfiguration))
}

/// The response to a request without a domain. Limitador sends the same response to a request
/// without a domain.
fn unknown() -> RateLimitResponse {
    RateLimitResponse {
        overall_code: WireCode::Unknown.into(),
        ..RateLimitResponse::default()
    }
}

fn reserve_request(message: &[u8]) -> Result<ReserveRequest, Status> {
    let mut request = ReserveRequest::default();
    let mut ttl = None;
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => request.domain = value.text()?.to_owned(),
            2 => add_descriptor(&mut request.descriptors, value)?,
            3 => request.amount = value.number(),
            4 => ttl = Some(duration(value.bytes(), ttl)?),
            _ => {}
        }
    }
    request.ttl = ttl
        .map(|(seconds, nanos)| span(seconds, nanos))
        .transpose()?;
    Ok(request)
}

fn commit_request(message: &[u8]) -> Result<CommitRequest, MalformedMessage> {
    let mut request = CommitRequest::default();
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => request.domain = value.text()?.to_owned(),
            2 => add_descriptor(&mut request.descriptors, value)?,
            3 => request.reservation_id = value.text()?.to_owned(),
            4 => request.actual_amount = value.number(),
            _ => {}
        }
    }
    Ok(request)
}

/// Decodes a duration as seconds and nanoseconds. If the message occurs several times, later fields
/// win.
fn duration(message: &[u8], before: Option<(i64, i32)>) -> Result<(i64, i32), MalformedMessage> {
    let (mut seconds, mut nanos) = before.unwrap_or_default();
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => seconds = value.number().cast_signed(),
            2 => nanos = value.number_32().cast_signed(),
            _ => {}
        }
    }
    Ok((seconds, nanos))
}

/// Converts a duration to a span, rounded down to microseconds.
fn span(seconds: i64, nanos: i32) -> Result<Span, Status> {
    let (Ok(seconds), Ok(nanos)) = (u64::try_from(seconds), u32::try_from(nanos)) else {
        return Err(Status::invalid_argument(
            "ttl: is negative; leave it out for the longest time, 60 s",
        ));
    };
    let micros = seconds.saturating_mul(1_000_000);
    Ok(Span::from_micros(
        micros.saturating_add(u64::from(nanos / 1_000)),
    ))
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};
    use prost::Message as _;

    use super::{
        super::proto::{
            envoy::extensions::common::ratelimit::v3::{
                RateLimitDescriptor, rate_limit_descriptor::Entry,
            },
            kuadrant::service::ratelimit::v1 as wire,
        },
        *,
    };

    fn descriptors() -> impl Strategy<Value = Vec<RateLimitDescriptor>> {
        let entry = (".{0,5}", ".{0,5}").prop_map(|(key, value)| Entry { key, value });
        let descriptor = vec(entry, 0..3).prop_map(|entries| RateLimitDescriptor {
            entries,
            ..RateLimitDescriptor::default()
        });
        vec(descriptor, 0..3)
    }

    proptest! {
        /// Messages encoded by prost are decoded to the same values.
        #[test]
        fn requests_of_prost_are_decoded(
            domain in ".{0,9}",
            descriptors in descriptors(),
            number in any::<u64>(),
            id in ".{0,9}",
            seconds in 0..1_000_000_i64,
            nanos in 0..1_000_000_000_i32,
        ) {
            let reserve = wire::ReserveRequest {
                domain: domain.clone(),
                descriptors: descriptors.clone(),
                amount: number,
                ttl: Some(prost_types::Duration { seconds, nanos }),
            };
            let decoded = reserve_request(&reserve.encode_to_vec()).unwrap();
            let micros = u64::try_from(seconds).unwrap() * 1_000_000
                + u64::try_from(nanos).unwrap() / 1_000;
            prop_assert_eq!(&decoded.domain, &domain);
            prop_assert_eq!(decoded.descriptors.len(), descriptors.len());
            let ttl = Some(Span::from_micros(micros));
            prop_assert_eq!((decoded.amount, decoded.ttl), (number, ttl));
            let commit = wire::CommitRequest {
                domain,
                descriptors,
                reservation_id: id.clone(),
                actual_amount: number,
            };
            let decoded = commit_request(&commit.encode_to_vec()).unwrap();
            prop_assert_eq!((decoded.reservation_id, decoded.actual_amount), (id, number));
        }

        /// Decoding never panics, whatever the bytes are.
        #[test]
        fn any_bytes_are_decoded_or_rejected(octets in vec(any::<u8>(), 0..64)) {
            let _ = reserve_request(&octets);
            let _ = commit_request(&octets);
        }
    }

    #[test]
    fn a_negative_duration_is_rejected() {
        for (seconds, nanos) in [(-1, 0), (0, -1), (i64::MIN, i32::MIN)] {
            let error = span(seconds, nanos).unwrap_err();
            assert!(error.message().starts_with("ttl: "), "{error}");
        }
        assert!(span(i64::MAX, i32::MAX).is_ok());
    }

    #[test]
    fn only_paths_of_the_service_are_methods() {
        let path = |method| format!("/{}/{method}", super::super::KUADRANT);
        assert_eq!(
            KuadrantMethod::of(&path("Commit")),
            Some(KuadrantMethod::Commit)
        );
        for other in [path("commit"), path("Commit/"), path(""), "/Commit".into()] {
            assert_eq!(KuadrantMethod::of(&other), None, "{other}");
        }
    }
}
