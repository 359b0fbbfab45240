//! What comes of a verdict: the request goes on, at once or after a while, or is answered here.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, request::Parts};
use tidegate_core::{Exactness, Reason, RequestError, Source, Span, Timestamp, Verdict};

use super::{denial::Denial, grpc, reservation::Reservation};
use crate::{HeaderWriter, RuleNames, headers};

/// What is to be done with a request.
#[derive(Debug)]
pub(super) enum Ruling {
    /// It goes on to the inner service.
    Pass(Pass),
    /// It is answered here.
    Deny(Box<Response<Bytes>>),
}

/// How a request goes on to the inner service.
#[derive(Debug)]
pub(super) struct Pass {
    /// What the inner service is told, if it is.
    pub(super) passed: Option<Passed>,
    /// For how long it is held back first.
    pub(super) delay: Duration,
    /// What goes with the answer.
    pub(super) headers: HeaderMap,
    /// What it was charged, where something of that may come back.
    pub(super) reservation: Reservation,
}

/// What the limits said of a request that has passed, as an extension of the request that the inner service gets.
///
/// Where several layers stand behind each other, it is the innermost's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Passed {
    /// The rule that speaks for the request: the one with least remaining. `None` where none applies, or a policy has
    /// answered for the store.
    pub rule: Option<Box<str>>,
    /// That rule's quota.
    pub limit: Option<u64>,
    /// What could still be spent of it.
    pub remaining: Option<u64>,
    /// How long until its key is as good as new.
    pub reset_after: Option<Span>,
    /// Whether the request is beyond an enforced limit proper, inside its soft allowance: what should be served cheaply, or
    /// last.
    pub over_limit: bool,
    /// For how long the request was held back.
    pub delay: Span,
    /// How exact the verdict was.
    pub exactness: Exactness,
    /// Who gave it.
    pub source: Source,
}

impl Passed {
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

/// Why a request was denied, as an extension of the answer that a layer gives by itself: for the logs of those around it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denied {
    /// The rule that speaks for the denial.
    pub rule: Option<Box<str>>,
    /// What it denies for.
    pub reason: Reason,
}

/// How verdicts are carried out.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) headers: HeaderWriter,
    pub(super) longest_wait: Span,
    pub(super) tells_inner: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            headers: HeaderWriter::default(),
            longest_wait: Span::from_secs(30),
            tells_inner: true,
        }
    }
}

impl Terms {
    /// What comes of `verdict`, which was decided at `now`. `call` is the content type of a gRPC call.
    pub(super) fn ruling(
        &self,
        (verdict, reservation): (&Verdict<'_>, Reservation),
        now: Timestamp,
        call: Option<&HeaderValue>,
    ) -> Ruling {
        let mut headers = HeaderMap::new();
        self.headers.clone().write(verdict, now, &mut headers);
        if verdict.allowed {
            return Ruling::Pass(Pass {
                passed: self.tells_inner.then(|| Passed::of(verdict)),
                delay: Duration::from_micros(verdict.delay.as_micros()),
                headers,
                reservation,
            });
        }
        let denial = Denial::of(verdict, self.headers.rule_names());
        let mut response = answer(&denial, call);
        response.headers_mut().extend(headers);
        response.extensions_mut().insert(Denied {
            rule: verdict.rule.map(Box::from),
            // Whoever denies says why.
            reason: verdict.reason.unwrap_or(Reason::Limit),
        });
        Ruling::Deny(Box::new(response))
    }

    /// What comes of a request that the rules cannot count.
    pub(super) fn uncounted(&self, error: RequestError, call: Option<&HeaderValue>) -> Ruling {
        let error = match self.headers.rule_names() {
            RuleNames::Shown => error,
            RuleNames::Hidden => error.without_cause(),
        };
        Self::refusal(&error, call)
    }

    /// What comes of a request that could mean several things.
    pub(super) fn refusal(error: &dyn fmt::Display, call: Option<&HeaderValue>) -> Ruling {
        Ruling::Deny(Box::new(malformed(error, call)))
    }
}

/// The answer to a request that cannot be counted. `call` is the content type of a gRPC call.
pub(super) fn malformed(error: &dyn fmt::Display, call: Option<&HeaderValue>) -> Response<Bytes> {
    answer(&Denial::malformed(error), call)
}

/// The answer to a request, with this head, for which a service has no room: 503 with `Retry-After` and a problem document, or gRPC's
/// `UNAVAILABLE`.
#[must_use]
pub fn overloaded(head: &Parts) -> Response<Bytes> {
    let denial = Denial::busy();
    let mut response = answer(&denial, grpc::call(&head.method, &head.headers));
    headers::put_retry_after(denial.retry_after, response.headers_mut());
    response
}

fn answer(denial: &Denial<'_>, call: Option<&HeaderValue>) -> Response<Bytes> {
    match call {
        Some(content_type) => grpc::response(denial, content_type),
        None => denial.response(),
    }
}
