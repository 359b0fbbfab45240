//! `RateLimitService`: decodes requests and encodes responses.
//!
//! Requests are decoded by hand, for the reason given in `fields.rs`. Responses are encoded with
//! `prost`.

use std::time::Duration;

use prost_types::{ListValue, Struct, Value as WireValue, value::Kind};
use tidegate_core::Span;
use tidegate_limiter::metrics::ListenerKind;
use tonic::Status;

use super::{
    fields::{FieldValue, MalformedMessage, MessageFields},
    proto::envoy::{
        config::core::v3::HeaderValue,
        service::ratelimit::v3::{
            RateLimitResponse,
            rate_limit_response::{
                Code as WireCode, DescriptorStatus as WireStatus, RateLimit, rate_limit,
            },
        },
    },
};
use crate::{
    Code, CurrentLimit, Descriptor, DescriptorStatus, LimitOverride, MAX_DESCRIPTOR_ENTRIES,
    MAX_DESCRIPTORS, Metadata, RateLimitAnswer, RateLimitRequest, RateLimitService, ResponseHeader,
    RlsError, Unit,
};

/// The units by their protobuf enum values.
const UNITS: [(rate_limit::Unit, Unit); 8] = [
    (rate_limit::Unit::Unknown, Unit::Unknown),
    (rate_limit::Unit::Second, Unit::Second),
    (rate_limit::Unit::Minute, Unit::Minute),
    (rate_limit::Unit::Hour, Unit::Hour),
    (rate_limit::Unit::Day, Unit::Day),
    (rate_limit::Unit::Month, Unit::Month),
    (rate_limit::Unit::Year, Unit::Year),
    (rate_limit::Unit::Week, Unit::Week),
];

/// Decides the request in `message`. Store queries may take at most the time `within`.
pub(super) async fn decide(
    service: Option<&RateLimitService>,
    message: &[u8],
    within: Duration,
) -> Result<RateLimitResponse, Status> {
    let service = service.ok_or_else(|| status(&RlsError::NoConfiguration))?;
    let request = request(message)?;
    let answer = service
        .should_rate_limit_on(ListenerKind::Grpc, &request, Some(within))
        .await;
    answer.map(written).map_err(|error| status(&error))
}

pub(super) fn status(error: &RlsError) -> Status {
    let message = error.to_string();
    match error {
        // envoyproxy/ratelimit uses the same status code.
        RlsError::EmptyDomain | RlsError::EmptyDescriptors | RlsError::NoConfiguration => {
            Status::unknown(message)
        }
        // For a store failure, envoyproxy/ratelimit returns UNKNOWN, so its callers cannot
        // distinguish a store failure from a bad request. Tidegate therefore returns UNAVAILABLE.
        RlsError::Store | RlsError::Moved | RlsError::TooManyReservations(_) => {
            Status::unavailable(message)
        }
        RlsError::ReservationsOff => Status::unimplemented(message),
        RlsError::Invalid { .. } => Status::invalid_argument(message),
    }
}

/// Decodes a request. Truncates each list to one element more than its maximum length, so that a
/// small message cannot become a large request. The service then rejects the truncated list as too
/// long.
pub(super) fn request(message: &[u8]) -> Result<RateLimitRequest, MalformedMessage> {
    let mut request = RateLimitRequest::default();
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => request.domain = value.text()?.to_owned(),
            2 => add_descriptor(&mut request.descriptors, value)?,
            3 => request.hits_addend = value.number_32(),
            _ => {}
        }
    }
    Ok(request)
}

/// Adds an element to a list of descriptors. The list keeps one element more than its maximum
/// length, which shows that the list is too long.
pub(super) fn add_descriptor(
    descriptors: &mut Vec<Descriptor>,
    value: FieldValue<'_>,
) -> Result<(), MalformedMessage> {
    if descriptors.len() <= MAX_DESCRIPTORS {
        descriptors.push(descriptor(value.bytes())?);
    }
    Ok(())
}

fn descriptor(message: &[u8]) -> Result<Descriptor, MalformedMessage> {
    let mut descriptor = Descriptor::default();
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 if descriptor.entries.len() <= MAX_DESCRIPTOR_ENTRIES => {
                descriptor.entries.push(entry(value.bytes())?);
            }
            2 => descriptor.limit = Some(limit(value.bytes(), descriptor.limit)?),
            3 => descriptor.hits_addend = Some(hits(value.bytes(), descriptor.hits_addend)?),
            4 => descriptor.is_negative_hits = value.number() != 0,
            _ => {}
        }
    }
    Ok(descriptor)
}

