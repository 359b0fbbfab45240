//! The `RateLimit` headers in the formats of all IETF drafts.

use http::HeaderMap;
use tidegate_core::Span;

use super::{
    QuotaStatus, join_lines,
    structured::{self, Member},
};

/// The longest accepted time until a reset, which is a century. A larger number is invalid or has a
/// unit other than seconds.
const MAX_RESET_SECS: u64 = 100 * 366 * 86_400;

/// Returns the tightest limit that the headers report.
pub(super) fn quota(headers: &HeaderMap) -> Option<QuotaStatus> {
    let Some(field) = join_lines(headers, "ratelimit") else {
        return from_three_headers(headers);
    };
    // The former format of the `RateLimit` header is a dictionary. A dictionary with values is not
    // a valid list, because in a list, `=` cannot follow a token.
    match structured::list(&field) {
        Some(members) => {
            let policies = join_lines(headers, "ratelimit-policy");
            let policies = policies.as_deref().and_then(structured::list);
            from_list(&members, &policies.unwrap_or_default())
        }
        None => from_dictionary(&structured::dictionary(&field)?),
    }
}

/// Parses the format of drafts 08 and later: `"day";r=50;t=30`.
fn from_list(members: &[Member<'_>], policies: &[Member<'_>]) -> Option<QuotaStatus> {
    let limits = members.iter().filter_map(|member| {
        let quota = from_member(member)?;
        // Ignore a limit on bytes unless no bytes remain, because a number of bytes does not say
        // how many requests may be sent. If no bytes remain, requests have to wait.
        (quota.remaining == 0 || counts_requests(member, policies)).then_some(quota)
    });
    tightest(limits)
}

/// Parses the parameters `r` and `t`. If `r` is missing, parses `a` (available) and `w` (effective
/// window), which are the names that the IETF working group may give these parameters.
fn from_member(member: &Member<'_>) -> Option<QuotaStatus> {
    let (remaining, reset) = match member.count("r") {
        Some(remaining) => (remaining, member.count("t")),
        None => (member.count("a")?, member.count("w")),
    };
    valid_quota(remaining, reset?)
}

/// Returns whether the policy of this member counts requests. A policy without a unit counts
/// requests.
fn counts_requests(member: &Member<'_>, policies: &[Member<'_>]) -> bool {
    let mut policies = policies.iter();
    let policy = policies.find(|policy| structured::is_same(&policy.value, &member.value));
    let unit = policy.and_then(|policy| structured::text(policy.parameter("qu")?));
    unit.is_none_or(|unit| matches!(unit, "request" | "requests"))
}

/// Parses the format of draft 07: `limit=100, remaining=50, reset=5`.
fn from_dictionary(members: &[Member<'_>]) -> Option<QuotaStatus> {
    let named = |name: &str| {
        // If a key occurs several times, the last value is used.
        let member = members.iter().rev().find(|member| member.key == name);
        structured::count(&member?.value)
    };
    valid_quota(named("remaining")?, named("reset")?)
}

/// Parses the three headers of drafts 00 to 06.
fn from_three_headers(headers: &HeaderMap) -> Option<QuotaStatus> {
    let number = |name: &str| join_lines(headers, name)?.trim().parse::<u64>().ok();
    valid_quota(number("ratelimit-remaining")?, number("ratelimit-reset")?)
}

/// Returns the quota if its reset is in the future, but at most [`MAX_RESET_SECS`] away.
fn valid_quota(remaining: u64, reset_secs: u64) -> Option<QuotaStatus> {
    (1..=MAX_RESET_SECS)
        .contains(&reset_secs)
        .then(|| QuotaStatus {
            remaining,
            reset_after: Span::from_secs(reset_secs),
        })
}

/// Returns the tightest limit. If any limits are exhausted, the tightest limit is the exhausted
/// limit with the latest reset. If no limit is exhausted, it is the limit that admits the fewest
/// requests per second until its reset.
pub(super) fn tightest(limits: impl Iterator<Item = QuotaStatus>) -> Option<QuotaStatus> {
    limits.reduce(|one, other| if is_tighter(other, one) { other } else { one })
}

fn is_tighter(one: QuotaStatus, other: QuotaStatus) -> bool {
    match (one.remaining, other.remaining) {
        (0, 0) => one.reset_after > other.reset_after,
        (0, _) => true,
        (_, 0) => false,
        // Compare one.r / one.t < other.r / other.t without division.
        (r, s) => {
            u128::from(r) * u128::from(other.reset_after.as_micros())
                < u128::from(s) * u128::from(one.reset_after.as_micros())
        }
    }
}
