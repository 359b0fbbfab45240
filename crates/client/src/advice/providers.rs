//! The rate limit headers of language model APIs, which limit requests and tokens.
//!
//! OpenAI sends `x-ratelimit-remaining-requests` with `x-ratelimit-reset-requests`, a duration such
//! as `6m0s`. Anthropic sends `anthropic-ratelimit-requests-remaining` with
//! `anthropic-ratelimit-requests-reset`, an RFC 3339 date. Both providers send similar headers for
//! tokens.

use http::HeaderMap;
use tidegate_core::{Span, Timestamp};

use super::{QuotaStatus, join_lines, rate_limit::tightest};

/// The names of Anthropic's limits in the headers.
const ANTHROPIC: [&str; 4] = ["requests", "tokens", "input-tokens", "output-tokens"];

/// The names of OpenAI's limits in the headers.
const OPENAI: [&str; 2] = ["requests", "tokens"];

/// The units in OpenAI's durations, with their lengths in nanoseconds.
const UNITS: [(&str, u128); 7] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60 * 1_000_000_000),
    ("h", 3_600 * 1_000_000_000),
];

/// Returns the tightest limit that the headers report. `server_now` is the time from which dates
/// are measured.
pub(super) fn quota(headers: &HeaderMap, server_now: Timestamp) -> Option<QuotaStatus> {
    let openai = OPENAI.iter().filter_map(|limit| {
        let remaining = join_lines(headers, &format!("x-ratelimit-remaining-{limit}"))?;
        let reset = join_lines(headers, &format!("x-ratelimit-reset-{limit}"))?;
        usable(limit, &remaining, duration(reset.trim())?)
    });
    let anthropic = ANTHROPIC.iter().filter_map(|limit| {
        let remaining = join_lines(headers, &format!("anthropic-ratelimit-{limit}-remaining"))?;
        let reset = join_lines(headers, &format!("anthropic-ratelimit-{limit}-reset"))?;
        usable(limit, &remaining, date(reset.trim())?.since(server_now))
    });
    tightest(openai.chain(anthropic))
}

/// Returns the status of a limit; `None` if the limit is on tokens and some tokens remain, because
/// a number of tokens does not say how many requests may be sent. If no tokens remain, requests
/// have to wait.
fn usable(limit: &str, remaining: &str, reset_after: Span) -> Option<QuotaStatus> {
    let remaining: u64 = remaining.trim().parse().ok()?;
    let is_usable = limit == "requests" || remaining == 0;
    (is_usable && reset_after > Span::ZERO).then_some(QuotaStatus {
        remaining,
        reset_after,
    })
}

/// Parses a duration such as `6m0s`, `1h30m0.5s` or `12ms`. Rounds up to microseconds.
fn duration(text: &str) -> Option<Span> {
    let mut rest = text;
    let mut nanos: u128 = 0;
    while !rest.is_empty() || text.is_empty() {
        let is_number = |character: char| character.is_ascii_digit() || character == '.';
        let (number, after) = rest.split_at(rest.find(|c: char| !is_number(c))?);
        let end = after.find(is_number).unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        nanos = nanos.checked_add(scaled(number, *scale)?)?;
        rest = after;
    }
    // Saturate, because a wait that is too long to represent must not be ignored.
    Some(Span::from_micros(
        u64::try_from(nanos.div_ceil(1_000)).unwrap_or(u64::MAX),
    ))
}

/// Returns the decimal `number` times `scale`, rounded up.
fn scaled(number: &str, scale: u128) -> Option<u128> {
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| {
        let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
        is_digits && (1..=15).contains(&text.len())
    };
    if !digits(whole) || !digits(part) {
        return None;
    }
    let denominator = 10_u128.checked_pow(u32::try_from(part.len()).ok()?)?;
    let part = part.parse::<u128>().ok()?.checked_mul(scale)?;
    let whole = whole.parse::<u128>().ok()?.checked_mul(scale)?;
    whole.checked_add(part.div_ceil(denominator))
}

/// Parses an RFC 3339 date.
fn date(text: &str) -> Option<Timestamp> {
    let date: jiff::Timestamp = text.parse().ok()?;
    let micros = u64::try_from(date.as_microsecond()).ok()?;
    Some(Timestamp::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_read_as_go_writes_it() {
        let micros = |text: &str| duration(text).map(Span::as_micros);
        for (text, expected) in [
            ("6m0s", 360_000_000),
            ("1s", 1_000_000),
            ("8.64s", 8_640_000),
            ("12ms", 12_000),
            ("1h2m3.5s", 3_723_500_000),
            ("1.0000001s", 1_000_001),
            ("999ns", 1),
            ("3\u{b5}s", 3),
            ("0s", 0),
            ("999999999999999h", u64::MAX),
        ] {
            assert_eq!(micros(text), Some(expected), "{text}");
        }
        for text in [
            "", "6", "s", "6m0", "-1s", "1 s", "1.s", ".5s", "1e3s", "1d", "6m,0s",
        ] {
            assert_eq!(micros(text), None, "{text}");
        }
    }
}
