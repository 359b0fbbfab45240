//! The advice that a server gives about its limits: the time to retry, the number of remaining
//! requests, and the time of the reset.
//!
//! Servers use a dozen formats, in responses of any status. This module converts all formats to two
//! values: a [`Wait`] for the request that was sent, and a [`QuotaStatus`] for later requests. A
//! malformed header is ignored, as the drafts require. The parsed input is bounded in size, and
//! parsing never panics.
//!
//! | source | headers |
//! | --- | --- |
//! | HTTP | `Retry-After` in seconds or as a date (relative to `Date`); `retry-after-ms` |
//! | RateLimit drafts 00 to 06 | `RateLimit-Limit`, `-Remaining`, `-Reset` |
//! | draft 07 | `RateLimit: limit=100, remaining=50, reset=5` |
//! | drafts 08 to 11 | `RateLimit: "day";r=50;t=30`, `RateLimit-Policy`; also `a` and `w` |
//! | others | `X-RateLimit-Remaining`, `-Reset` (seconds, or an instant), `-Reset-After` |
//! | OpenAI | `x-ratelimit-remaining-requests`, `-tokens`; `x-ratelimit-reset-…` (`6m0s`) |
//! | Anthropic | `anthropic-ratelimit-…-remaining`, `-reset` (RFC 3339) |
//! | gRPC | `grpc-retry-pushback-ms`; `RetryInfo` in `grpc-status-details-bin` |

use http::{HeaderMap, StatusCode, header};
use tidegate_core::{Span, Timestamp};

mod grpc;
mod legacy;
mod providers;
mod rate_limit;
mod retry_after;
mod structured;

/// The maximum number of lines read from one header.
const MAX_LINES: usize = 16;

/// The time to wait before the request is sent again, according to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Wait at least this long. The span is never zero.
    After(Span),
    /// Do not retry.
    Never,
}

/// The state of a limit on the server, as reported in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaStatus {
    /// The number of further requests that the limit admits.
    pub remaining: u64,
    /// The time until the limit admits more requests, which is never zero.
    pub reset_after: Span,
}

/// The advice in a response about the server's limits. Both fields are `None` if the response
/// contains no advice that can be parsed.
///
/// # Examples
///
/// ```
/// use http::{HeaderMap, StatusCode};
/// use tidegate_client::{Advice, QuotaStatus, Span, Timestamp, Wait};
///
/// let mut headers = HeaderMap::new();
/// headers.insert("ratelimit", "\"second\";r=0;t=1, \"day\";r=700;t=3600".parse()?);
/// headers.insert("retry-after", "2".parse()?);
/// let now = Timestamp::from_micros(1);
/// let advice = Advice::from_response(StatusCode::TOO_MANY_REQUESTS, &headers, now);
/// assert_eq!(advice.wait, Some(Wait::After(Span::from_secs(2))));
/// assert_eq!(advice.quota, Some(QuotaStatus { remaining: 0, reset_after: Span::from_secs(1) }));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// The time to wait before a refused or failed request is sent again.
    pub wait: Option<Wait>,
    /// The state of the limit. If the response reports several limits, the state is that of the
    /// tightest limit.
    pub quota: Option<QuotaStatus>,
}

impl Advice {
    /// Parses the advice in a response that arrived at `now`. `now` is the client's wall clock
    /// time. `now` is used only if the response contains an instant but no header `Date`.
    #[must_use]
    pub fn from_response(status: StatusCode, headers: &HeaderMap, now: Timestamp) -> Self {
        let server_now = retry_after::date(headers).unwrap_or(now);
        // Ignore the limits in a cached response, because they may have changed since the response
        // was stored.
        let is_cached = join_lines(headers, header::AGE.as_str())
            .is_some_and(|age| age.trim().parse::<u64>() != Ok(0));
        let quota = if is_cached {
            None
        } else {
            rate_limit::quota(headers)
                .or_else(|| legacy::quota(headers, server_now))
                .or_else(|| providers::quota(headers, server_now))
        };
        let server_wait = grpc::wait(headers).or_else(|| retry_after::wait(headers, server_now));
        let wait = server_wait.or_else(|| {
            // An exhausted quota is a reason to wait only if this request was refused. If this
            // request was not refused, the quota concerns only later requests.
            let exhausted = quota.filter(|quota| quota.remaining == 0)?;
            is_refusal(status, headers).then_some(Wait::After(exhausted.reset_after))
        });
        debug_assert!(wait != Some(Wait::After(Span::ZERO)));
        debug_assert!(quota.is_none_or(|quota| quota.reset_after > Span::ZERO));
        Self { wait, quota }
    }
}

/// Returns whether the server refused the request, with the status 429, 503, or a gRPC equivalent.
pub(crate) fn is_refusal(status: StatusCode, headers: &HeaderMap) -> bool {
    const RESOURCE_EXHAUSTED: u32 = 8;
    const UNAVAILABLE: u32 = 14;
    match grpc::status(headers) {
        Some(code) => matches!(code, RESOURCE_EXHAUSTED | UNAVAILABLE),
        None => matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        ),
    }
}

pub(crate) use grpc::status as grpc_status;

/// Returns the lines of a header, joined with commas. Returns `None` if the header is absent, too
/// long, or not printable ASCII.
fn join_lines(headers: &HeaderMap, name: &str) -> Option<String> {
    let mut joined = String::new();
    for (number, line) in headers.get_all(name).iter().enumerate() {
        let line = line.to_str().ok()?;
        if number == MAX_LINES || joined.len() + line.len() + 2 > structured::MAX_BYTES {
            return None;
        }
        if number > 0 {
            joined.push_str(", ");
        }
        joined.push_str(line);
    }
    (!joined.is_empty()).then_some(joined)
}

/// Parses seconds, such as `5` or `0.25`, with at most 18 decimals. Rounds up to microseconds.
fn seconds(text: &str) -> Option<Span> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || whole.len() > 15 || part.len() > 18 {
        return None;
    }
    let micros = whole.parse::<u64>().ok()?.saturating_mul(1_000_000);
    let scale = 10_u64.pow(u32::try_from(part.len()).ok()?);
    let part = u128::from(part.parse::<u64>().ok()?) * 1_000_000;
    let part = u64::try_from(part.div_ceil(u128::from(scale))).ok()?;
    // Saturate, because a wait that is too long to represent must not be ignored.
    Some(Span::from_micros(micros.saturating_add(part)))
}

#[cfg(test)]
mod tests;
