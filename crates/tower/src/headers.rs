//! Writes a verdict as response headers. A verdict is a limiter's decision about a request.
//!
//! `RateLimit-Policy` and `RateLimit` follow draft-ietf-httpapi-ratelimit-headers-10 (lists of
//! strings with parameters). Both headers are optional, because the specification is still a draft.
//! `Retry-After` follows RFC 9110.
//!
//! The three headers `X-RateLimit-Limit`, `-Remaining` and `-Reset` (the "triple") are also
//! optional. The value of `X-RateLimit-Reset` is in seconds from now or in seconds since the epoch,
//! because clients expect different formats.
//!
//! ```text
//! RateLimit-Policy: "1/s";q=1;w=1, "20/min";q=20;w=60
//! RateLimit: "1/s";r=0;t=1, "20/min";r=7
//! Retry-After: 1
//! ```
//!
//! A policy is named after its limit, because clients must not see some rule names
//! (`secret-fraud-rule`). With [`RuleNames::Shown`], a policy is named after its rule: `"api:1/s"`.
//!
//! Wait times are rounded up and quotas are rounded down, so that a client that follows the headers
//! never retries too early. The draft leaves some points open, for which this crate has these
//! rules:
//!
//! - `q` is the number of units that an idle key can use at once.
//! - `qu` is `concurrent-requests` for a concurrency limit, and `content-bytes` for a rule that
//!   counts bytes. `qu` is omitted for limits on the number of requests, the default unit, and for
//!   limits on other units, such as tokens, which have no registered name.
//! - `w` is the time in which the whole quota becomes available again. `w` is omitted if it is
//!   shorter than a second. `w` is also omitted for a node's local share of a limit and for a
//!   concurrency limit.
//! - If no units remain, `t` is the time until a unit is available. If units remain, `t` is the
//!   time until the whole quota is available again.
//! - `Retry-After` is never earlier than a `t` in the same response. If the `t` of a limit that
//!   does not deny the request would be later than `Retry-After`, that `t` is omitted.
//! - A concurrency limit has a `t` and an `X-RateLimit-Reset` only if it denies the request. `t`
//!   and `X-RateLimit-Reset` are then the same estimate as `Retry-After`. The estimate does not
//!   depend on the leases, because slots are usually released long before their leases expire.

use http::{HeaderMap, HeaderName, HeaderValue, header::RETRY_AFTER};
use tidegate_core::{
    Algorithm, Exactness, Limit, Line, Outcome, QuotaUnit, Rate, RefillMode, RetryAfter, Span,
    Timestamp, Verdict,
};

use crate::structured_fields;

/// The maximum number of limits in the headers. If the response has more limits, the headers show
/// only the tightest limits. The maximum keeps the headers within the size that clients and proxies
/// accept.
pub const MAX_SHOWN: usize = 8;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The quota unit (`qu`) of a concurrency limit. Without `qu`, the unit is `requests`.
const CONCURRENT_REQUESTS: &[u8] = b";qu=\"concurrent-requests\"";

/// The quota unit (`qu`) of a limit on bytes.
const CONTENT_BYTES: &[u8] = b";qu=\"content-bytes\"";

/// The name of a limit that was sent with the request and does not belong to a rule. The name
/// appears with [`RuleNames::Shown`].
const UNNAMED: &str = "default";

/// The format of `X-RateLimit-Reset`, if the `X-RateLimit-*` headers are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Legacy {
    /// The `X-RateLimit-*` headers are not sent.
    #[default]
    Off,
    /// `X-RateLimit-Reset` is in seconds from now, rounded up.
    Delta,
    /// `X-RateLimit-Reset` is in seconds since the Unix epoch, rounded up.
    Epoch,
}

/// Whether clients see rule names in headers and in denial responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuleNames {
    /// A policy has the name of its limit, such as `20/min`. If two policies have the same name,
    /// the second one is named `20/min:2`.
    #[default]
    Hidden,
    /// A policy has the name of its rule, such as `api`. If the rule has several limits, the name
    /// is `api:20/min`. If two policies have the same name, the second one is named `api:20/min:2`.
    Shown,
}

