//! [`RedisStore`]: decisions over several keys, and the operator's commands.

mod cross_slot;
mod fast_path;
mod guard_reply;
mod reservation;
mod reserve;

pub(crate) use self::reservation::RenewalGuard;
pub use self::{
    guard_reply::{ReservationEnd, ReservationStatus},
    reservation::{GUARD_KEPT, RedisReservation},
    reserve::RedisReceipt,
};

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tidegate_core::{
    Charge, Decision, Effect, Outcome, RetryAfter, Span, Timestamp, has_repeated_key,
    remote_eval::Replay,
};
use tokio::runtime::Handle;

use self::{cross_slot::HashSlotGroup, fast_path::FastPathResult};
use crate::{
    Address, ConnectError, Redis, RedisSettings, Topology,
    call::{Call, Intent, OnLateReply, Reply, Script},
    conversion::{self, Conversion, Conversions},
    decode::{self, CheckReply},
    denial_hint::DenialHints,
    encode,
    error::StoreError,
    exec::{self, ExecError, Executor},
    layout, scripts,
};

/// The maximum number of attempts per decision. A decision starts over if other clients change
/// states that must be converted, or if a calendar window has ended.
pub(crate) const MAX_TRIES: usize = 8;

/// The decision after the last attempt. Nothing was charged, because other clients changed the same
/// keys during every attempt.
pub(crate) const CONTENDED: Decision = Decision::Full {
    retry_after: RetryAfter::After(Span::from_micros(100_000)),
};

/// How long a key outlives its state, in milliseconds. A time to live has a resolution of 1 ms,
/// whereas a state has a resolution of 1 µs, so a key without this margin could expire before its
/// state.
const SLACK_MS: u64 = 2;

/// How long a key outlives its state if the clock is pinned for tests. One day is enough: the
/// server expires keys by its own clock, which is unrelated to the pinned clock.
const PINNED_SLACK_MS: u64 = 86_400_000;

/// Value of the pinned instant that means that no instant is pinned.
const UNPINNED: u64 = u64::MAX;

/// A store that keeps its state in Redis or Valkey, so that a fleet of servers shares it.
///
/// Each decision uses the clock of the server that holds the keys. Clones share the connections of
/// the store.
#[derive(Clone, Debug)]
pub struct RedisStore {
    pub(crate) executor: Arc<dyn Executor>,
    prefix: Arc<[u8]>,
    pinned: Arc<AtomicU64>,
    /// The instant of the latest decision. Scripts cannot compute calendar windows, so each call
    /// sends the calendar windows near this instant.
    latest: Arc<AtomicU64>,
    pub(crate) denial_hints: Arc<DenialHints>,
    /// The callback for a late reply to a reservation.
    on_late_reserve: OnLateReply,
}

impl RedisStore {
    /// Creates a store on `redis`. The keys of the store begin with `prefix`, so that several
    /// stores can share a server.
    #[must_use]
    pub fn new(redis: Arc<Redis>, prefix: &str) -> Self {
        Self::with_executor(redis, prefix.as_bytes())
    }

    /// Connects to the single server at `url`, for example `redis://127.0.0.1:6379` or
    /// `redis+unix:///run/redis.sock`, on the runtime of the caller. The method is for command-line
    /// tools, not for servers, because a decision may take up to 5 s.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] if the URL is invalid, and [`StoreError::NotExecuted`] if the server
    /// cannot be reached or used.
    pub async fn connect(url: &str, prefix: &str) -> Result<Self, StoreError> {
        let (address, login) = Address::parse(url).map_err(StoreError::Refused)?;
        let settings = RedisSettings {
            login,
            timeout: Duration::from_secs(5),
            ..RedisSettings::new(Topology::Standalone(address))
        };
        let redis = Redis::start(settings, &Handle::current());
        let refused = |error: ConnectError| StoreError::NotExecuted(error.to_string());
        redis.wait_for_first_attempt().await.map_err(refused)?;
        Ok(Self::new(Arc::new(redis), prefix))
    }

