//! `TIDEGATE.RESERVE`, `TIDEGATE.SETTLE` and `TIDEGATE.RENEW`: charges that are settled later.

use std::sync::Arc;

use futures_util::FutureExt as _;
use tidegate::rate_limiter::{CancelSignal, SlotTurn};
use tidegate_core::{
    Effect, Request, RequestError, RuleSet, Scratch, Span, Verdict, bounds::MAX_COUNT,
};
use tidegate_limiter::{
    ServerLimiter,
    metrics::ListenerKind,
    reservations::{DEFAULT_TTL, Reservation, ReservationError, ReserveError},
};

use super::{
    super::{parse::Arguments, reply::Reply},
    Context, PendingCommand, PendingReply,
    check::{
        CheckCommand, CheckRefusal, CommandKind, OwnedRequest, VERDICT_PARTS, audited, number_in,
        render_parts, ttl,
    },
};

/// Runs `TIDEGATE.RESERVE [RAW] [COST n] [TTL ms] [WAIT ms] name value [name value …]`. Replies
/// with the six elements of `TIDEGATE.CHECK`, the token, and the milliseconds until the reservation
/// expires. The token is null and the time is -1 if the request is denied.
pub(super) fn reserve(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let reserved = CheckCommand::read(arguments.skip(1), CommandKind::Reserve)
        .and_then(|command| begin_reserve(context, &command, reply));
    if let Err(refusal) = reserved {
        refusal.reply(context, "tidegate.reserve", reply);
    }
}

/// Makes a reservation. With the memory store, replies immediately unless the request can wait. If
/// the request can wait, the reply is pending.
fn begin_reserve(
    context: &mut Context<'_>,
    command: &CheckCommand<'_>,
    reply: &mut Reply<'_>,
) -> Result<(), CheckRefusal> {
    let limiter = context.limiter;
    let ttl = command.ttl.unwrap_or(DEFAULT_TTL);
    command.with_request(limiter, |rules, request| {
        if limiter.redis_store().is_some() || command.wait > Span::ZERO {
            let later = ReservationCommand::Reserve(PendingReserve {
                request: OwnedRequest::new(request.entries(), command.cost),
                ttl,
                wait: command.wait,
                signal: Arc::default(),
            });
            let later = PendingCommand::Reservation(later);
            context.pending.push(PendingReply::new(later, reply));
            return Ok(());
        }
        let call = ReserveCall {
            limiter,
            rules,
            request,
            ttl,
            turn: SlotTurn::at_once(),
        };
        reply_now(call.answer(&mut context.buffers.scratch, reply));
        Ok(())
    })
}

/// Runs `TIDEGATE.SETTLE token cost`. Replies with `[settled, released, over]`.
pub(super) fn settle(context: &mut Context<'_>, arguments: Arguments<'_>, reply: &mut Reply<'_>) {
    let cost = number_in("cost", arguments.get(2).unwrap_or_default(), 0..=MAX_COUNT);
    let settle = cost.and_then(|cost| {
        let token = token(arguments)?;
        Ok(TokenCommand::Settle { token, cost })
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
        Ok(TokenCommand::Renew { token, ttl })
    });
    match renew {
        Ok(renew) => run(context, renew, reply),
        Err(error) => CheckRefusal::Request(error).reply(context, "tidegate.renew", reply),
    }
}

fn token(arguments: Arguments<'_>) -> Result<&str, RequestError> {
    let token = std::str::from_utf8(arguments.get(1).unwrap_or_default());
    token.map_err(|_| RequestError::new("reservation", "is not UTF-8"))
}

/// Settles or renews a reservation. With Redis, the reply is pending.
fn run(context: &mut Context<'_>, command: TokenCommand<&str>, reply: &mut Reply<'_>) {
    if context.limiter.redis_store().is_some() {
        let later = ReservationCommand::Token(command.to_owned());
        let later = PendingCommand::Reservation(later);
        context.pending.push(PendingReply::new(later, reply));
        return;
    }
    reply_now(command.answer(context.limiter, reply));
}

/// Runs a command on the memory store.
fn reply_now(answer: impl Future<Output = ()>) {
    // With the memory store, the future is ready when it is first polled.
    let answered = answer.now_or_never();
    debug_assert!(answered.is_some(), "the memory store never waits");
}

/// A command that makes, settles or renews a reservation.
#[derive(Debug)]
pub(in crate::listener::resp) enum ReservationCommand {
    Reserve(PendingReserve),
    Token(TokenCommand<String>),
}

