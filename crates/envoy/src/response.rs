//! Builds the response: statuses, the overall code, headers and metadata.

use std::sync::Arc;

use tidegate_config::envoy::{HeaderNames, RlsSettings};
use tidegate_core::{Algorithm, Limit, Outcome, RetryAfter, Span, Timestamp, Window};

use super::{
    Code, CurrentLimit, Descriptor, DescriptorStatus, Metadata, RateLimitAnswer, RateLimitRequest,
    ResponseHeader,
    applied_limit::{AppliedLimit, DescriptorMatch},
};

pub(super) fn build(
    request: &RateLimitRequest,
    matches: &[DescriptorMatch<'_>],
    settings: &RlsSettings,
    now: Timestamp,
) -> RateLimitAnswer {
    let statuses: Vec<DescriptorStatus> =
        matches.iter().map(|matched| status(matched, now)).collect();
    let response_headers = settings.response_headers.as_ref().map(|names| {
        let leading = leading(matches, &statuses, settings);
        leading.map_or_else(Vec::new, |status| headers(status, names))
    });
    let dynamic_metadata = settings
        .dynamic_metadata
        .then(|| metadata(request, matches, &statuses));
    RateLimitAnswer {
        overall_code: overall(matches, &statuses, settings),
        statuses,
        response_headers: response_headers.unwrap_or_default(),
        dynamic_metadata,
    }
}

fn status(matched: &DescriptorMatch<'_>, now: Timestamp) -> DescriptorStatus {
    match matched {
        DescriptorMatch::NoLimit => DescriptorStatus::UNLIMITED,
        DescriptorMatch::Unlimited(_) => DescriptorStatus {
            limit_remaining: u32::MAX,
            ..DescriptorStatus::UNLIMITED
        },
        DescriptorMatch::Limited(applied) => limited_status(applied, now),
    }
}

fn limited_status(applied: &AppliedLimit<'_>, now: Timestamp) -> DescriptorStatus {
    let result = applied.result;
    let rule = applied.rule();
    let limit = applied.limits.limits.iter().nth(result.limit);
    let remaining = match result.outcome {
        Some(outcome) if !result.over => outcome.remaining,
        _ => 0,
    };
    let is_shadow = rule.is_some_and(|rule| rule.shadow);
    DescriptorStatus {
        code: if result.over && !is_shadow {
            Code::OverLimit
        } else {
            Code::Ok
        },
        current_limit: Some(CurrentLimit {
            requests_per_unit: limit.map_or(0, |limit| narrow(limit.quota())),
            unit: applied
                .limits
                .units
                .get(result.limit)
                .copied()
                .unwrap_or_default(),
            name: rule.and_then(|rule| rule.name.clone()),
        }),
        limit_remaining: narrow(remaining),
        duration_until_reset: limit.map(|limit| until_reset(limit, result.outcome.as_ref(), now)),
    }
}

/// Returns the time until the limit resets, rounded up to whole seconds. For a fixed window, this
/// is the time until the window ends. For other algorithms, the result is the retry time of a
/// denied request, or the time until the charges of an admitted request expire.
fn until_reset(limit: &Limit, outcome: Option<&Outcome>, now: Timestamp) -> Span {
    let reset_after = outcome.map_or(Span::ZERO, |outcome| outcome.reset_after);
    let span = match (limit.algorithm(), outcome) {
        // If the window has no hits, the outcome has no reset time, so compute the end of the
        // window from `now`.
        (Algorithm::FixedWindow { window, .. }, _) if reset_after == Span::ZERO => {
            left_of(window, now)
        }
        (Algorithm::FixedWindow { .. }, _) => reset_after,
        (
            _,
            Some(Outcome {
                allowed: false,
                retry_after: RetryAfter::After(wait),
                ..
            }),
        ) => *wait,
        _ => reset_after,
    };
    Span::from_secs(span.as_secs_ceil())
}

fn left_of(window: &Window, now: Timestamp) -> Span {
    match window {
        Window::Epoch(span) => {
            Span::from_micros(span.as_micros() - now.as_micros() % span.as_micros())
        }
        Window::FirstRequest(span) => *span,
        Window::Calendar(calendar) => calendar.window(now).1.since(now),
    }
}

/// Returns `OverLimit` if any descriptor denies the request.
fn overall(
    matches: &[DescriptorMatch<'_>],
    statuses: &[DescriptorStatus],
    settings: &RlsSettings,
) -> Code {
    if denying(matches, statuses, settings).contains(&true) {
        Code::OverLimit
    } else {
        Code::Ok
    }
}

/// Returns for each descriptor whether it denies the request. A descriptor that is over its limit
/// denies the request. A descriptor in quota mode denies the request only if all descriptors in
/// quota mode are over their limits.
pub(super) fn denying(
    matches: &[DescriptorMatch<'_>],
    statuses: &[DescriptorStatus],
    settings: &RlsSettings,
) -> Vec<bool> {
    let over = statuses.iter().map(|status| status.code == Code::OverLimit);
    let quota = matches.iter().map(|matched| is_quota(matched, settings));
    let over_and_quota: Vec<(bool, bool)> = over.zip(quota).collect();
    let mut quotas = over_and_quota.iter().filter(|(_, is_quota)| *is_quota);
    let all_quotas_over = quotas.all(|(is_over, _)| *is_over);
    let denies = |&(is_over, is_quota): &(bool, bool)| is_over && (!is_quota || all_quotas_over);
    over_and_quota.iter().map(denies).collect()
}

fn is_quota(matched: &DescriptorMatch<'_>, settings: &RlsSettings) -> bool {
    match matched {
        DescriptorMatch::Unlimited(_) => false,
        DescriptorMatch::NoLimit => settings.quota_mode,
        DescriptorMatch::Limited(applied) => {
            settings.quota_mode || applied.rule().is_some_and(|rule| rule.quota)
        }
    }
}

/// Returns the status for the headers. The headers come from the last descriptor that is over its
/// limit and not in quota mode. If there is no such descriptor, the headers come from the first
/// status with the fewest remaining hits.
fn leading<'s>(
    matches: &[DescriptorMatch<'_>],
    statuses: &'s [DescriptorStatus],
    settings: &RlsSettings,
) -> Option<&'s DescriptorStatus> {
    let with_limit = || {
        matches
            .iter()
            .zip(statuses)
            .filter(|(_, status)| status.current_limit.is_some())
    };
    let over = with_limit()
        .rfind(|(matched, status)| status.code == Code::OverLimit && !is_quota(matched, settings));
    let leading = over.or_else(|| with_limit().min_by_key(|(_, status)| status.limit_remaining));
    leading.map(|(_, status)| status)
}

fn headers(status: &DescriptorStatus, names: &HeaderNames) -> Vec<ResponseHeader> {
    let limit = status
        .current_limit
        .as_ref()
        .map_or(0, |limit| limit.requests_per_unit);
    let reset = status.duration_until_reset.map_or(0, Span::as_secs_ceil);
    let header = |name: &Arc<str>, value: u64| ResponseHeader {
        name: Arc::clone(name),
        value: value.to_string(),
    };
    vec![
        header(&names.limit, limit.into()),
        header(&names.remaining, status.limit_remaining.into()),
        header(&names.reset, reset),
    ]
}

/// Builds the dynamic metadata, which contains the request and the metadata of the rules that
/// admitted the request.
fn metadata(
    request: &RateLimitRequest,
    matches: &[DescriptorMatch<'_>],
    statuses: &[DescriptorStatus],
) -> Metadata {
    let descriptors: Vec<Metadata> = request.descriptors.iter().map(described).collect();
    let mut members: Vec<(Arc<str>, Metadata)> = vec![
        ("domain".into(), Metadata::text(&request.domain)),
        ("descriptors".into(), Metadata::List(descriptors.into())),
    ];
    if request.hits_addend != 0 {
        members.push((
            "hitsAddend".into(),
            Metadata::Number(request.hits_addend.into()),
        ));
    }
    let passed = matches
        .iter()
        .zip(statuses)
        .filter(|(_, status)| status.code == Code::Ok);
    let of_rules = passed.filter_map(|(matched, _)| matched.rule()?.metadata.as_ref());
    let merged = of_rules.fold(None, |merged: Option<Metadata>, next| {
        Some(merged.map_or_else(|| next.clone(), |merged| merged.or(next)))
    });
    members.extend(merged.map(|merged| ("metadata".into(), merged)));
    Metadata::map(members)
}

fn described(descriptor: &Descriptor) -> Metadata {
    let entries = descriptor
        .entries
        .iter()
        .map(|(key, value)| Metadata::text(&format!("{key}={value}")));
    let mut members: Vec<(Arc<str>, Metadata)> =
        vec![("entries".into(), Metadata::List(entries.collect()))];
    members.extend(
        descriptor
            .hits_addend
            .map(|hits| ("hitsAddend".into(), Metadata::Number(approximate(hits)))),
    );
    members.extend(descriptor.limit.map(|limit| {
        let text = format!(
            "requests_per_unit:{} unit:{}",
            limit.requests_per_unit,
            limit.unit.as_str()
        );
        ("limit".into(), Metadata::text(&text))
    }));
    Metadata::map(members)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a protobuf Struct has only f64 numbers, and no decision depends on them"
)]
fn approximate(number: u64) -> f64 {
    number as f64
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
