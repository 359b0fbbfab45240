//! The action for a verdict (the limiter's decision). The layer forwards the request now or after a
//! delay, or responds without the inner service.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Response};
use tidegate::DecidedRequest;
use tidegate_core::{Exactness, Reason, RequestError, Source, Span, Verdict};

use super::{admit::Admission, reservation::RequestReservation};
use crate::{
    HeaderWriter, RuleNames,
    denial::{Denial, ErrorFormat, ResponseTarget, malformed},
};

/// The layer's action for a request.
#[derive(Debug)]
pub(super) enum Action {
    /// Forwards the request to the inner service.
    Forward(Forward),
    /// Responds without the inner service.
    Respond(Box<Response<Bytes>>),
}

/// The data for forwarding a request to the inner service.
#[derive(Debug)]
pub(super) struct Forward {
    /// The extension for the inner service; `None` if it is disabled.
    pub(super) status: Option<RateLimitStatus>,
    /// The delay before the request is forwarded.
    pub(super) delay: Duration,
    /// The headers to add to the response.
    pub(super) headers: HeaderMap,
    /// The charges of the request that may be refunded.
    pub(super) reservation: RequestReservation,
}

/// The status of the limits for an admitted request. The inner service can read the status from the
/// request extensions.
///
/// If several layers are stacked, the inner service gets the extension of the innermost layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimitStatus {
    /// The rule with the fewest remaining units. The rule is `None` if no rule applies, or if a
    /// fallback policy decided because the store failed.
    pub rule: Option<Box<str>>,
    /// The quota of `rule`.
    pub limit: Option<u64>,
    /// The remaining units of `rule`.
    pub remaining: Option<u64>,
    /// The time until the whole quota of `rule` is available again.
    pub reset_after: Option<Span>,
    /// Whether the request exceeds an enforced limit, but is within the limit's soft allowance. The
    /// service should give a request over the soft allowance a cheaper response or a lower
    /// priority.
    pub over_limit: bool,
    /// The delay before the request was forwarded.
    pub delay: Span,
    /// The exactness of the decision.
    pub exactness: Exactness,
    /// The component that made the decision.
    pub source: Source,
}

impl RateLimitStatus {
    fn of(verdict: &Verdict<'_>) -> Self {
        let leading = verdict.leading().map(|line| line.outcome);
        let mut enforced = verdict.lines.iter().filter(|line| !line.shadow);
        Self {
            rule: verdict.rule.map(Box::from),
            limit: leading.map(|outcome| outcome.limit),
            remaining: leading.map(|outcome| outcome.remaining),
            reset_after: leading.map(|outcome| outcome.reset_after),
            over_limit: enforced.any(|line| line.outcome.over_limit),
            delay: verdict.delay,
            exactness: verdict.exactness,
            source: verdict.source,
        }
    }
}

/// The reason for a denial, stored as an extension of the layer's response, for example for access
/// logs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenialInfo {
    /// The rule that denied the request.
    pub rule: Option<Box<str>>,
    /// The values of the rule's key.
    pub key: Vec<Box<str>>,
    /// The reason for the denial.
    pub reason: Reason,
}

/// The settings for applying verdicts to requests and responses.
#[derive(Clone, Debug)]
pub(super) struct ActionPolicy {
    pub(super) headers: HeaderWriter,
    pub(super) longest_wait: Span,
    pub(super) inserts_status: bool,
    /// The body format of denials.
    pub(super) error_format: ErrorFormat,
}

impl Default for ActionPolicy {
    fn default() -> Self {
        Self {
            headers: HeaderWriter::default(),
            longest_wait: Span::from_secs(30),
            inserts_status: true,
            error_format: ErrorFormat::default(),
        }
    }
}

impl ActionPolicy {
    /// Returns the action for the request in `decided`. `target` is called only for a denial.
    pub(super) fn action(
        &self,
        Admission {
            verdict,
            reservation,
        }: Admission<'_>,
        decided: DecidedRequest<'_>,
        target: impl FnOnce() -> ResponseTarget,
    ) -> Action {
        let mut headers = HeaderMap::new();
        let now = decided.now;
        self.headers.clone().write_once(&verdict, now, &mut headers);
        if verdict.allowed {
            return Action::Forward(Forward {
                status: self.inserts_status.then(|| RateLimitStatus::of(&verdict)),
                delay: Duration::from_micros(verdict.delay.as_micros()),
                headers,
                reservation,
            });
        }
        let key = verdict
            .rule
            .map_or_else(Vec::new, |rule| decided.key_of(rule));
        let denial = Denial::of(&verdict, self.headers.rule_names());
        let mut response = denial.response(&target());
        response.headers_mut().extend(headers);
        response.extensions_mut().insert(DenialInfo {
            rule: verdict.rule.map(Box::from),
            key: key.into_iter().map(Box::from).collect(),
            // The default is never used: a verdict that denies always has a reason.
            reason: verdict.reason.unwrap_or(Reason::Limit),
        });
        Action::Respond(Box::new(response))
    }

    /// Returns the action for a request that cannot be counted because of `error`.
    pub(super) fn uncounted(&self, error: RequestError, target: &ResponseTarget) -> Action {
        let error = match self.headers.rule_names() {
            RuleNames::Shown => error,
            RuleNames::Hidden => error.without_cause(),
        };
        Self::refusal(&error, target)
    }

    /// Returns the action for an ambiguous request.
    pub(super) fn refusal(error: &dyn fmt::Display, target: &ResponseTarget) -> Action {
        Action::Respond(Box::new(malformed(error, target)))
    }
}
