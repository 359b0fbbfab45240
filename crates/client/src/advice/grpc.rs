//! Retry advice from a gRPC server: the status, the pushback header, and the details.
//!
//! Only the headers of the response are read. If the server refuses a call before it sends any
//! message, its response consists only of headers (`Trailers-Only`).

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

/// The maximum size of decoded details, in bytes.
const MAX_DETAILS_BYTES: usize = 16 * 1024;

/// A decoder that also accepts Base64 without padding, because some servers omit the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The message `google.rpc.Status`, reduced to its details.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// The message `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Duration>,
}

/// Returns the gRPC status of a `Trailers-Only` response; `None` for any other response.
pub(crate) fn status(headers: &HeaderMap) -> Option<u32> {
    headers.get(STATUS)?.to_str().ok()?.parse().ok()
}

/// Returns the wait time in the pushback header. Without a pushback header, returns the delay in
/// the details. A negative or malformed pushback means that the client must never retry (gRFC A6).
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