/// Writes the headers for verdicts. The writer contains a buffer that is reused for all responses
/// on a connection.
#[derive(Clone, Debug)]
pub struct HeaderWriter {
    ratelimit: bool,
    legacy: Legacy,
    rule_names: RuleNames,
    text: Vec<u8>,
    /// The last value of `RateLimit-Policy`.
    policies: Option<HeaderValue>,
    is_reused: bool,
}

/// The default writer writes the `RateLimit` and `RateLimit-Policy` headers, but not the
/// `X-RateLimit-*` headers.
impl Default for HeaderWriter {
    fn default() -> Self {
        Self::new(true, Legacy::Off)
    }
}

impl HeaderWriter {
    /// Creates a writer. The writer writes `RateLimit` and `RateLimit-Policy` if `ratelimit` is
    /// true. `legacy` determines the format of the `X-RateLimit-*` headers. The writer always
    /// writes `Retry-After` for denials.
    #[must_use]
    pub fn new(ratelimit: bool, legacy: Legacy) -> Self {
        Self {
            ratelimit,
            legacy,
            rule_names: RuleNames::default(),
            text: Vec::new(),
            policies: None,
            is_reused: true,
        }
    }

    /// Sets whether policies are named after their rules.
    #[must_use]
    pub fn with_rule_names(self, names: RuleNames) -> Self {
        Self {
            rule_names: names,
            ..self
        }
    }

    /// Returns whether clients see rule names.
    #[must_use]
    pub fn rule_names(&self) -> RuleNames {
        self.rule_names
    }

    /// Adds the headers for `verdict`, which was decided at `now`.
    ///
    /// The limits of shadow rules are not shown. The denial of a request that can never be admitted
    /// has no `Retry-After`.
    pub fn write(&mut self, verdict: &Verdict<'_>, now: Timestamp, headers: &mut HeaderMap) {
        self.write_all(verdict, now, headers);
    }

    /// Adds the headers as [`Self::write`] does. Use this function for a writer that writes a
    /// single response, because such a writer need not keep a value for the next response.
    pub fn write_once(mut self, verdict: &Verdict<'_>, now: Timestamp, headers: &mut HeaderMap) {
        self.is_reused = false;
        self.write_all(verdict, now, headers);
    }

    fn write_all(&mut self, verdict: &Verdict<'_>, now: Timestamp, headers: &mut HeaderMap) {
        let retry_after = retry_after_secs(verdict);
        if self.ratelimit {
            let shown = HeaderLimits::of(verdict);
            if shown.count > 0 {
                self.policies(&shown, verdict.exactness, headers);
                self.states(&shown, retry_after, headers);
            }
        }
        if let Some(secs) = retry_after {
            self.number(RETRY_AFTER, secs, headers);
        }
        if let (Some(line), true) = (verdict.leading(), self.legacy != Legacy::Off) {
            self.triple(line, now, headers);
        }
    }

    fn policies(
        &mut self,
        shown: &HeaderLimits<'_, '_>,
        exactness: Exactness,
        headers: &mut HeaderMap,
    ) {
        self.text.clear();
        for at in shown.order() {
            let line = &shown.lines[at];
            self.name(shown.lines, at);
            structured_fields::parameter(&mut self.text, b'q', line.outcome.limit);
            // A concurrency limit has no window, because its slots become free when requests end.
            if matches!(line.limit.algorithm(), Algorithm::Concurrency { .. }) {
                self.text.extend_from_slice(CONCURRENT_REQUESTS);
                continue;
            }
            if line.unit == QuotaUnit::ContentBytes {
                self.text.extend_from_slice(CONTENT_BYTES);
            }
            let window = line.limit.window();
            // A node's local share of a limit takes a different time to recover, so `w` would be
            // wrong.
            if window >= Span::from_secs(1) && exactness != Exactness::Local {
                structured_fields::parameter(&mut self.text, b'w', window.as_secs_ceil());
            }
        }
        // Most responses on a connection have the same policies. A copy of the value shares its
        // memory, and is not validated again.
        let last = self.policies.as_ref();
        if last.is_none_or(|value| value.as_bytes() != self.text) {
            self.policies = HeaderValue::from_bytes(&self.text).ok();
        }
        let value = if self.is_reused {
            self.policies.clone()
        } else {
            self.policies.take()
        };
        if let Some(value) = value {
            headers.insert(RATELIMIT_POLICY, value);
        }
    }

