//! `TIDEGATE.CHECK`: evaluates the rules for a request.

use std::{ops::RangeInclusive, sync::Arc};

use tidegate::{DecidedRequest, RateLimiter as _};
use tidegate_core::{
    Cost, Effect, Request, RequestError, RuleSet, Scratch, Span, Timestamp, Verdict,
    bounds::{MAX_COUNT, MAX_ENTRIES, MAX_SLOT_WAIT},
    notation::integer_advice,
};
use tidegate_limiter::{
    ServerLimiter,
    entries::{AuditedRequest, Origin, Spelling, normalize, rewritten},
    metrics::ListenerKind,
};

use super::{
    super::{parse::Arguments, reply::Reply},
    Context, PendingCommand, PendingReply, quoted, refuse, wrong_number,
};

/// Runs `TIDEGATE.CHECK [PEEK] [RAW] [COST n] [WAIT ms] name value [name value …]`. Replies with
/// `[allowed, rule or null, limit, remaining, reset_after_ms, retry_after_ms]`.
///
/// The options come before the entries. They can be in any order, each at most once. An option that
/// is repeated, or that follows an entry, would be read as an entry, so the command is rejected
/// unless a rule uses an entry of this name. A `retry_after_ms` of -1 means that a retry can never
/// succeed. `limit` and `remaining` are -1 if no limit was evaluated, because no rule applies
/// or the key is blocked.
pub(super) fn check(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let decided = CheckCommand::read(arguments.skip(1), CommandKind::Check)
        .and_then(|command| command.decide(context, reply));
    if let Err(refusal) = decided {
        refusal.reply(context, "tidegate.check", reply);
    }
}

/// The kind of a command, which determines its permitted options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandKind {
    /// A check. The command can have the option `PEEK`.
    Check,
    /// A reservation. The command can have the option `TTL`.
    Reserve,
}

/// The reason why a check or a reservation is rejected.
#[derive(Debug)]
pub(super) enum CheckRefusal {
    /// There are no arguments after the options, or the arguments after the options are not
    /// name-value pairs.
    NoPairs,
    Request(RequestError),
}

impl CheckRefusal {
    /// Writes the error reply for the rejected command `name`.
    pub(super) fn reply(self, context: &mut Context<'_>, name: &str, reply: &mut Reply<'_>) {
        match self {
            Self::NoPairs => wrong_number(context, name, reply),
            Self::Request(error) => refuse(context, reply, format_args!("ERR {error}")),
        }
    }
}

impl From<RequestError> for CheckRefusal {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

#[derive(Debug)]
pub(super) struct CheckCommand<'a> {
    effect: Effect,
    pub(super) cost: Cost,
    spelling: Spelling,
    /// The time to live of the reservation, if given.
    pub(super) ttl: Option<Span>,
    /// The longest time that the request may wait for a concurrency slot.
    pub(super) wait: Span,
    kind: CommandKind,
    pairs: Arguments<'a>,
}

