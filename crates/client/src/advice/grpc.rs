//! What a gRPC server says when it refuses: a status, a push-back, and details.
//!
//! All of it is read from headers: a call that is refused before anything was answered has no other part
//! (`Trailers-Only`).

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::HeaderMap;
use prost::Message;
use prost_types::{Any, Duration};
use tidegate_core::Span;

use super::Wait;

const PUSHBACK: &str = "grpc-retry-pushback-ms";
const STATUS: &str = "grpc-status";
const DETAILS: &str = "grpc-status-details-bin";
const RETRY_INFO: &str = "google.rpc.RetryInfo";

/// The longest details that are decoded.
const MAX_DETAILS_BYTES: usize = 16 * 1024;

/// Servers may leave the padding away.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// `google.rpc.Status`, of which only the details are asked for.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Duration>,
}

/// The status of a call that was answered with nothing else; `None` for any other answer.
pub(crate) fn status(headers: &HeaderMap) -> Option<u32> {
    headers.get(STATUS)?.to_str().ok()?.parse().ok()
}

/// The push-back, whose negative or unreadable value is never (gRFC A6), else the delay of the details.
pub(super) fn wait(headers: &HeaderMap) -> Option<Wait> {
    if let Some(pushback) = headers.get(PUSHBACK) {
        let millis = pushback
            .to_str()
            .ok()
            .and_then(|text| text.parse::<u32>().ok());
        return match millis {
            Some(0) => None,
            Some(millis) => Some(Wait::After(Span::from_millis(u64::from(millis)))),
            None => Some(Wait::Never),
        };
    }
    retry_delay(headers).map(Wait::After)
}

fn retry_delay(headers: &HeaderMap) -> Option<Span> {
    let encoded = headers.get(DETAILS)?.as_bytes();
    if encoded.len() > MAX_DETAILS_BYTES {
        return None;
    }
    let status = Status::decode(&*BASE64.decode(encoded).ok()?).ok()?;
    let info = status
        .details
        .iter()
        .find(|any| any.type_url.rsplit('/').next() == Some(RETRY_INFO))?;
    let delay = RetryInfo::decode(&*info.value).ok()?.retry_delay?;
    let micros = u64::try_from(delay.nanos).ok()?.div_ceil(1_000);
    let secs = u64::try_from(delay.seconds).ok()?;
    let span = Span::from_micros(secs.checked_mul(1_000_000)?.checked_add(micros)?);
    (span > Span::ZERO).then_some(span)
}