    fn states(
        &mut self,
        shown: &HeaderLimits<'_, '_>,
        retry_after: Option<u64>,
        headers: &mut HeaderMap,
    ) {
        self.text.clear();
        for at in shown.order() {
            let line = &shown.lines[at];
            self.name(shown.lines, at);
            structured_fields::parameter(&mut self.text, b'r', line.outcome.remaining);
            if let Some(secs) = more_after_secs(line)
                .filter(|secs| retry_after.is_none_or(|latest| *secs <= latest))
            {
                structured_fields::parameter(&mut self.text, b't', secs);
            }
        }
        self.put(RATELIMIT, headers);
    }

    fn name(&mut self, lines: &[Line<'_>], at: usize) {
        let separator: &[u8] = if self.text.is_empty() { b"\"" } else { b", \"" };
        self.text.extend_from_slice(separator);
        let name = policy_name(lines, at, self.rule_names);
        if let Some(rule) = name.base.rule {
            structured_fields::string_content(&mut self.text, rule);
        }
        self.text
            .extend_from_slice(name.base.separator().as_bytes());
        if let Some(policy) = name.base.policy {
            structured_fields::plain_content(&mut self.text, policy);
        }
        if name.number > 1 {
            self.text.push(b':');
            structured_fields::integer(&mut self.text, name.number);
        }
        self.text.push(b'"');
    }

    fn triple(&mut self, line: &Line<'_>, now: Timestamp, headers: &mut HeaderMap) {
        self.number(X_LIMIT, line.outcome.limit, headers);
        self.number(X_REMAINING, line.outcome.remaining, headers);
        if let Some(span) = reset_after(line) {
            let reset = match self.legacy {
                Legacy::Off | Legacy::Delta => span.as_secs_ceil(),
                Legacy::Epoch => now.after(span).as_micros().div_ceil(1_000_000),
            };
            self.number(X_RESET, reset, headers);
        }
    }

    fn number(&mut self, name: HeaderName, number: u64, headers: &mut HeaderMap) {
        self.text.clear();
        structured_fields::integer(&mut self.text, number);
        self.put(name, headers);
    }

    fn put(&self, name: HeaderName, headers: &mut HeaderMap) {
        // The value is always valid, because only printable ASCII is written.
        if let Ok(value) = HeaderValue::from_bytes(&self.text) {
            headers.insert(name, value);
        }
    }
}

/// Adds `Retry-After` in whole seconds, at least 1. Adds nothing if `wait` is `None`.
pub(crate) fn put_retry_after(wait: Option<Span>, headers: &mut HeaderMap) {
    if let Some(wait) = wait {
        headers.insert(RETRY_AFTER, HeaderValue::from(wait.as_secs_ceil().max(1)));
    }
}

/// Merges the headers of one limiter into a response that may already have headers of another
/// limiter.
///
/// A list header gets additional values. If a header that can occur only once already exists, its
/// value is kept, because the limiter that wrote this value is closer to the service. The
/// `X-RateLimit-*` headers are an exception: the added headers replace the existing headers if the
/// added headers show fewer remaining units.
pub(crate) fn merge(added: HeaderMap, headers: &mut HeaderMap) {
    let remaining = |headers: &HeaderMap| -> Option<u64> {
        headers.get(X_REMAINING)?.to_str().ok()?.parse().ok()
    };
    let is_tighter = remaining(&added)
        .is_none_or(|adds| remaining(headers).is_none_or(|existing| adds < existing));
    // Replace all three headers: if the new limit has no reset time, the old reset time must not
    // remain.
    if is_tighter && added.contains_key(X_REMAINING) {
        headers.remove(X_RESET);
    }
    for (name, value) in added {
        let Some(name) = name else { continue };
        if name == RATELIMIT || name == RATELIMIT_POLICY {
            headers.append(name, value);
        } else if [X_LIMIT, X_REMAINING, X_RESET].contains(&name) {
            if is_tighter {
                headers.insert(name, value);
            }
        } else {
            headers.entry(name).or_insert(value);
        }
    }
}

/// The limits to show in the headers, starting with the tightest.
struct HeaderLimits<'v, 'r> {
    lines: &'v [Line<'r>],
    order: [usize; MAX_SHOWN],
    count: usize,
}