impl<'a> CheckCommand<'a> {
    pub(super) fn read(arguments: Arguments<'a>, kind: CommandKind) -> Result<Self, CheckRefusal> {
        let (mut effect, mut spelling, mut given_cost) = (None, None, None);
        let (mut given_ttl, mut given_wait) = (None, None);
        let mut pairs = arguments;
        let is_check = kind == CommandKind::Check;
        loop {
            if is_check && effect.is_none() && pairs.is(0, "peek") {
                effect = Some(Effect::Peek);
                pairs = pairs.skip(1);
            } else if spelling.is_none() && pairs.is(0, "raw") {
                spelling = Some(Spelling::Raw);
                pairs = pairs.skip(1);
            } else if given_cost.is_none() && pairs.is(0, "cost") {
                given_cost = Some(cost(pairs.get(1).unwrap_or_default())?);
                pairs = pairs.skip(2);
            } else if !is_check && given_ttl.is_none() && pairs.is(0, "ttl") {
                given_ttl = Some(ttl(pairs.get(1).unwrap_or_default())?);
                pairs = pairs.skip(2);
            } else if given_wait.is_none() && pairs.is(0, "wait") {
                given_wait = Some(longest_wait(pairs.get(1).unwrap_or_default())?);
                pairs = pairs.skip(2);
            } else {
                break;
            }
        }
        if pairs.len() == 0 || !pairs.len().is_multiple_of(2) {
            let mut names = pairs.iter().step_by(2);
            let misplaced = names.find_map(|name| misplaced_option(name, kind));
            return Err(misplaced.map_or(CheckRefusal::NoPairs, CheckRefusal::Request));
        }
        if effect == Some(Effect::Peek) && given_wait.is_some() {
            let problem =
                "cannot be combined with PEEK, which does not wait; remove one of the two";
            return Err(RequestError::new("wait", problem).into());
        }
        Ok(Self {
            effect: effect.unwrap_or(Effect::Charge),
            cost: given_cost.unwrap_or(Cost::ONE),
            spelling: spelling.unwrap_or_default(),
            ttl: given_ttl,
            wait: given_wait.unwrap_or(Span::ZERO),
            kind,
            pairs,
        })
    }

    fn decide(self, context: &mut Context<'_>, reply: &mut Reply<'_>) -> Result<(), CheckRefusal> {
        let (limiter, effect, now) = (context.limiter, self.effect, context.now);
        self.with_request(limiter, |rules, request| {
            let scratch = &mut context.buffers.scratch;
            let decided = if self.wait > Span::ZERO {
                let finish = |rules: &Arc<RuleSet>, verdict: &Verdict<'_>| {
                    give(
                        limiter,
                        audited(request, rules, now),
                        verdict,
                        effect,
                        reply,
                    );
                };
                let decision = limiter.check_within(rules, scratch, request, self.wait, finish);
                decision.ready()
            } else {
                let decision = limiter.check(rules, scratch, request, effect).ready();
                decision.map(|verdict| {
                    give(
                        limiter,
                        audited(request, rules, now),
                        &verdict?,
                        effect,
                        reply,
                    );
                    Ok(())
                })
            };
            let Some(decided) = decided else {
                let later = PendingCommand::Check(PendingCheck {
                    request: OwnedRequest::new(request.entries(), self.cost),
                    effect,
                    wait: self.wait,
                });
                context.pending.push(PendingReply::new(later, reply));
                return Ok(());
            };
            Ok(decided?)
        })
    }

    /// Normalises the entries of the command, and calls `decide` with the rules and the request.
    pub(super) fn with_request(
        &self,
        limiter: &ServerLimiter,
        decide: impl FnOnce(&Arc<RuleSet>, &Request<'_>) -> Result<(), CheckRefusal>,
    ) -> Result<(), CheckRefusal> {
        let mut room = [("", ""); MAX_ENTRIES];
        let entries = self.entries(&mut room)?;
        let original = Request::new(entries, self.cost)?;
        let rules = limiter.rules();
        for (name, _) in entries.iter() {
            if let Some(misplaced) = misplaced_option(name.as_bytes(), self.kind)
                && !rules.uses_entry(name)
                // The rules of a candidate use these entries.
                && !rules.extra_entry_names().any(|extra| extra == *name)
            {
                return Err(misplaced.into());
            }
        }
        let replaced = normalize(limiter.trust(), &rules, self.spelling, entries)?;
        if replaced.is_empty() {
            return decide(&rules, &original);
        }
        let normalized = rewritten(entries, &replaced);
        decide(&rules, &Request::new(&normalized, self.cost)?)
    }

    fn entries<'r>(
        &self,
        room: &'r mut [(&'a str, &'a str)],
    ) -> Result<&'r [(&'a str, &'a str)], RequestError> {
        let count = self.pairs.len() / 2;
        let entries = room.get_mut(..count).ok_or_else(|| {
            RequestError::new(
                "entries",
                format!("{count} entries exceed the maximum of {MAX_ENTRIES}"),
            )
        })?;
        for (index, entry) in entries.iter_mut().enumerate() {
            let name = self.pairs.get(2 * index).unwrap_or_default();
            let value = self.pairs.get(2 * index + 1).unwrap_or_default();
            let not_text =
                || RequestError::new(format!("entries.{}", quoted(name)), "is not UTF-8");
            let text = |bytes| std::str::from_utf8(bytes).map_err(|_| not_text());
            *entry = (text(name)?, text(value)?);
        }
        Ok(entries)
    }
}

