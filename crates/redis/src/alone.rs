//! The commonest decisions, cut short: one charge on limits that a small script of their own decides.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Timestamp,
    remote::{self, Denials, Exact, Held, Member, Numbers, Replay},
};

use crate::{
    RedisStore, StoreError,
    call::{Intent, Script},
    decode::{self, Alone},
    encode, scripts,
    store::Settled,
};

/// The length of the head that the script of one schedule knows.
const SCHEDULE_HEAD_BYTES: usize = 5;

/// What became of a charge that was put to a script of its own.
pub(crate) enum Attempt {
    /// It was decided.
    Decided(Decision),
    /// It was not, because the value is not one that the script knows: what stands there, and the instant.
    Other(Timestamp, Vec<u8>),
    /// No such script decides these limits.
    Unsuited,
}

impl RedisStore {
    /// Decides a charge that a script of its own can decide.
    pub(crate) async fn check_alone(
        &self,
        charge: &Charge<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Attempt, StoreError> {
        let Some((script, numbers)) = script_of(charge) else {
            return Ok(Attempt::Unsuited);
        };
        let mut args = Vec::with_capacity(2 + numbers.len());
        args.push(encode::head(charge));
        args.extend(numbers.into_iter().map(String::into_bytes));
        args.extend(self.pinned().map(|now| now.to_string().into_bytes()));
        let reply = self.call(script, vec![self.key(charge.key)], args).await?;
        match decode::alone(reply).ok_or_else(StoreError::unreadable)? {
            Alone::Ahead(whole) => {
                // How far ahead is all that matters, so any instant will do.
                let now = Timestamp::default();
                let held = Held::Schedule(Exact { whole, part: 0 });
                let held = remote::terms(charge.limits).map(|terms| (terms, held.clone()));
                let replay = Replay::open(charge, Some(held.collect()), now, Effect::Charge);
                let settled = Settled::of(vec![replay], now, Intent::Charge);
                Ok(Attempt::Decided(settled.report(now, outcomes)))
            }
            Alone::Decided { now, value } => {
                let alone = std::slice::from_ref(charge);
                let settled = self.replay(alone, &[value], now, Intent::Charge)?;
                Ok(Attempt::Decided(settled.report(now, outcomes)))
            }
            Alone::Other { now, value } => {
                let found = decode::found(&self.key(charge.key), &value)?;
                Ok(match found.standing_block(now) {
                    Some(until) => Attempt::Decided(Decision::blocked(0, until, now)),
                    None => Attempt::Other(now, value),
                })
            }
        }
    }
}

/// The script that decides `charge`, and its numbers: that of one hard schedule of whole microseconds, that of several, and that
/// of a log that counts nothing that it denies.
fn script_of(charge: &Charge<'_>) -> Option<(&'static Script, Vec<String>)> {
    let members: Vec<Member<'_>> = remote::numbers(charge.limits, charge.cost).collect();
    let is_hard = |member: &Member<'_>| member.denials == Denials::Forgotten;
    if !members.iter().all(is_hard) {
        return None;
    }
    if let [
        Member {
            numbers: Numbers::Log { windows },
            ..
        },
    ] = members.as_slice()
    {
        let mut numbers = vec![charge.cost.units().to_string()];
        for (limit, span) in windows {
            numbers.extend([limit.to_string(), span.as_micros().to_string()]);
        }
        return Some((&scripts::LOG_ALONE, numbers));
    }
    let is_single = members.len() == 1;
    let mut numbers = Vec::with_capacity(1 + 2 * members.len());
    if is_single && encode::head(charge).len() != SCHEDULE_HEAD_BYTES {
        return None;
    }
    if !is_single {
        numbers.push(format!(">{}", "I7".repeat(members.len())));
    }
    for member in &members {
        let Numbers::Schedule {
            fraction: 1,
            lasting: Some(lasting),
            tau,
            queue,
        } = &member.numbers
        else {
            return None;
        };
        // Who waits for no longer than that ends no later than so long after it.
        let longest = charge.longest_wait.filter(|_| *queue);
        let latest = longest.map(|longest| longest.as_micros().saturating_add(lasting.whole));
        let tau = tau.whole.min(latest.unwrap_or(u64::MAX));
        numbers.extend([lasting.whole, tau].map(|whole| whole.to_string()));
    }
    let script = if is_single {
        &scripts::SCHEDULE_ALONE
    } else {
        &scripts::SCHEDULES_ALONE
    };
    Some((script, numbers))
}
