//! Read-modify-write for rare changes that are not worth a script of their own. The new value is
//! computed here, and written only if the stored value has not changed in between.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Timestamp,
    remote_eval::{Replay, expires},
};

use crate::{
    call::Intent,
    decode::{self, Found},
    encode,
    error::StoreError,
    scripts,
    store::{MAX_TRIES, RedisStore, Settled},
};

/// The change to the value of a key.
pub(crate) enum Amendment {
    /// Leave it unchanged.
    Keep,
    /// Write these bytes, or delete the key if there are none. The value expires at this instant,
    /// or never if `None`.
    Write(Vec<u8>, Option<Timestamp>),
}

impl RedisStore {
    /// Reads the values of `keys`, which must share a cluster slot, lets `amend` compute the new
    /// ones, and writes them. Starts over, up to `MAX_TRIES` times, if another client has changed a
    /// value in between.
    pub(crate) async fn amend<T>(
        &self,
        keys: Vec<Vec<u8>>,
        mut amend: impl FnMut(Timestamp, Vec<Found>) -> (Vec<Amendment>, T) + Send,
    ) -> Result<T, StoreError> {
        for _ in 0..MAX_TRIES {
            let (now, values) = self.values(&keys).await?;
            let found: Result<Vec<Found>, StoreError> = keys
                .iter()
                .zip(&values)
                .map(|(key, value)| decode::found(key, value))
                .collect();
            let (amendments, answer) = amend(now, found?);
            let mut args = Vec::with_capacity(3 * keys.len());
            for (value, amendment) in values.into_iter().zip(amendments) {
                args.push(value);
                let (bytes, millis) = match amendment {
                    Amendment::Keep => (Vec::new(), "-1".to_owned()),
                    Amendment::Write(bytes, None) => (bytes, "0".to_owned()),
                    Amendment::Write(bytes, Some(until)) => {
                        let millis = until.since(now).as_millis_ceil() + self.slack_ms();
                        (bytes, millis.to_string())
                    }
                };
                args.push(bytes);
                args.push(millis.into_bytes());
            }
            let reply = self.call(&scripts::REPLACE, keys.clone(), args).await?;
            if decode::integer(&reply) == Some(1) {
                return Ok(answer);
            }
        }
        Err(StoreError::overtaken())
    }

    /// Returns the server's time and the value stored under `key`.
    pub(crate) async fn look_at(&self, key: &[u8]) -> Result<(Timestamp, Found), StoreError> {
        let key = self.key(key);
        let (now, values) = self.values(std::slice::from_ref(&key)).await?;
        Ok((now, decode::found(&key, &values.concat())?))
    }

    async fn values(&self, keys: &[Vec<u8>]) -> Result<(Timestamp, Vec<Vec<u8>>), StoreError> {
        let now = self.instant();
        let reply = self.call(&scripts::READ, keys.to_vec(), vec![now]).await?;
        decode::values(reply, keys.len()).ok_or_else(StoreError::unreadable)
    }

    /// Applies [`Effect::Refund`] to the keys of `charges`.
    pub(crate) async fn refund(
        &self,
        charges: &[Charge<'_>],
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        let amend = |now: Timestamp, found: Vec<Found>| {
            outcomes.clear();
            let mut amendments = Vec::with_capacity(charges.len());
            let mut replays = Vec::with_capacity(charges.len());
            for (charge, found) in charges.iter().zip(found) {
                let had_spent = found.held.is_some() && !is_lost(charge, &found, now);
                let replay = found.replay(charge, now, Effect::Refund);
                amendments.push(if had_spent {
                    rewritten(charge, &replay, &found, now)
                } else {
                    Amendment::Keep
                });
                replays.push(replay);
            }
            let decision = Settled::of(replays, now, Intent::Look).report(now, outcomes);
            (amendments, decision)
        };
        self.amend(self.keys(charges), amend).await
    }

    /// Forgets what `key` has spent, and returns true if there was anything. A block on the key
    /// stays. A value that was not written by this store is deleted.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if nothing was forgotten, or if that is unknown.
    pub async fn reset(&self, key: &[u8]) -> Result<bool, StoreError> {
        let amend = |now: Timestamp, mut found: Vec<Found>| {
            let found = found.pop().unwrap_or_default();
            let had_spent = found.states().is_some_and(|held| expires(&held) > now);
            let amendment = match found.standing_block(now) {
                Some(until) => Amendment::Write(encode::sealed(Some(until), &[], &[]), until),
                None => Amendment::Write(Vec::new(), Some(now)),
            };
            (vec![amendment], had_spent)
        };
        let keys = vec![self.key(key)];
        match self.amend(keys.clone(), amend).await {
            Err(StoreError::Foreign { .. }) => {
                self.call(&scripts::FORGET, keys, Vec::new()).await?;
                Ok(true)
            }
            reset => reset,
        }
    }

    /// Blocks a key until the instant in `block` (`Some(None)`: without an end), or lifts its block
    /// if `block` is `None`. Returns whether the key was blocked before.
    pub(crate) async fn enforce(
        &self,
        key: &[u8],
        block: Option<Option<Timestamp>>,
    ) -> Result<bool, StoreError> {
        let amend = |now: Timestamp, mut found: Vec<Found>| {
            let found = found.pop().unwrap_or_default();
            let stood = found.standing_block(now).is_some();
            let spent_until = found.states().map_or(now, |held| expires(&held));
            let kept_until = spent_until.max(found.ledger_until());
            let sealed = |block| encode::sealed(block, &found.ledger, &found.state);
            let amendment = match block {
                None if found.block.is_none() => Amendment::Keep,
                None if kept_until <= now => Amendment::Write(Vec::new(), Some(now)),
                None => Amendment::Write(sealed(None), Some(kept_until)),
                Some(until) => {
                    let lasts = until.map(|until| until.max(kept_until));
                    Amendment::Write(sealed(Some(until)), lasts)
                }
            };
            (vec![amendment], stood)
        };
        self.amend(vec![self.key(key)], amend).await
    }
}

/// Returns whether the conversion of `found` to the limits of `charge` keeps nothing of it. A refund
/// then leaves the value as it is, for the limits that it was stored under.
fn is_lost(charge: &Charge<'_>, found: &Found, now: Timestamp) -> bool {
    !found.state.starts_with(&encode::head(charge))
        && found.states().is_some_and(|held| expires(&held) > now)
        && found.replay(charge, now, Effect::Look).states().1 <= now
}

/// Returns the value after `replay`, which started from `found`. A block that is still in force is
/// kept.
fn rewritten(charge: &Charge<'_>, replay: &Replay<'_>, found: &Found, now: Timestamp) -> Amendment {
    let (held, expires) = replay.states();
    let state = encode::value(charge, &held, now);
    let is_from_ahead = found.is_from_ahead(charge, now);
    let ledger = if is_from_ahead {
        encode::clamped_ledger(charge, found, now)
    } else if found.state.starts_with(&encode::head(charge)) {
        found.ledger.clone()
    } else {
        encode::converted_ledger(found, now)
    };
    let kept_until = expires.max(decode::kept_until(&ledger));
    let block = found.standing_block(now);
    let lasts = match block {
        None => Some(kept_until),
        Some(until) => until.map(|until| until.max(kept_until)),
    };
    Amendment::Write(encode::sealed(block, &ledger, &state), lasts)
}
