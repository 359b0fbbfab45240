//! redis-cell's `CL.THROTTLE` and throttlecrab's `THROTTLE`, whose arguments contain the limit.
//!
//! The replies follow the documentation of redis-cell and throttlecrab, even where these programs
//! behave differently. Seconds are rounded up, so that the reported wait time is always long
//! enough.

use std::sync::Arc;

use tidegate_core::{Charge, Cost, Decision, Effect, Limits, Outcome, Span, Timestamp, bounds};
use tidegate_limiter::{DecisionRequest, ServerLimiter, ThrottledRequest, metrics::ListenerKind};

use super::{
    super::{
        limit_parameters::{Dialect, LimitParameters},
        parse::Arguments,
        reply::Reply,
    },
    Context, PendingCommand, PendingReply,
    refusal::{CellRefusal, CrabRefusal, Refusal},
    refuse,
};

/// Runs `CL.THROTTLE key max_burst count_per_period period [quantity]`. Replies with `[limited,
/// limit, remaining, retry_after_s or -1, reset_after_s]`.
pub(super) fn cl_throttle(
    context: &mut Context<'_>,
    arguments: Arguments<'_>,
    reply: &mut Reply<'_>,
) {
    if let Err(refusal) = run(context, arguments, Dialect::RedisCell, reply) {
        let refusal = CellRefusal(&refusal);
        let error = format_args!("Cell error: Store error: {refusal}");
        refuse(context, reply, error);
    }
}

/// Writes the error reply to a `CL.THROTTLE` with the wrong number of arguments.
pub(super) fn usage(context: &mut Context<'_>, reply: &mut Reply<'_>) {
    let error = format_args!(
        "Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"
    );
    refuse(context, reply, error);
}

/// Runs `THROTTLE key max_burst count_per_period period [quantity]`. Replies with `[allowed, limit,
/// remaining, reset_after_s, retry_after_s or 0 or -1]`.
pub(super) fn throttle(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    if let Err(refusal) = run(context, arguments, Dialect::Throttlecrab, reply) {
        let refusal = CrabRefusal(&refusal);
        refuse(context, reply, format_args!("ERR {refusal}"));
    }
}

fn run<'a>(
    context: &mut Context<'_>,
    arguments: Arguments<'a>,
    dialect: Dialect,
    reply: &mut Reply<'_>,
) -> Result<(), Refusal<'a>> {
    let answer = ThrottleCommand::read(arguments, dialect)?.decide(context, reply)?;
    if let Some(answer) = answer {
        answer.write(dialect, reply);
    }
    Ok(())
}

/// The parsed arguments.
#[derive(Debug)]
struct ThrottleCommand<'a> {
    key: &'a [u8],
    parameters: LimitParameters,
    /// The cost of the request; `None` if the quantity is 0, so that the command only reads the
    /// current state.
    cost: Option<Cost>,
}

