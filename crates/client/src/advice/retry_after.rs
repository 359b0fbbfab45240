//! The headers `Retry-After`, in seconds or as a date, and `retry-after-ms`.

use std::time::UNIX_EPOCH;

use http::{HeaderMap, header};
use tidegate_core::{Span, Timestamp};

use super::{Wait, join_lines, seconds};

const RETRY_AFTER_MS: &str = "retry-after-ms";

/// Returns the time at which the server sent the response, from the header `Date`.
pub(super) fn date(headers: &HeaderMap) -> Option<Timestamp> {
    http_date(headers.get(header::DATE)?.to_str().ok()?)
}

/// Returns the wait. If both headers are present, the longer wait counts, except that the
/// milliseconds count if the seconds are just the milliseconds rounded up. A value of zero is
/// treated as absent.
pub(super) fn wait(headers: &HeaderMap, server_now: Timestamp) -> Option<Wait> {
    let whole = longest(headers, header::RETRY_AFTER.as_str(), |line| {
        // Some servers send decimals, although RFC 9110 does not allow decimals.
        seconds(line).or_else(|| Some(http_date(line)?.since(server_now)))
    });
    let fine = longest(headers, RETRY_AFTER_MS, |line| {
        seconds(line).map(|span| Span::from_micros(span.as_micros().div_ceil(1_000)))
    });
    let span = match (whole, fine) {
        (Some(whole), Some(fine)) if whole.as_secs_ceil() == fine.as_secs_ceil() => fine,
        (Some(whole), Some(fine)) => whole.max(fine),
        (one, None) => one?,
        (None, one) => one?,
    };
    (span > Span::ZERO).then_some(Wait::After(span))
}

/// Returns the longest value of a header. The header should occur only once, but may occur several
/// times.
fn longest(headers: &HeaderMap, name: &str, parse: impl Fn(&str) -> Option<Span>) -> Option<Span> {
    // Check that the header is not too long, and that all of its lines are printable ASCII.
    join_lines(headers, name)?;
    let lines = headers.get_all(name).iter();
    lines
        .filter_map(|line| parse(line.to_str().ok()?.trim()))
        .max()
}

/// Parses a date in one of the three formats of RFC 9110. Dates before 1970 are invalid.
fn http_date(text: &str) -> Option<Timestamp> {
    let since_epoch = httpdate::parse_http_date(text)
        .ok()?
        .duration_since(UNIX_EPOCH)
        .ok()?;
    let micros = u64::try_from(since_epoch.as_micros()).ok()?;
    Some(Timestamp::from_micros(micros))
}
