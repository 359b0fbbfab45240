//! `TIDEGATE.RESERVE`, `TIDEGATE.SETTLE` and `TIDEGATE.RENEW`: charges that are settled later.

use std::sync::Arc;

use futures_util::FutureExt as _;
use tidegate::rate_limiter::{CancelSignal, SlotTurn};
use tidegate_core::{
    Effect, Request, RequestError, RuleSet, Scratch, Span, Verdict,
    bounds::{MAX_COUNT, MAX_ENTRIES},
};
use tidegate_limiter::{
    ServerLimiter,
    entries::{normalize, rewritten},
    metrics::ListenerKind,
    reservations::{DEFAULT_TTL, Reservation, ReservationError, ReserveError},
};

use super::{
    super::{parse::Arguments, reply::Reply},
    Context, PendingCommand, PendingReply,
    check::{
        CheckCommand, CheckRefusal, CommandKind, OwnedRequest, VERDICT_PARTS, audited, number,
        render_parts, ttl,
    },
};

/// Runs `TIDEGATE.RESERVE [RAW] [COST n] [TTL ms] [WAIT ms] name value [name value …]`. Replies
/// with the six elements of `TIDEGATE.CHECK`, the token, and the milliseconds until the reservation
/// expires. The token is null and the time is -1 if the request is denied.
pub(super) fn reserve(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    match ReserveCommand::read(context, arguments) {
        Ok(reserve) => run(context, ReservationCommand::Reserve(reserve), reply),
        Err(refusal) => refusal.reply(context, "tidegate.reserve", reply),
    }
}

/// Runs `TIDEGATE.SETTLE token cost`. Replies with `[settled, released, over]`.
pub(super) fn settle(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let settle = number("cost", arguments.get(2).unwrap_or_default()).and_then(|cost| {
        if cost > MAX_COUNT {
            let problem = format!("must be from 0 to {MAX_COUNT}, got {cost}");
            return Err(RequestError::new("cost", problem));
        }
        let token = token(arguments)?;
        Ok(ReservationCommand::Settle { token, cost })
    });
    match settle {
        Ok(settle) => run(context, settle, reply),
        Err(error) => CheckRefusal::Request(error).reply(context, "tidegate.settle", reply),
    }
}

/// Runs `TIDEGATE.RENEW token ttl_ms`. Replies with `[token, expires_in_ms]`. The new token
/// replaces the old one.
pub(super) fn renew(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let renew = ttl(arguments.get(2).unwrap_or_default()).and_then(|ttl| {
        let token = token(arguments)?;
        Ok(ReservationCommand::Renew { token, ttl })
    });
    match renew {
        Ok(renew) => run(context, renew, reply),
        Err(error) => CheckRefusal::Request(error).reply(context, "tidegate.renew", reply),
    }
}

fn token(arguments: Arguments<'_>) -> Result<String, RequestError> {
    let token = std::str::from_utf8(arguments.get(1).unwrap_or_default());
    let token = token.map_err(|_| RequestError::new("reservation", "is not UTF-8"))?;
    Ok(token.to_owned())
}

/// Runs a reservation command. With the memory store, replies immediately unless the command can
/// wait. In all other cases, the reply is pending.
fn run(context: &mut Context<'_>, command: ReservationCommand, reply: &mut Reply<'_>) {
    if context.limiter.redis_store().is_some() || command.can_wait() {
        let later = PendingCommand::Reservation(command);
        context.pending.push(PendingReply::new(later, reply));
        return;
    }
    // With the memory store, the future is ready when it is first polled.
    let answered = command.answer(context.limiter, reply).now_or_never();
    debug_assert!(answered.is_some(), "the memory store never waits");
}

/// A command that makes, settles or renews a reservation.
#[derive(Debug)]
pub(in crate::listener::resp) enum ReservationCommand {
    Reserve(ReserveCommand),
    Settle { token: String, cost: u64 },
    Renew { token: String, ttl: Span },
}

/// The arguments of `TIDEGATE.RESERVE`.
#[derive(Debug)]
pub(in crate::listener::resp) struct ReserveCommand {
    request: OwnedRequest,
    ttl: Span,
    wait: Span,
    /// The signal that cancels the wait for a concurrency slot.
    signal: Arc<CancelSignal>,
}