/// A request with owned entries.
#[derive(Debug)]
pub(super) struct OwnedRequest {
    entries: Vec<(Box<str>, Box<str>)>,
    pub(super) cost: Cost,
}

impl OwnedRequest {
    pub(super) fn new(entries: &[(&str, &str)], cost: Cost) -> Self {
        let owned = |(name, value): &(&str, &str)| (Box::from(*name), Box::from(*value));
        Self {
            entries: entries.iter().map(owned).collect(),
            cost,
        }
    }

    pub(super) fn entries(&self) -> Vec<(&str, &str)> {
        let borrowed = self.entries.iter();
        borrowed.map(|(name, value)| (&**name, &**value)).collect()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let texts = self
            .entries
            .iter()
            .map(|(name, value)| name.len() + value.len());
        size_of_val(self.entries.as_slice()) + texts.sum::<usize>()
    }
}

/// A check that is waiting for Redis or for a concurrency slot.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingCheck {
    request: OwnedRequest,
    effect: Effect,
    wait: Span,
}

impl PendingCheck {
    /// Returns whether the request can wait for a concurrency slot.
    pub(super) fn can_wait(&self) -> bool {
        self.wait > Span::ZERO
    }

    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        self.request.heap_bytes()
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &ServerLimiter,
        reply: &mut Reply<'_>,
    ) {
        let entries = self.request.entries();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let refuse = |error: RequestError, reply: &mut Reply<'_>| {
            limiter.metrics().count_bad_request(ListenerKind::Resp);
            reply.error(format_args!("ERR {error}"));
        };
        let request = match Request::new(&entries, self.request.cost) {
            Ok(request) => request,
            Err(error) => return refuse(error, reply),
        };
        let (effect, scratch) = (self.effect, &mut scratch);
        let mut finish = |rules: &Arc<RuleSet>, verdict: &Verdict<'_>| {
            let audited = audited(&request, rules, limiter.now());
            give(limiter, audited, verdict, effect, reply);
        };
        let decided = if self.wait > Span::ZERO {
            let waiting = limiter.check_within(&rules, scratch, &request, self.wait, finish);
            // A request rarely waits, and the future is large, so it is boxed.
            Box::pin(waiting.into_future()).await
        } else {
            let decision = limiter.check_after_pending(&rules, scratch, &request, effect);
            decision.await.map(|verdict| finish(&rules, &verdict))
        };
        if let Err(error) = decided {
            refuse(error, reply);
        }
    }
}

pub(super) fn audited<'a>(
    request: &'a Request<'a>,
    rules: &'a RuleSet,
    now: Timestamp,
) -> AuditedRequest<'a> {
    AuditedRequest {
        listener: ListenerKind::Resp,
        origin: Origin::Service,
        decided: DecidedRequest {
            request,
            rules,
            now,
        },
    }
}

fn give(
    limiter: &ServerLimiter,
    audited: AuditedRequest<'_>,
    verdict: &Verdict<'_>,
    effect: Effect,
    reply: &mut Reply<'_>,
) {
    if effect == Effect::Charge {
        limiter.observe_and_audit(audited, verdict);
    }
    render(verdict, reply);
}