    /// Creates a store that runs its scripts on `executor`.
    pub(crate) fn with_executor(executor: Arc<dyn Executor>, prefix: &[u8]) -> Self {
        Self {
            on_late_reserve: reserve::refund_on_late_reply(Arc::clone(&executor)),
            executor,
            prefix: prefix.into(),
            pinned: Arc::new(AtomicU64::new(UNPINNED)),
            latest: Arc::default(),
            denial_hints: Arc::default(),
        }
    }

    /// Returns a clone of the store that uses the server's clock instead of a pinned clock.
    #[must_use]
    pub fn unpinned(&self) -> Self {
        Self {
            pinned: Arc::new(AtomicU64::new(UNPINNED)),
            ..self.clone()
        }
    }

    /// Pins the clock for tests and simulations: later decisions are made at `now` instead of at
    /// the server's time. Pinning the clock to an earlier instant than before has no effect. While
    /// the clock is pinned, keys live a day longer than necessary.
    pub fn pin_clock(&self, now: Timestamp) {
        let _ = self
            .pinned
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
                (before == UNPINNED || before < now.as_micros()).then(|| now.as_micros())
            });
    }

    /// Decides `charges`: the store makes either all charges or none.
    ///
    /// Clears `outcomes` and fills it with one outcome per limit, in the order of the charges and
    /// their limits. `outcomes` stays empty if no limit was evaluated, because a key is blocked. If
    /// two charges have the same key, nothing is charged and the decision is
    /// [`Decision::UNDECIDABLE`].
    ///
    /// # Errors
    ///
    /// [`StoreError`] if no decision was made, or if it is unknown whether one was made.
    pub async fn check(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        self.decide(charges, effect, outcomes, None).await
    }

    /// Decides a request, which consists of `charges`. If `receipt` is given, the receipts of the
    /// charges are written into it.
    pub(crate) async fn decide(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        if charges.len() > 1 && has_repeated_key(charges) {
            outcomes.clear();
            return Ok(Decision::UNDECIDABLE);
        }
        if charges.len() > 1 && self.executor.is_cluster() {
            let groups = self.hash_slot_groups(charges);
            if groups.len() > 1 {
                return self
                    .check_across_hash_slots(charges, effect, &groups, outcomes, receipt)
                    .await;
            }
        }
        self.check_in_one_call(charges, effect, outcomes, receipt)
            .await
    }

    /// Decides a request whose keys are all accessible to one script call.
    async fn check_in_one_call(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        outcomes.clear();
        if effect == Effect::Refund {
            return self.refund(charges, outcomes).await;
        }
        let intent = match receipt {
            Some(_) => Intent::Reserve,
            None => Intent::from_effect(effect),
        };
        let mut conversions = Conversions::default();
        if let ([charge], Intent::Charge) = (charges, intent) {
            match self.try_fast_path(charge, outcomes).await? {
                FastPathResult::Decided(decision) => return Ok(decision),
                FastPathResult::UnknownHeader { now, value } => {
                    conversions = self.conversions(charges, vec![value], now, intent)?;
                }
                FastPathResult::Unsupported => {}
            }
        }
        for _ in 0..MAX_TRIES {
            let call = self.check_call(charges, intent, &conversions);
            match self.run_check(&call, charges.len()).await? {
                CheckReply::Blocked { now, charge, until } => {
                    return Ok(Decision::blocked(charge, until, now));
                }
                CheckReply::Outdated { now, values } if intent.can_store_conversion() => {
                    conversions = self.conversions(charges, values, now, intent)?;
                }
                CheckReply::OutsideCalendar { .. } => {}
                CheckReply::SplitHashSlot => {
                    let groups = HashSlotGroup::one_per_charge(charges);
                    return self
                        .check_across_hash_slots(charges, effect, &groups, outcomes, receipt)
                        .await;
                }
                CheckReply::Decided {
                    now,
                    values,
                    receipts,
                    ..
                } => {
                    if let Some(receipt) = receipt {
                        receipt.charges = receipts;
                    }
                    let replayed = self.replay(charges, &values, now, intent)?;
                    let decision = replayed.report(now, outcomes);
                    conversions.report_drain_times(charges, &values, outcomes);
                    return Ok(decision);
                }
                CheckReply::Outdated { now, values } => {
                    let replayed = self.replay(charges, &values, now, intent)?;
                    return Ok(replayed.report(now, outcomes));
                }
            }
        }
        Ok(CONTENDED)
    }

    /// If a value was stored under other parameters, converts the value to the parameters of its
    /// charge in `charges`. Clamps values written by a clock that was ahead.
    pub(crate) fn conversions(
        &self,
        charges: &[Charge<'_>],
        values: Vec<Vec<u8>>,
        now: Timestamp,
        intent: Intent,
    ) -> Result<Conversions, StoreError> {
        let converted = charges.iter().zip(values).map(|(charge, value)| {
            let stored = decode::stored_value(&self.key(charge.key), &value)?;
            let is_same = stored.encoded_states.starts_with(&encode::head(charge));
            let is_from_ahead = stored.is_from_ahead(charge, now);
            if stored.encoded_states.is_empty() || is_same && !is_from_ahead {
                return Ok(None);
            }
            let replay = stored.replay(charge, now, Effect::Charge);
            let (states, expires) = replay.states();
            let reserves = intent == Intent::Reserve || !stored.ledger.is_empty();
            let ledger = if !is_from_ahead {
                conversion::converted_ledger(&stored, now)
            } else if reserves || !is_same || charge.limits.has_slots() {
                conversion::clamped_ledger(charge, &stored, now)
            } else {
                Vec::new()
            };
            // An expired state is not kept, even if its refund ledger has not expired.
            let keep_until = if expires > now {
                expires.max(decode::kept_until(&ledger))
            } else {
                expires
            };
            let converted = encode::assemble(None, &ledger, &encode::value(charge, &states, now));
            Ok(Some(Conversion {
                stored: value,
                converted,
                keep_until: replay.is_exact().then_some(keep_until),
                drain_times: replay.drain_times().clone(),
            }))
        });
        converted.collect::<Result<_, _>>().map(Conversions)
    }

    /// Builds the call of the script `check` for charges whose keys share a hash slot.
    pub(crate) fn check_call(
        &self,
        charges: &[Charge<'_>],
        intent: Intent,
        conversions: &Conversions,
    ) -> Call {
        let keys = self.keys(charges);
        let mut args = vec![
            self.instant(),
            intent.name().as_bytes().to_vec(),
            self.slack_ms().to_string().into_bytes(),
        ];
        for charge in charges {
            args.push(encode::program(charge, self.latest_time()));
        }
        let on_late_reply = (intent == Intent::Reserve).then(|| self.on_late_reserve.clone());
        for conversion in &conversions.0 {
            args.extend(Conversion::args(conversion.as_ref()));
        }
        let kernels = charges
            .iter()
            .fold(0, |bits, charge| bits | encode::kernels(charge));
        let script = scripts::check(kernels);
        Call {
            script,
            keys,
            args,
            on_late_reply,
        }
    }

    /// Runs a call of the script `check` with `charges` charges.
    pub(crate) async fn run_check(
        &self,
        call: &Call,
        charges: usize,
    ) -> Result<CheckReply, StoreError> {
        let reply = match self.run_once(call).await {
            Err(ExecError::SplitHashSlot(_)) if charges > 1 => {
                return Ok(CheckReply::SplitHashSlot);
            }
            reply => reply.map_err(|error| error.into_store_error(call))?,
        };
        let reply = decode::check_reply(reply, charges).ok_or_else(StoreError::unexpected_reply)?;
        if let Some(now) = reply.now() {
            self.latest.store(now.as_micros(), Ordering::Relaxed);
        }
        Ok(reply)
    }

    /// Repeats the script's decision, based on the states that the script has returned.
    pub(crate) fn replay<'a>(
        &self,
        charges: &[Charge<'a>],
        values: &[Vec<u8>],
        now: Timestamp,
        intent: Intent,
    ) -> Result<ReplayedDecision<'a>, StoreError> {
        let effect = match intent {
            Intent::Look => Effect::Look,
            _ => Effect::Charge,
        };
        let mut replays = Vec::with_capacity(charges.len());
        for (charge, value) in charges.iter().zip(values) {
            let stored = decode::stored_value(&self.key(charge.key), value)?;
            replays.push(stored.replay(charge, now, effect));
        }
        Ok(ReplayedDecision::new(replays, now, intent))
    }

    pub(crate) async fn call(
        &self,
        script: &'static Script,
        keys: Vec<Vec<u8>>,
        args: Vec<Vec<u8>>,
    ) -> Result<Reply, StoreError> {
        self.run(&Call {
            script,
            keys,
            args,
            on_late_reply: None,
        })
        .await
    }

    pub(crate) async fn run(&self, call: &Call) -> Result<Reply, StoreError> {
        self.run_once(call)
            .await
            .map_err(|error| error.into_store_error(call))
    }

    pub(crate) async fn run_once(&self, call: &Call) -> Result<Reply, ExecError> {
        exec::run_once(&*self.executor, call).await
    }

    pub(crate) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    pub(crate) fn key(&self, key: &[u8]) -> Vec<u8> {
        layout::state_key(&self.prefix, key)
    }

    pub(crate) fn keys(&self, charges: &[Charge<'_>]) -> Vec<Vec<u8>> {
        charges.iter().map(|charge| self.key(charge.key)).collect()
    }

    /// Groups the indices of `charges` so that one script call can access all keys of a group.
    pub(crate) fn group_by_hash_slot(&self, charges: &[Charge<'_>]) -> Vec<Vec<usize>> {
        if self.executor.is_cluster() {
            self.hash_slot_groups(charges)
                .into_iter()
                .map(HashSlotGroup::into_indices)
                .collect()
        } else {
            vec![(0..charges.len()).collect()]
        }
    }

    pub(crate) fn index_key(&self) -> Vec<u8> {
        layout::index_key(&self.prefix)
    }

    pub(crate) fn servers_key(&self) -> Vec<u8> {
        layout::servers_key(&self.prefix)
    }

    pub(crate) fn pinned(&self) -> Option<u64> {
        let pinned = self.pinned.load(Ordering::Relaxed);
        (pinned != UNPINNED).then_some(pinned)
    }

    /// Returns the instant argument for a script; empty to use the server's own time.
    pub(crate) fn instant(&self) -> Vec<u8> {
        let pinned = self.pinned().map(|now| now.to_string());
        pinned.unwrap_or_default().into_bytes()
    }

    pub(crate) fn latest_time(&self) -> Timestamp {
        let latest = || self.latest.load(Ordering::Relaxed);
        Timestamp::from_micros(self.pinned().unwrap_or_else(latest))
    }

    pub(crate) fn slack_ms(&self) -> u64 {
        if self.pinned().is_some() {
            PINNED_SLACK_MS
        } else {
            SLACK_MS
        }
    }
}

/// A script's decision, repeated with the memory store's algorithms.
pub(crate) struct ReplayedDecision<'a> {
    replays: Vec<Replay<'a>>,
    admitted: bool,
}

impl<'a> ReplayedDecision<'a> {
    pub(crate) fn new(mut replays: Vec<Replay<'a>>, now: Timestamp, intent: Intent) -> Self {
        let mut admitted = intent != Intent::Deny;
        for replay in &mut replays {
            admitted &= replay.evaluate(now);
        }
        if intent != Intent::Look {
            replays
                .iter_mut()
                .for_each(|replay| replay.apply(admitted, now));
        }
        Self { replays, admitted }
    }

    pub(crate) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) -> Decision {
        for replay in &self.replays {
            replay.report(now, outcomes);
        }
        Decision::of_limits(self.admitted)
    }
}
