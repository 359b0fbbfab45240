//! The `RateLimit` headers of all IETF drafts.

use http::HeaderMap;
use tidegate_core::Span;

use super::{
    QuotaStatus, join_lines,
    structured::{self, Bare, Member},
};

/// The longest reset that is accepted: a century. A larger number is invalid, or is not in seconds.
const MAX_RESET_SECS: u64 = 100 * 366 * 86_400;

/// Returns the tightest limit.
pub(super) fn quota(headers: &HeaderMap) -> Option<QuotaStatus> {
    match join_lines(headers, "ratelimit") {
        Some(text) => match structured::list(&text) {
            Some(members) => of_list(&members, &policies(headers)),
            None => of_dictionary(&structured::dictionary(&text)?),
        },
        None => of_triple(headers),
    }
}

/// Drafts 08 and later: `"day";r=50;t=30`.
fn of_list(members: &[Member], policies: &[Member]) -> Option<QuotaStatus> {
    let shown = members.iter().filter_map(|member| {
        let quota = item(member)?;
        // A number of remaining bytes cannot pace requests; if no bytes remain, it stops them.
        (quota.remaining == 0 || counts_requests(member, policies)).then_some(quota)
    });
    tightest(shown)
}

/// Parses `r` and `t`, or `a` (available) and `w` (effective window), their possible new names in
/// the working group.
fn item(member: &Member) -> Option<QuotaStatus> {
    let (remaining, reset) = match member.count("r") {
        Some(remaining) => (remaining, member.count("t")),
        None => (member.count("a")?, member.count("w")),
    };
    valid_quota(remaining, reset?)
}

fn counts_requests(member: &Member, policies: &[Member]) -> bool {
    let Some(policy) = policies.iter().find(|policy| policy.value == member.value) else {
        return true;
    };
    match policy.parameter("qu") {
        Some(Bare::Text(unit)) => matches!(unit.as_str(), "request" | "requests"),
        Some(_) | None => true,
    }
}

fn policies(headers: &HeaderMap) -> Vec<Member> {
    join_lines(headers, "ratelimit-policy")
        .and_then(|text| structured::list(&text))
        .unwrap_or_default()
}

/// Draft 07: `limit=100, remaining=50, reset=5`.
fn of_dictionary(members: &[Member]) -> Option<QuotaStatus> {
    let named = |name: &str| {
        let mut found = members.iter().rev().filter(|member| member.key == name);
        found.next()?.value.count()
    };
    valid_quota(named("remaining")?, named("reset")?)
}

/// Drafts 00 to 06: three headers.
fn of_triple(headers: &HeaderMap) -> Option<QuotaStatus> {
    let number = |name: &str| join_lines(headers, name)?.trim().parse::<u64>().ok();
    valid_quota(number("ratelimit-remaining")?, number("ratelimit-reset")?)
}

/// Returns the quota, if the reset is in the future and within [`MAX_RESET_SECS`].
fn valid_quota(remaining: u64, reset_secs: u64) -> Option<QuotaStatus> {
    (1..=MAX_RESET_SECS)
        .contains(&reset_secs)
        .then(|| QuotaStatus {
            remaining,
            reset_after: Span::from_secs(reset_secs),
        })
}

/// Returns the tightest limit: among exhausted limits the one with the latest reset, else the one
/// with the lowest remaining rate.
fn tightest(shown: impl Iterator<Item = QuotaStatus>) -> Option<QuotaStatus> {
    shown.reduce(|one, other| if is_tighter(other, one) { other } else { one })
}

fn is_tighter(one: QuotaStatus, other: QuotaStatus) -> bool {
    match (one.remaining, other.remaining) {
        (0, 0) => one.reset_after > other.reset_after,
        (0, _) => true,
        (_, 0) => false,
        // Compares one.r / one.t < other.r / other.t without division.
        (r, s) => {
            u128::from(r) * u128::from(other.reset_after.as_micros())
                < u128::from(s) * u128::from(one.reset_after.as_micros())
        }
    }
}