impl<'a> ThrottleCommand<'a> {
    fn read(arguments: Arguments<'a>, dialect: Dialect) -> Result<Self, Refusal<'a>> {
        let least_burst = u64::from(dialect == Dialect::Throttlecrab);
        let burst = Number::read(arguments, 2, "max_burst")?;
        let count = Number::read(arguments, 3, "count_per_period")?;
        let period = Number::read(arguments, 4, "period")?;
        let quantity = match arguments.get(5) {
            None => Number {
                field: "quantity",
                value: 1,
            },
            Some(_) => Number::read(arguments, 5, "quantity")?,
        };
        if dialect == Dialect::RedisCell && (count.value == 0 || period.value == 0) {
            return Err(Refusal::ZeroRate);
        }
        let parameters = LimitParameters {
            dialect,
            burst: burst.within(least_burst, bounds::MAX_COUNT)?,
            count: count.within(1, bounds::MAX_COUNT)?,
            period_secs: period.within(1, bounds::MAX_PERIOD.as_micros() / 1_000_000)?,
        };
        let cost = Cost::new(quantity.within(0, bounds::MAX_COUNT)?).ok();
        Ok(Self {
            key: arguments.get(1).unwrap_or_default(),
            parameters,
            cost,
        })
    }

    /// Decides now, or returns `None` if Redis has to decide.
    fn decide(
        self,
        context: &mut Context<'_>,
        reply: &Reply<'_>,
    ) -> Result<Option<ThrottleAnswer>, Refusal<'a>> {
        let database = context.session.database;
        let buffers = &mut *context.buffers;
        let refused = |error: tidegate_core::RequestError| Refusal::Key(error.problem);
        let key = tidegate_limiter::throttle_key_in(database, self.key, &mut buffers.key)
            .map_err(refused)?;
        let limits = buffers.limits.get_or_build(self.parameters, |parameters| {
            parameters.compile().map(Arc::new)
        });
        let limits = limits.map_err(Refusal::Limit)?;
        let effect = if self.cost.is_some() {
            Effect::Charge
        } else {
            Effect::Look
        };
        let charge = Charge::new(key, limits, self.cost.unwrap_or(Cost::ONE)).map_err(refused)?;
        let now = context.now;
        let request = DecisionRequest {
            charges: &[charge],
            now,
            effect,
            within: None,
        };
        let decided = context.limiter.decide(request, &mut buffers.outcomes);
        let Some(decided) = decided.ready() else {
            let later = PendingCommand::Throttle(PendingThrottle {
                key: key.into(),
                limits: Arc::clone(limits),
                parameters: self.parameters,
                cost: charge.cost,
                effect,
                now,
            });
            context.pending.push(PendingReply::new(later, reply));
            return Ok(None);
        };
        if effect == Effect::Charge {
            let throttled = ThrottledRequest {
                charge: &charge,
                outcomes: &buffers.outcomes,
                now,
            };
            context
                .limiter
                .observe_throttle(ListenerKind::Resp, throttled, &decided);
        }
        let answer =
            ThrottleAnswer::of(&decided.decision, buffers.outcomes.first(), self.parameters);
        Ok(Some(answer))
    }
}

/// A throttle command that is waiting for Redis.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingThrottle {
    key: Box<[u8]>,
    limits: Arc<Limits>,
    parameters: LimitParameters,
    cost: Cost,
    effect: Effect,
    now: Timestamp,
}

impl PendingThrottle {
    /// Returns the memory of the pending command, in bytes. The limits are not included, because
    /// other commands share them.
    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        self.key.len()
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &ServerLimiter,
        reply: &mut Reply<'_>,
    ) {
        let charge = Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
            longest_wait: None,
            blocked: None,
        };
        let request = DecisionRequest {
            charges: &[charge],
            now: self.now,
            effect: self.effect,
            within: None,
        };
        let mut outcomes = Vec::new();
        let decided = limiter.decide_after_pending(request, &mut outcomes).await;
        if self.effect == Effect::Charge {
            let throttled = ThrottledRequest {
                charge: &charge,
                outcomes: &outcomes,
                now: self.now,
            };
            limiter.observe_throttle(ListenerKind::Resp, throttled, &decided);
        }
        let answer = ThrottleAnswer::of(&decided.decision, outcomes.first(), self.parameters);
        answer.write(self.parameters.dialect, reply);
    }
}

/// An integer argument.
#[derive(Clone, Copy, Debug)]
struct Number {
    field: &'static str,
    value: i64,
}

impl Number {
    fn read<'a>(
        arguments: Arguments<'a>,
        index: usize,
        field: &'static str,
    ) -> Result<Self, Refusal<'a>> {
        let value = arguments.get(index).unwrap_or_default();
        match integer(value) {
            Some(value) => Ok(Self { field, value }),
            None => Err(Refusal::NotAnInteger { field, value }),
        }
    }

    fn within<'a>(self, least: u64, most: u64) -> Result<u64, Refusal<'a>> {
        let Self { field, value } = self;
        match u64::try_from(value) {
            Ok(number) if (least..=most).contains(&number) => Ok(number),
            _ => Err(Refusal::OutOfRange {
                field,
                least,
                most,
                value,
            }),
        }
    }
}