impl<'v, 'r> HeaderLimits<'v, 'r> {
    fn of(verdict: &'v Verdict<'r>) -> Self {
        let mut shown = Self {
            lines: &verdict.lines,
            order: [0; MAX_SHOWN],
            count: 0,
        };
        for (index, line) in verdict
            .lines
            .iter()
            .enumerate()
            .filter(|(_, line)| !line.shadow)
        {
            shown.insert(index, line);
        }
        shown
    }

    fn insert(&mut self, index: usize, line: &Line<'_>) {
        let before = self.order[..self.count]
            .partition_point(|other| sort_key(&self.lines[*other]) <= sort_key(line));
        if before == MAX_SHOWN {
            return;
        }
        self.count = MAX_SHOWN.min(self.count + 1);
        self.order.copy_within(before..self.count - 1, before + 1);
        self.order[before] = index;
    }

    /// Returns the indices of the verdict's lines, in display order.
    fn order(&self) -> impl Iterator<Item = usize> {
        self.order[..self.count].iter().copied()
    }
}

/// The name of a policy, which is unique in a response.
struct PolicyName<'v> {
    base: BaseName<'v>,
    /// The number of this policy among the policies with the same name, from 1. From 2 on, the
    /// number follows a colon.
    number: u64,
}

/// Returns the policy name for the verdict line at index `at`.
fn policy_name<'v>(lines: &'v [Line<'_>], at: usize, names: RuleNames) -> PolicyName<'v> {
    let base = BaseName::of(lines, at, names);
    let before = (0..at)
        .filter(|other| !lines[*other].shadow)
        .filter(|other| base.is_same(BaseName::of(lines, *other, names)))
        .count();
    PolicyName {
        base,
        number: u64::try_from(before).unwrap_or(u64::MAX).saturating_add(1),
    }
}

/// A policy name without a number. It has at least one part.
#[derive(Clone, Copy)]
struct BaseName<'v> {
    rule: Option<&'v str>,
    /// The text of the limit, such as `20/min`.
    policy: Option<&'v str>,
}

impl<'v> BaseName<'v> {
    /// Returns the base of the policy name for the line at index `at`.
    fn of(lines: &'v [Line<'_>], at: usize, names: RuleNames) -> Self {
        let line = &lines[at];
        let policy: &str = line.limit.policy();
        match names {
            RuleNames::Hidden => Self {
                rule: None,
                policy: Some(policy),
            },
            RuleNames::Shown => {
                // The limits of one rule are adjacent.
                let neighbours = [at.checked_sub(1), at.checked_add(1)];
                let mut neighbours = neighbours
                    .into_iter()
                    .flatten()
                    .filter_map(|near| lines.get(near));
                let several = neighbours.any(|near| near.rule == line.rule);
                Self {
                    rule: Some(line.rule.unwrap_or(UNNAMED)),
                    policy: several.then_some(policy),
                }
            }
        }
    }

    /// Returns the text between the two parts.
    fn separator(self) -> &'static str {
        if self.rule.is_some() && self.policy.is_some() {
            ":"
        } else {
            ""
        }
    }

    fn text(self) -> impl Iterator<Item = &'v str> {
        let separator = Some(self.separator());
        [self.rule, separator, self.policy].into_iter().flatten()
    }

    /// Returns whether two names are the same string. The parts are not compared one by one,
    /// because a rule name may itself contain a colon.
    fn is_same(self, other: Self) -> bool {
        let bytes = |name: Self| name.text().flat_map(str::bytes);
        bytes(self).eq(bytes(other))
    }
}