fn entry(message: &[u8]) -> Result<(String, String), MalformedMessage> {
    let (mut key, mut value) = ("", "");
    let mut fields = MessageFields::of(message);
    while let Some((number, field)) = fields.next()? {
        match number {
            1 => key = field.text()?,
            2 => value = field.text()?,
            _ => {}
        }
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Decodes a limit. If the field occurs several times, the occurrences are merged as in protobuf:
/// later fields win.
fn limit(message: &[u8], before: Option<LimitOverride>) -> Result<LimitOverride, MalformedMessage> {
    let mut limit = before.unwrap_or(LimitOverride {
        requests_per_unit: 0,
        unit: Unit::Unknown,
    });
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => limit.requests_per_unit = value.number_32(),
            2 => limit.unit = unit(value.number_32()),
            _ => {}
        }
    }
    Ok(limit)
}

fn hits(message: &[u8], before: Option<u64>) -> Result<u64, MalformedMessage> {
    let mut hits = before.unwrap_or_default();
    let mut fields = MessageFields::of(message);
    while let Some((number, value)) = fields.next()? {
        if number == 1 {
            hits = value.number();
        }
    }
    Ok(hits)
}

fn unit(number: u32) -> Unit {
    let wire = i32::try_from(number).unwrap_or(0);
    let known = UNITS.iter().find(|(unit, _)| i32::from(*unit) == wire);
    known.map_or(Unit::Unknown, |(_, unit)| *unit)
}

pub(super) fn written(answer: RateLimitAnswer) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(answer.overall_code),
        statuses: answer.statuses.into_iter().map(written_status).collect(),
        response_headers_to_add: answer.response_headers.into_iter().map(header).collect(),
        dynamic_metadata: answer.dynamic_metadata.as_ref().map(structure),
        ..RateLimitResponse::default()
    }
}

fn written_status(status: DescriptorStatus) -> WireStatus {
    WireStatus {
        code: code(status.code),
        current_limit: status.current_limit.map(current_limit),
        limit_remaining: status.limit_remaining,
        duration_until_reset: status.duration_until_reset.map(duration),
        quota_specifier: None,
    }
}

pub(super) fn code(code: Code) -> i32 {
    match code {
        Code::Ok => WireCode::Ok,
        Code::OverLimit => WireCode::OverLimit,
    }
    .into()
}

fn current_limit(limit: CurrentLimit) -> RateLimit {
    let unit = UNITS.iter().find(|(_, unit)| *unit == limit.unit);
    RateLimit {
        requests_per_unit: limit.requests_per_unit,
        unit: unit.map_or(0, |(wire, _)| (*wire).into()),
        name: limit.name.map(|name| name.to_string()).unwrap_or_default(),
    }
}

fn duration(span: Span) -> prost_types::Duration {
    // A span is at most 585,000 years, which fits in a protobuf duration.
    prost_types::Duration {
        seconds: i64::try_from(span.as_secs_ceil()).unwrap_or(i64::MAX),
        nanos: 0,
    }
}

fn header(header: ResponseHeader) -> HeaderValue {
    HeaderValue {
        key: header.name.to_string(),
        value: header.value,
        raw_value: Vec::new(),
    }
}

/// Encodes dynamic metadata, which must be a map. Any other value becomes a structure without
/// fields.
fn structure(metadata: &Metadata) -> Struct {
    let Metadata::Map(members) = metadata else {
        return Struct::default();
    };
    let fields = members
        .iter()
        .map(|(name, value)| (name.to_string(), free_form(value)));
    Struct {
        fields: fields.collect(),
    }
}