/// Parses a decimal integer with an optional sign.
fn integer(text: &[u8]) -> Option<i64> {
    /// The number of digits that always fit in an `i64`.
    const SAFE_DIGITS: usize = 18;
    let general = || std::str::from_utf8(text).ok()?.parse().ok();
    if text.is_empty() || text.len() > SAFE_DIGITS {
        return general();
    }
    let mut value = 0;
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return general();
        }
        value = value * 10 + i64::from(digit);
    }
    Some(value)
}

/// The content of a reply. The two commands write the fields in different orders.
#[derive(Debug)]
struct ThrottleAnswer {
    allowed: bool,
    limit: u64,
    remaining: u64,
    reset_after: Span,
    /// The time until a retry would succeed; `None` means never.
    retry_after: Option<Span>,
}

impl ThrottleAnswer {
    /// Summarises a decision for the limit with these parameters.
    fn of(decision: &Decision, outcome: Option<&Outcome>, parameters: LimitParameters) -> Self {
        let quota = parameters.burst + u64::from(parameters.dialect == Dialect::RedisCell);
        let allowed = *decision == Decision::Admitted;
        if let Some(outcome) = outcome {
            let Outcome {
                limit,
                remaining,
                reset_after,
                ..
            } = *outcome;
            return Self {
                allowed,
                limit,
                remaining,
                reset_after,
                retry_after: outcome.retry_after.span(),
            };
        }
        // No limit was evaluated, because the key is blocked or the store is full.
        let (remaining, retry_after) = match decision {
            Decision::Admitted => (quota, Some(Span::ZERO)),
            Decision::Limited => (0, None),
            Decision::Blocked { retry_after, .. } | Decision::Full { retry_after } => {
                (0, retry_after.span())
            }
        };
        Self {
            allowed,
            limit: quota,
            remaining,
            reset_after: retry_after.unwrap_or_default(),
            retry_after,
        }
    }

    fn write(&self, dialect: Dialect, reply: &mut Reply<'_>) {
        let wait = match (self.allowed, dialect) {
            (false, _) => self.retry_after_secs(),
            (true, Dialect::RedisCell) => -1,
            (true, Dialect::Throttlecrab) => 0,
        };
        let reset_after = self.reset_after.as_secs_ceil();
        reply.array(5);
        reply.integer(i64::from(
            self.allowed == (dialect == Dialect::Throttlecrab),
        ));
        reply.count(self.limit);
        reply.count(self.remaining);
        match dialect {
            Dialect::RedisCell => {
                reply.integer(wait);
                reply.count(reset_after);
            }
            Dialect::Throttlecrab => {
                reply.count(reset_after);
                reply.integer(wait);
            }
        }
    }

    fn retry_after_secs(&self) -> i64 {
        let secs = |span: Span| i64::try_from(span.as_secs_ceil()).unwrap_or(i64::MAX);
        self.retry_after.map_or(-1, secs)
    }
}

#[cfg(test)]
mod tests {
    use super::integer;

    #[test]
    fn integers_are_parsed_like_the_standard_library_does() {
        let texts = [
            "0",
            "7",
            "-7",
            "+7",
            "007",
            "999999999999999999",
            "1000000000000000000",
            "9223372036854775807",
        ];
        for text in texts.into_iter().chain([
            "9223372036854775808",
            "-9223372036854775808",
            "",
            "-",
            "1.5",
            " 1",
            "1e3",
        ]) {
            assert_eq!(integer(text.as_bytes()), text.parse().ok(), "{text}");
        }
    }
}