/// Returns the policy name for the line at index `at`, as it appears in the headers.
pub(crate) fn policy_text(lines: &[Line<'_>], at: usize, names: RuleNames) -> String {
    let name = policy_name(lines, at, names);
    let mut text: String = name.base.text().collect();
    if name.number > 1 {
        text.push(':');
        text.push_str(itoa::Buffer::new().format(name.number));
    }
    text
}

/// Returns the sort key of a line. The limits that deny the request come first, starting with the
/// longest retry time. The other limits follow, starting with the fewest remaining units. The
/// verdict sorts its limits in this order too.
fn sort_key(line: &Line<'_>) -> impl Ord {
    let Outcome {
        allowed,
        retry_after,
        remaining,
        reset_after,
        ..
    } = line.outcome;
    (
        allowed,
        std::cmp::Reverse(retry_after),
        remaining,
        std::cmp::Reverse(reset_after),
    )
}

/// Returns the number of seconds until a denied request would be admitted, at least 1. Returns
/// `None` if the request was admitted or can never be admitted.
fn retry_after_secs(verdict: &Verdict<'_>) -> Option<u64> {
    if verdict.allowed {
        return None;
    }
    verdict
        .retry_after
        .span()
        .map(|span| span.as_secs_ceil().max(1))
}

/// Returns the number of seconds until the limit of `line` has more units. Returns `None` if the
/// request can never be admitted.
fn more_after_secs(line: &Line<'_>) -> Option<u64> {
    let outcome = &line.outcome;
    match (outcome.allowed, outcome.retry_after) {
        (false, RetryAfter::After(span)) => Some(span.as_secs_ceil().max(1)),
        (false, RetryAfter::Never) => None,
        (true, _) if outcome.remaining == 0 && !is_concurrency(line.limit) => {
            Some(next_unit(line.limit, outcome).as_secs_ceil())
        }
        (true, _) => reset_after(line).map(Span::as_secs_ceil),
    }
}

/// Returns the time until the whole quota of the key is available again, for the headers.
///
/// For a concurrency limit, the outcome contains the time until the last lease expires. A client
/// would wait too long for the end of the last lease, because a slot becomes free as soon as its
/// request ends. If the limit denies the request, this function returns the estimate in
/// `retry_after`.
fn reset_after(line: &Line<'_>) -> Option<Span> {
    let outcome = &line.outcome;
    match (is_concurrency(line.limit), outcome.allowed) {
        (false, _) => Some(outcome.reset_after),
        (true, false) => outcome.retry_after.span(),
        (true, true) => None,
    }
}

fn is_concurrency(limit: &Limit) -> bool {
    matches!(limit.algorithm(), Algorithm::Concurrency { .. })
}

/// Returns the time until an exhausted key has a unit again. For a window, the result is the time
/// until the whole quota is available. For a bucket, the result is shorter by the time that all
/// units after the next one take to become available.
fn next_unit(limit: &Limit, outcome: &Outcome) -> Span {
    let units = limit.quota().saturating_add(limit.soft_allowance());
    let later_steps = match *limit.algorithm() {
        Algorithm::TokenBucket {
            refill,
            mode: RefillMode::Interval,
            ..
        } => {
            let refills = units.div_ceil(refill.count).saturating_sub(1);
            Span::from_micros(refills.saturating_mul(refill.period.as_micros()))
        }
        Algorithm::Gcra { rate, .. }
        | Algorithm::TokenBucket { refill: rate, .. }
        | Algorithm::LeakyBucket { leak: rate, .. } => time_for(units.saturating_sub(1), rate),
        Algorithm::FixedWindow { .. }
        | Algorithm::SlidingWindowLog { .. }
        | Algorithm::Concurrency { .. }
        | Algorithm::SlidingWindowCounter { .. } => Span::ZERO,
    };
    Span::from_micros(
        outcome
            .reset_after
            .as_micros()
            .saturating_sub(later_steps.as_micros()),
    )
}

/// Returns the time that `units` take to become available again. The time is rounded down, because
/// the caller subtracts it from another time.
fn time_for(units: u64, rate: Rate) -> Span {
    let micros =
        u128::from(units) * u128::from(rate.period.as_micros()) / u128::from(rate.count.max(1));
    Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}