fn free_form(metadata: &Metadata) -> WireValue {
    let kind = match metadata {
        Metadata::Null => Kind::NullValue(0),
        Metadata::Truth(truth) => Kind::BoolValue(*truth),
        Metadata::Number(number) => Kind::NumberValue(*number),
        Metadata::Text(text) => Kind::StringValue(text.to_string()),
        Metadata::List(items) => Kind::ListValue(ListValue {
            values: items.iter().map(free_form).collect(),
        }),
        Metadata::Map(_) => Kind::StructValue(structure(metadata)),
    };
    WireValue { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};
    use prost::Message as _;

    use super::{
        super::proto::envoy::{
            extensions::common::ratelimit::v3::{
                RateLimitDescriptor,
                rate_limit_descriptor::{Entry, RateLimitOverride},
            },
            service::ratelimit::v3::RateLimitRequest as WireRequest,
        },
        *,
    };

    fn wire_descriptor() -> impl Strategy<Value = RateLimitDescriptor> {
        let entry = (".{0,9}", ".{0,9}").prop_map(|(key, value)| Entry { key, value });
        let limit =
            (any::<u32>(), 0..9_i32).prop_map(|(requests_per_unit, unit)| RateLimitOverride {
                requests_per_unit,
                unit,
            });
        (
            vec(entry, 0..5),
            option::of(limit),
            option::of(any::<u64>()),
            any::<bool>(),
        )
            .prop_map(|(entries, limit, hits_addend, is_negative_hits)| {
                RateLimitDescriptor {
                    entries,
                    limit,
                    hits_addend,
                    is_negative_hits,
                }
            })
    }

    fn expected(wire: &RateLimitDescriptor) -> Descriptor {
        let entries = wire.entries.iter();
        let limit = wire.limit.map(|limit| LimitOverride {
            requests_per_unit: limit.requests_per_unit,
            unit: rate_limit::Unit::try_from(limit.unit).map_or(Unit::Unknown, |unit| {
                Unit::parse(unit.as_str_name()).unwrap()
            }),
        });
        Descriptor {
            entries: entries
                .map(|entry| (entry.key.clone(), entry.value.clone()))
                .collect(),
            limit,
            hits_addend: wire.hits_addend,
            is_negative_hits: wire.is_negative_hits,
        }
    }

    proptest! {
        #[test]
        fn messages_written_by_prost_are_read(domain in ".{0,9}", descriptors in vec(wire_descriptor(), 0..6), hits_addend: u32) {
            let wire = WireRequest {
                domain: domain.clone(),
                descriptors: descriptors.clone(),
                hits_addend,
            };
            let read = request(&wire.encode_to_vec()).unwrap();
            let descriptors = descriptors.iter().map(expected).collect();
            prop_assert_eq!(read, RateLimitRequest { domain, descriptors, hits_addend });
        }

        #[test]
        fn a_truncated_or_changed_message_is_read_or_rejected(
            descriptors in vec(wire_descriptor(), 0..6),
            at: prop::sample::Index,
            byte: u8,
            cut: bool,
        ) {
            let wire = WireRequest { domain: "shop".into(), descriptors, hits_addend: 1 };
            let mut bytes = wire.encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(if cut { at } else { bytes.len() });
            if let Ok(read) = request(&bytes) {
                prop_assert!(read.descriptors.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn a_request_of_envoy_is_read() {
        let bytes = b"\x0a\x04shop\x12\x1d\x0a\x1b\x0a\x0eremote_address\x12\x09127.0.0.1\x12\x18\x0a\x16\x0a\x0bgeneric_key\x12\x07catalog";
        let read = request(bytes).unwrap();
        let entry = |key: &str, value: &str| vec![(key.to_owned(), value.to_owned())];
        assert_eq!(read.domain, "shop");
        assert_eq!(
            read.descriptors[0].entries,
            entry("remote_address", "127.0.0.1")
        );
        assert_eq!(read.descriptors[1].entries, entry("generic_key", "catalog"));
    }

    #[test]
    fn a_repeated_message_field_is_merged() {
        let bytes = b"\x12\x06\x12\x02\x08\x05\x12\x00\x12\x08\x12\x02\x08\x05\x12\x02\x10\x02";
        let read = request(bytes).unwrap();
        let limit = read.descriptors[1].limit.unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit), (5, Unit::Minute));
    }

    #[test]
    fn a_small_message_never_becomes_a_large_request() {
        let bytes = b"\x12\x00".repeat(500_000);
        assert_eq!(
            request(&bytes).unwrap().descriptors.len(),
            MAX_DESCRIPTORS + 1
        );
        let many = b"\x0a\x00".repeat(1_000);
        assert_eq!(
            descriptor(&many).unwrap().entries.len(),
            MAX_DESCRIPTOR_ENTRIES + 1
        );
    }
}