impl ReserveCommand {
    fn read(context: &Context<'_>, arguments: Arguments<'_>) -> Result<Self, CheckRefusal> {
        let command = CheckCommand::read(arguments.skip(1), CommandKind::Reserve)?;
        let mut room = [("", ""); MAX_ENTRIES];
        let entries = command.entries(&mut room)?;
        Request::new(entries, command.cost)?;
        let limiter = context.limiter;
        let replaced = normalize(limiter.trust(), &limiter.rules(), command.spelling, entries)?;
        let normalized = rewritten(entries, &replaced);
        Ok(Self {
            request: OwnedRequest::new(&normalized, command.cost),
            ttl: command.ttl.unwrap_or(DEFAULT_TTL),
            wait: command.wait,
            signal: Arc::default(),
        })
    }

    async fn answer(self, limiter: &ServerLimiter, reply: &mut Reply<'_>) {
        let entries = self.request.entries();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let request = match Request::new(&entries, self.request.cost) {
            Ok(request) => request,
            Err(error) => return reject(limiter, reply, format_args!("ERR {error}")),
        };
        let turn = SlotTurn::new(Effect::Charge, self.wait).with_signal(Some(&self.signal));
        let finish =
            |rules: &Arc<RuleSet>, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
                limiter.observe_and_audit(audited(&request, rules, limiter.now()), verdict);
                reply.array(VERDICT_PARTS + 2);
                render_parts(verdict, reply);
                match reservation {
                    Some(reservation) => {
                        reply.bulk(reservation.token.as_bytes());
                        reply.count(reservation.expires_in.as_millis_ceil());
                    }
                    None => {
                        reply.null();
                        reply.integer(-1);
                    }
                }
            };
        let reserved = limiter.reserve(&rules, &mut scratch, &request, self.ttl, turn, finish);
        match reserved.await {
            Ok(()) => {}
            Err(error @ ReserveError::TooMany(1..)) => {
                reject(limiter, reply, format_args!("BUSY {error}"));
            }
            Err(error) => reject(limiter, reply, format_args!("ERR {error}")),
        }
    }
}

impl ReservationCommand {
    /// Returns whether the command can wait for a concurrency slot.
    pub(super) fn can_wait(&self) -> bool {
        self.signal().is_some()
    }

    /// Returns the signal that cancels the command's wait, if it can wait.
    pub(super) fn signal(&self) -> Option<&Arc<CancelSignal>> {
        match self {
            Self::Reserve(reserve) if reserve.wait > Span::ZERO => Some(&reserve.signal),
            _ => None,
        }
    }

    pub(in crate::listener::resp) fn heap_bytes(&self) -> usize {
        match self {
            Self::Reserve(reserve) => reserve.request.heap_bytes(),
            Self::Settle { token, .. } | Self::Renew { token, .. } => token.capacity(),
        }
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &ServerLimiter,
        reply: &mut Reply<'_>,
    ) {
        match self {
            Self::Reserve(reserve) => reserve.answer(limiter, reply).await,
            Self::Settle { token, cost } => match limiter.settle_reservation(&token, cost).await {
                Ok(settled) => {
                    reply.array(3);
                    reply.count(settled.settled);
                    reply.count(settled.unused);
                    reply.count(settled.over);
                }
                Err(error) => reject_token(limiter, reply, &error),
            },
            Self::Renew { token, ttl } => match limiter.renew_reservation(&token, ttl).await {
                Ok(renewed) => {
                    reply.array(2);
                    reply.bulk(renewed.token.as_bytes());
                    reply.count(renewed.expires_in.as_millis_ceil());
                }
                Err(error) => reject_token(limiter, reply, &error),
            },
        }
    }
}

fn reject_token(limiter: &ServerLimiter, reply: &mut Reply<'_>, error: &ReservationError) {
    let code = match error {
        ReservationError::Invalid => "ERR",
        ReservationError::NotOutstanding(_) => "NOTOUTSTANDING",
        ReservationError::Unavailable(_) | ReservationError::Moved => "TRYAGAIN",
    };
    reject(limiter, reply, format_args!("{code} {error}"));
}

fn reject(limiter: &ServerLimiter, reply: &mut Reply<'_>, error: std::fmt::Arguments<'_>) {
    limiter.metrics().count_bad_request(ListenerKind::Resp);
    reply.error(error);
}
