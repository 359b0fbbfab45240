//! The `X-RateLimit-*` fields, which no two services mean alike.

use http::HeaderMap;
use tidegate_core::{Span, Timestamp};

use super::{Standing, field, seconds};

/// A reset above this is an instant and no wait. A wait of 10^9 seconds is 31 years, and the instant of that number was in 2001.
const EPOCH_SECS: u64 = 1_000_000_000;
/// An instant above this is in milliseconds: as seconds it would be in the year 5138.
const EPOCH_MILLIS: u64 = 100_000_000_000;

/// What is left, until when; `server_now` is what instants are measured from.
pub(super) fn standing(headers: &HeaderMap, server_now: Timestamp) -> Option<Standing> {
    let remaining = seconds(field(headers, "x-ratelimit-remaining")?.trim())?;
    let after = field(headers, "x-ratelimit-reset-after").and_then(|text| seconds(text.trim()));
    let reset_after = match after {
        Some(span) => span,
        None => reset(
            seconds(field(headers, "x-ratelimit-reset")?.trim())?,
            server_now,
        ),
    };
    (reset_after > Span::ZERO).then_some(Standing {
        // Whole units: a part of one admits nobody.
        remaining: remaining.as_micros() / 1_000_000,
        reset_after,
    })
}

/// Seconds from now, seconds since the epoch, or milliseconds since it, by their size.
fn reset(number: Span, server_now: Timestamp) -> Span {
    let secs = number.as_micros() / 1_000_000;
    if secs <= EPOCH_SECS {
        number
    } else if secs <= EPOCH_MILLIS {
        Timestamp::from_micros(number.as_micros()).since(server_now)
    } else {
        Timestamp::from_micros(number.as_micros() / 1_000).since(server_now)
    }
}