/// A command that settles or renews the reservation of a token. A command that is pending owns its
/// token.
#[derive(Debug)]
pub(in crate::listener::resp) enum TokenCommand<T> {
    Settle { token: T, cost: u64 },
    Renew { token: T, ttl: Span },
}

/// A reservation that is waiting for Redis or for a concurrency slot.
#[derive(Debug)]
pub(in crate::listener::resp) struct PendingReserve {
    request: OwnedRequest,
    ttl: Span,
    wait: Span,
    /// The signal that cancels the wait for a concurrency slot.
    signal: Arc<CancelSignal>,
}

impl PendingReserve {
    async fn answer(self, limiter: &ServerLimiter, reply: &mut Reply<'_>) {
        let entries = self.request.entries();
        let request = match Request::new(&entries, self.request.cost) {
            Ok(request) => request,
            Err(error) => return reject(limiter, reply, format_args!("ERR {error}")),
        };
        let call = ReserveCall {
            limiter,
            rules: &limiter.rules(),
            request: &request,
            ttl: self.ttl,
            turn: SlotTurn::new(Effect::Charge, self.wait).with_signal(Some(&self.signal)),
        };
        call.answer(&mut Scratch::default(), reply).await;
    }
}

/// A reservation that is being made.
struct ReserveCall<'r> {
    limiter: &'r ServerLimiter,
    rules: &'r Arc<RuleSet>,
    request: &'r Request<'r>,
    ttl: Span,
    turn: SlotTurn<'r>,
}

impl ReserveCall<'_> {
    async fn answer(self, scratch: &mut Scratch, reply: &mut Reply<'_>) {
        let Self {
            limiter,
            rules,
            request,
            ttl,
            turn,
        } = self;
        let finish =
            |rules: &Arc<RuleSet>, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
                limiter.observe_and_audit(audited(request, rules, limiter.now()), verdict);
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
        match limiter
            .reserve(rules, scratch, request, ttl, turn, finish)
            .await
        {
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
            Self::Token(TokenCommand::Settle { token, .. } | TokenCommand::Renew { token, .. }) => {
                token.capacity()
            }
        }
    }

    pub(in crate::listener::resp) async fn answer(
        self,
        limiter: &ServerLimiter,
        reply: &mut Reply<'_>,
    ) {
        match self {
            Self::Reserve(reserve) => reserve.answer(limiter, reply).await,
            Self::Token(command) => command.answer(limiter, reply).await,
        }
    }
}

impl TokenCommand<&str> {
    fn to_owned(&self) -> TokenCommand<String> {
        match *self {
            Self::Settle { token, cost } => TokenCommand::Settle {
                token: token.to_owned(),
                cost,
            },
            Self::Renew { token, ttl } => TokenCommand::Renew {
                token: token.to_owned(),
                ttl,
            },
        }
    }
}

impl<T: AsRef<str>> TokenCommand<T> {
    async fn answer(self, limiter: &ServerLimiter, reply: &mut Reply<'_>) {
        match self {
            Self::Settle { token, cost } => {
                match limiter.settle_reservation(token.as_ref(), cost).await {
                    Ok(settled) => {
                        reply.array(3);
                        reply.count(settled.settled);
                        reply.count(settled.released);
                        reply.count(settled.over);
                    }
                    Err(error) => reject_token(limiter, reply, &error),
                }
            }
            Self::Renew { token, ttl } => {
                match limiter.renew_reservation(token.as_ref(), ttl).await {
                    Ok(renewed) => {
                        reply.array(2);
                        reply.bulk(renewed.token.as_bytes());
                        reply.count(renewed.expires_in.as_millis_ceil());
                    }
                    Err(error) => reject_token(limiter, reply, &error),
                }
            }
        }
    }
}

fn reject_token(limiter: &ServerLimiter, reply: &mut Reply<'_>, error: &ReservationError) {
    let code = match error {
        ReservationError::Invalid | ReservationError::Off => "ERR",
        ReservationError::NotOutstanding(_) => "NOTOUTSTANDING",
        ReservationError::Unavailable(_) | ReservationError::Moved => "TRYAGAIN",
    };
    reject(limiter, reply, format_args!("{code} {error}"));
}

fn reject(limiter: &ServerLimiter, reply: &mut Reply<'_>, error: std::fmt::Arguments<'_>) {
    limiter.metrics().count_bad_request(ListenerKind::Resp);
    reply.error(error);
}
