//! Changes that are computed here and written back if nothing changed there meanwhile: rare ones, which are not worth
//! a script of their own.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Span, Timestamp,
    remote::{Replay, expires},
};

use crate::{
    call::Intent,
    decode::{self, Found},
    encode,
    error::StoreError,
    scripts,
    store::{MAX_TRIES, RedisStore, Settled},
};

/// What is to stand under a key.
pub(crate) enum Amendment {
    /// What stands there.
    Keep,
    /// These bytes, nothing if there are none, until that instant or for ever.
    Write(Vec<u8>, Option<Timestamp>),
}

impl RedisStore {
    /// Reads the values of `keys`, which share a slot, asks `amend` what is to stand there instead, and writes it; begins
    /// again if another was faster.
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

    /// What stands under `key` now.
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

    /// Gives back what [`Effect::Refund`] says.
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
                let had_spent = found.held.is_some();
                let replay = Replay::open(charge, found.held.clone(), now, Effect::Refund);
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

    /// Forgets what `key` has spent; true if there was anything. A block on it stands. What stands there and was not written
    /// by this store is deleted.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when nothing was forgotten, or nobody knows.
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

    /// Puts the block of `until` on a key, or lifts the one that stands there; answers whether one stood.
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

/// The value for what a replay of what was `found` came to, under the block that stands.
fn rewritten(charge: &Charge<'_>, replay: &Replay<'_>, found: &Found, now: Timestamp) -> Amendment {
    let (held, expires) = replay.held();
    let state = encode::value(charge, &held);
    let ledger = if found.state.starts_with(&encode::head(charge)) {
        found.ledger.clone()
    } else {
        encode::converted_ledger(charge, now)
    };
    let kept_until = expires.max(if ledger.is_empty() {
        expires
    } else {
        now.after(Span::from_micros(encode::LEDGER_MICROS))
    });
    let block = found.standing_block(now);
    let lasts = match block {
        None => Some(kept_until),
        Some(until) => until.map(|until| until.max(kept_until)),
    };
    Amendment::Write(encode::sealed(block, &ledger, &state), lasts)
}
