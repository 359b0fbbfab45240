//! The `X-RateLimit-*` headers, whose meaning differs between services.

use http::HeaderMap;
use tidegate_core::{Span, Timestamp};

use super::{QuotaStatus, join_lines, seconds};

/// The boundary between durations and instants: a reset value above this number is an instant. As a
/// duration, 10^9 seconds would be 31 years. As an instant, 10^9 seconds would be in 2001.
const EPOCH_SECS: u64 = 1_000_000_000;
/// The boundary between seconds and milliseconds: a larger number is an instant in milliseconds. As
/// an instant in seconds, 10^11 would be in the year 5138.
const EPOCH_MILLIS: u64 = 100_000_000_000;

/// Parses the number of remaining requests and the time of the reset. `server_now` is the server's
/// current time. If the reset is an instant, it is compared with this time.
pub(super) fn quota(headers: &HeaderMap, server_now: Timestamp) -> Option<QuotaStatus> {
    let remaining = seconds(join_lines(headers, "x-ratelimit-remaining")?.trim())?;
    let after =
        join_lines(headers, "x-ratelimit-reset-after").and_then(|text| seconds(text.trim()));
    let reset_after = match after {
        Some(span) => span,
        None => interpret_reset(
            seconds(join_lines(headers, "x-ratelimit-reset")?.trim())?,
            server_now,
        ),
    };
    (reset_after > Span::ZERO).then_some(QuotaStatus {
        // Some services send a fraction of a request as `remaining`. Round down, because less than
        // one remaining request admits no request.
        remaining: remaining.as_micros() / 1_000_000,
        reset_after,
    })
}

/// Interprets a reset value by its size: as seconds from now, seconds since the epoch, or
/// milliseconds since the epoch.
fn interpret_reset(number: Span, server_now: Timestamp) -> Span {
    let secs = number.as_micros() / 1_000_000;
    if secs <= EPOCH_SECS {
        number
    } else if secs <= EPOCH_MILLIS {
        Timestamp::from_micros(number.as_micros()).since(server_now)
    } else {
        Timestamp::from_micros(number.as_micros() / 1_000).since(server_now)
    }
}