/// Returns the error about an entry `name` that is the name of an option.
fn misplaced_option(name: &[u8], kind: CommandKind) -> Option<RequestError> {
    let options = ["raw", "cost", "wait", "peek", "ttl"];
    let mut options = options.iter();
    let option = options.find(|option| name.eq_ignore_ascii_case(option.as_bytes()))?;
    let problem = match (*option, kind) {
        ("peek", CommandKind::Reserve) => {
            "is not an option of a reservation, which always charges; use TIDEGATE.CHECK PEEK"
        }
        ("ttl", CommandKind::Check) => {
            "is not an option of a check, which reserves nothing; use TIDEGATE.RESERVE"
        }
        _ => {
            "is an option: give it only once, and before the entries; an entry can have this name \
             only if a rule uses the entry"
        }
    };
    Some(RequestError::new(*option, problem))
}

fn cost(text: &[u8]) -> Result<Cost, RequestError> {
    Cost::new(number_in("cost", text, 1..=MAX_COUNT)?)
}

/// Parses an integer argument in `range`. Error messages call the argument `field`.
pub(super) fn number_in(
    field: &str,
    text: &[u8],
    range: RangeInclusive<u64>,
) -> Result<u64, RequestError> {
    let number = integer(text).filter(|number| range.contains(number));
    number.ok_or_else(|| {
        let (least, most, given) = (range.start(), range.end(), quoted(text));
        let advice = advice(text, &range);
        let problem = format!("must be an integer from {least} to {most}, got '{given}'{advice}");
        RequestError::new(field, problem)
    })
}

fn integer(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn advice(text: &[u8], range: &RangeInclusive<u64>) -> String {
    integer_advice(std::str::from_utf8(text).unwrap_or_default(), range)
}

/// Parses a number of milliseconds. Error messages call the argument `field`, and suggest only a
/// number in `range`.
fn milliseconds(
    field: &str,
    text: &[u8],
    range: &RangeInclusive<u64>,
) -> Result<u64, RequestError> {
    integer(text).ok_or_else(|| {
        let given = quoted(text);
        let advice = advice(text, range);
        let problem = format!(
            "expected an integer number of milliseconds without a unit, got '{given}'{advice}"
        );
        RequestError::new(field, problem)
    })
}

/// Parses a time to live in milliseconds.
pub(super) fn ttl(text: &[u8]) -> Result<Span, RequestError> {
    let millis = milliseconds("ttl", text, &(1..=MAX_COUNT))?;
    if millis == 0 {
        return Err(RequestError::new("ttl", "must be at least 1 millisecond"));
    }
    Ok(Span::from_millis(millis))
}

/// Parses the longest time, in milliseconds, that a request may wait for a concurrency slot.
fn longest_wait(text: &[u8]) -> Result<Span, RequestError> {
    let max = MAX_SLOT_WAIT.as_millis_ceil();
    let millis = milliseconds("wait", text, &(0..=max))?;
    if millis > max {
        let problem = format!("{millis} milliseconds exceed the maximum of {max}");
        return Err(RequestError::new("wait", problem));
    }
    Ok(Span::from_millis(millis))
}

fn render(verdict: &Verdict<'_>, reply: &mut Reply<'_>) {
    reply.array(VERDICT_PARTS);
    render_parts(verdict, reply);
}

/// The number of reply elements that encode a verdict.
pub(super) const VERDICT_PARTS: usize = 6;

/// Writes the elements of a verdict. The caller has already written the array header.
pub(super) fn render_parts(verdict: &Verdict<'_>, reply: &mut Reply<'_>) {
    let millis = |span: Span| i64::try_from(span.as_millis_ceil()).unwrap_or(i64::MAX);
    let retry_after = verdict.retry_after.span().map_or(-1, millis);
    reply.integer(i64::from(verdict.allowed));
    match verdict.rule {
        Some(rule) => reply.bulk(rule.as_bytes()),
        None => reply.null(),
    }
    match verdict.leading() {
        Some(line) => {
            reply.count(line.outcome.limit);
            reply.count(line.outcome.remaining);
            reply.integer(millis(line.outcome.reset_after));
        }
        None => {
            reply.integer(-1);
            reply.integer(-1);
            reply.integer(retry_after);
        }
    }
    reply.integer(retry_after);
}
