//! Random steps, which are taken by a fleet and by its twin.

use std::cell::Cell;

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};
use tidegate_config::ReservationExpiry;
use tidegate_core::Effect;
use tidegate_limiter::reservations::{
    CounterSettlement, NotOutstanding, Reservation, ReservationError,
};
use tokio::runtime::Runtime;

use crate::{
    fleet::{Backend, Fleet, USERS},
    kind::{Change, Kind, LIMIT},
    twin::{Released, Renewal, Settlement, TICK, Twin},
};

const MILLISECOND: u64 = 1_000;

/// The time at the start of every sequence, in microseconds: 90 seconds before midnight, so that
/// the windows of all kinds end during a sequence. A sequence adds a fraction of a millisecond, so
/// that its instants have all 16 digits.
const START: u64 = 1_700_006_400_000_000 - 90_000 * MILLISECOND;

/// The longest time for which the servers do nothing. After 30 s, they would no longer refund.
const LONGEST_PAUSE: u64 = 20_000 * MILLISECOND;
/// The longest time to live of a reservation.
const LONGEST_TTL: u64 = 30_000 * MILLISECOND;

#[derive(Clone, Debug)]
enum Step {
    /// Reserves units of all rules for a user.
    Reserve {
        server: Index,
        user: usize,
        cost: u64,
        ttl: u64,
    },
    /// Reserves units of both counters.
    ReserveCounters {
        server: Index,
        cost: u64,
        ttl: u64,
    },
    /// Settles a reservation. It may have ended before.
    Settle {
        server: Index,
        which: Index,
        cost: FinalCost,
        with_former_token: bool,
    },
    /// Settles a reservation with a changed token, or with a token of the other kind.
    SettleForged {
        server: Index,
        which: Index,
        changed: Option<Index>,
    },
    /// Renews a reservation. It may have ended before.
    Renew {
        server: Index,
        which: Index,
        ttl: u64,
        with_former_token: bool,
    },
    /// Sends a request without a reservation.
    Check {
        server: Index,
        user: usize,
        cost: u64,
    },
    /// Time passes while the servers run.
    Pass(u64),
    /// Time passes while the servers are paused.
    Pause(u64),
    Reset {
        server: Index,
        key: Index,
    },
    /// Changes the limits of a rule, or restores them, if the kind of the limit allows the change.
    Change {
        rule: Index,
        change: Change,
    },
    /// The servers write the expiry queue, or the snapshot.
    Write,
    /// Kills a server, and starts another in its place. The server may write the expiry queue or
    /// the snapshot first.
    Kill {
        server: Index,
        writes: bool,
    },
}

/// The final cost of a reservation.
#[derive(Clone, Copy, Debug)]
enum FinalCost {
    Zero,
    Below,
    Same,
    Above(u64),
    Any(u64),
    /// The cost of the preceding settlement of the reservation.
    Again,
}

/// The changes of limits in a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Changes {
    /// A limit is doubled, and later restored. The twin is exact.
    OfCount,
    /// All changes.
    Any,
}

fn step(changes: Changes) -> impl Strategy<Value = Step> {
    let (weight, changes) = match changes {
        Changes::OfCount => (2, vec![Change::None, Change::Doubled]),
        // Some faults need a change that is undone, with a request before and after.
        Changes::Any => (8, [&[Change::None; 3][..], &Change::ALL].concat()),
    };
    let (user, ttl) = (|| 0..USERS.len(), || millis(1, LONGEST_TTL));
    let index = any::<Index>;
    prop_oneof![
        8 => (index(), user(), 1..=LIMIT + 2, ttl())
            .prop_map(|(server, user, cost, ttl)| Step::Reserve { server, user, cost, ttl }),
        6 => (index(), user(), 1..=5_u64, ttl())
            .prop_map(|(server, user, cost, ttl)| Step::Reserve { server, user, cost, ttl }),
        3 => (index(), 1..=LIMIT + 2, ttl())
            .prop_map(|(server, cost, ttl)| Step::ReserveCounters { server, cost, ttl }),
        10 => (index(), index(), final_cost(), prop::bool::weighted(0.2))
            .prop_map(|(server, which, cost, with_former_token)| {
                Step::Settle { server, which, cost, with_former_token }
            }),
        1 => (index(), index(), prop::option::of(index()))
            .prop_map(|(server, which, changed)| Step::SettleForged { server, which, changed }),
        4 => (index(), index(), ttl(), prop::bool::weighted(0.2))
            .prop_map(|(server, which, ttl, with_former_token)| {
                Step::Renew { server, which, ttl, with_former_token }
            }),
        4 => (index(), user(), 1..=LIMIT + 2)
            .prop_map(|(server, user, cost)| Step::Check { server, user, cost }),
        5 => millis(0, 15_000 * MILLISECOND).prop_map(Step::Pass),
        1 => millis(0, LONGEST_PAUSE - MILLISECOND).prop_map(Step::Pause),
        1 => (index(), index()).prop_map(|(server, key)| Step::Reset { server, key }),
        weight => (index(), prop::sample::select(changes))
            .prop_map(|(rule, change)| Step::Change { rule, change }),
        2 => Just(Step::Write),
        3 => (index(), prop::bool::weighted(0.7))
            .prop_map(|(server, writes)| Step::Kill { server, writes }),
    ]
}

/// Returns a time between `least` milliseconds and `longest` microseconds, in microseconds. The
/// expiry queue counts whole milliseconds.
fn millis(least: u64, longest: u64) -> impl Strategy<Value = u64> {
    (least..=longest / MILLISECOND).prop_map(|millis| millis * MILLISECOND)
}

fn final_cost() -> impl Strategy<Value = FinalCost> {
    prop_oneof![
        Just(FinalCost::Zero),
        Just(FinalCost::Below),
        Just(FinalCost::Same),
        (1..=5_u64).prop_map(FinalCost::Above),
        (0..=LIMIT + 5).prop_map(FinalCost::Any),
        Just(FinalCost::Again),
    ]
}

/// A sequence of steps, with the limits of the rules, what happens to the units of expired
/// reservations, and the instant of the start.
fn sequence(
    changes: Changes,
) -> impl Strategy<Value = (Vec<Kind>, ReservationExpiry, u64, Vec<Step>)> {
    let several = prop::sample::subsequence(Kind::ALL.to_vec(), 1..=3);
    let kinds = match changes {
        Changes::OfCount => several.boxed(),
        Changes::Any => {
            let one = prop::sample::select(Kind::ALL.to_vec()).prop_map(|kind| vec![kind]);
            prop_oneof![several, one, Just(vec![Kind::Slots])].boxed()
        }
    };
    let on_expiry = prop_oneof![
        4 => Just(ReservationExpiry::Refund),
        1 => Just(ReservationExpiry::Charge),
    ];
    let start = (0..MILLISECOND).prop_map(|fraction| START + fraction);
    (
        kinds,
        on_expiry,
        start,
        prop::collection::vec(step(changes), 1..=50),
    )
}

/// The tokens and the costs of a reservation.
struct Holder {
    token: String,
    former_token: Option<String>,
    cost: u64,
    settled_at: Option<u64>,
    released: u64,
}

/// A fleet and its twin.
struct Pair<'r> {
    fleet: Fleet<'r>,
    twin: Twin,
    snapshot: Option<Twin>,
    holders: Vec<Holder>,
    has_slots: bool,
}

impl Pair<'_> {
    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        if self.has_slots {
            // A former token identifies its slot by the instant.
            self.advance(MILLISECOND);
        }
        match step {
            Step::Reserve {
                server,
                user,
                cost,
                ttl,
            } => {
                let keys = self.fleet.keys_of(*user);
                let server = server.index(self.fleet.len());
                let is_admitted = self.admits(server, &keys, *cost);
                let reservation = self.fleet.reserve(server, *user, *cost, *ttl);
                prop_assert_eq!(reservation.is_some(), is_admitted);
                self.reserved(server, &keys, *cost, *ttl, reservation, false)?;
            }
            Step::ReserveCounters { server, cost, ttl } => {
                let (keys, server) = (self.fleet.counters(), server.index(self.fleet.len()));
                let is_admitted = self.admits(server, &keys, *cost);
                let reservation = self.fleet.reserve_counters(server, *cost, *ttl);
                prop_assert_eq!(reservation.is_some(), is_admitted);
                self.reserved(server, &keys, *cost, *ttl, reservation, true)?;
            }
            Step::Settle {
                server,
                which,
                cost,
                with_former_token,
            } => {
                self.settle(server, which, *cost, *with_former_token)?;
            }
            Step::SettleForged {
                server,
                which,
                changed,
            } => {
                self.settle_forged(server, which, changed.as_ref())?;
            }
            Step::Renew {
                server,
                which,
                ttl,
                with_former_token,
            } => self.renew(server, which, *ttl, *with_former_token)?,
            Step::Check { server, user, cost } => {
                let (keys, server) = (self.fleet.keys_of(*user), server.index(self.fleet.len()));
                let is_admitted = self.admits(server, &keys, *cost);
                for effect in [Effect::Peek, Effect::Charge] {
                    let got = self.fleet.check(server, *user, *cost, effect);
                    prop_assert_eq!(got, is_admitted, "{:?}", effect);
                }
                if is_admitted {
                    self.twin.charge(&keys, *cost);
                } else {
                    self.twin.deny(&keys);
                }
            }
            Step::Pass(micros) => self.pass(*micros),
            Step::Pause(micros) => {
                self.advance(*micros);
                self.run_tasks(*micros);
            }
            Step::Reset { server, key } => {
                let key = key.index(self.twin.key_count());
                self.fleet.reset(server.index(self.fleet.len()), key);
                self.twin.reset(key);
            }
            Step::Change { rule, change } => {
                let kinds = self.fleet.rule_kinds();
                let rule = rule.index(kinds.len());
                if kinds[rule].can_change(*change) {
                    self.has_slots |= kinds[rule].has_slots(*change);
                    self.fleet.change(rule, *change);
                    let first_key = rule * USERS.len();
                    let keys = first_key..first_key + USERS.len();
                    self.twin.change(keys, *change);
                }
            }
            Step::Write => self.write(),
            Step::Kill { server, writes } => {
                if *writes {
                    self.write();
                }
                self.kill(server.index(self.fleet.len()));
            }
        }
        Ok(())
    }

    /// Returns whether a request must be admitted. If it depends on the level of a bucket, the
    /// remaining units that the server reports decide.
    fn admits(&self, server: usize, keys: &[usize], cost: u64) -> bool {
        let fits = |key: &usize| self.twin.units(*key, cost) <= self.fleet.remaining(server, *key);
        let expected = self.twin.admits(keys, cost);
        expected.unwrap_or_else(|| keys.iter().all(fits))
    }

    fn advance(&mut self, micros: u64) {
        self.twin.now += micros;
        self.fleet.set_clocks(self.twin.now);
    }

    /// Runs the background tasks, `elapsed` microseconds after they last ran.
    fn run_tasks(&mut self, elapsed: u64) {
        self.fleet.run_tasks(elapsed);
        self.twin.expire(elapsed);
        self.twin.assert_expired(elapsed);
    }

    fn pass(&mut self, micros: u64) {
        let mut left = micros;
        while left > 0 {
            let step = left.min(TICK);
            self.advance(step);
            self.run_tasks(step);
            left -= step;
        }
    }

    fn write(&mut self) {
        if self.twin.is_shared {
            self.fleet.write_expiry_queues();
            self.twin.write();
        } else {
            self.fleet.save_snapshot();
            self.snapshot = Some(self.twin.clone());
        }
    }

    fn kill(&mut self, server: usize) {
        if self.twin.is_shared {
            self.fleet.kill(server);
            self.twin.kill(server);
            return;
        }
        // Without a snapshot, the server starts empty.
        if let Some(snapshot) = &self.snapshot {
            self.fleet.kill(server);
            self.twin.restore(snapshot);
            self.run_tasks(0);
        }
    }

    fn reserved(
        &mut self,
        server: usize,
        keys: &[usize],
        cost: u64,
        ttl: u64,
        reservation: Option<Reservation>,
        is_of_counters: bool,
    ) -> Result<(), TestCaseError> {
        let Some(Reservation { token, expires_in }) = reservation else {
            self.twin.deny(keys);
            return Ok(());
        };
        let ttl = self.twin.reserve(server, keys, cost, ttl, is_of_counters);
        prop_assert_eq!(expires_in.as_micros(), ttl);
        self.holders.push(Holder {
            token,
            former_token: None,
            cost,
            settled_at: None,
            released: 0,
        });
        Ok(())
    }

    fn settle(
        &mut self,
        server: &Index,
        which: &Index,
        cost: FinalCost,
        with_former_token: bool,
    ) -> Result<(), TestCaseError> {
        if self.holders.is_empty() {
            return Ok(());
        }
        let (server, which) = (
            server.index(self.fleet.len()),
            which.index(self.holders.len()),
        );
        let holder = &mut self.holders[which];
        let cost = match cost {
            FinalCost::Zero => 0,
            FinalCost::Below => holder.cost - 1,
            FinalCost::Same => holder.cost,
            FinalCost::Above(more) => holder.cost + more,
            FinalCost::Any(cost) => cost,
            FinalCost::Again => holder.settled_at.unwrap_or(holder.cost),
        };
        let former = holder.former_token.as_ref().filter(|_| with_former_token);
        let token = former.unwrap_or(&holder.token).clone();
        let expected = self.twin.settle(which, cost);
        if let Settlement::Settled(..) = expected {
            holder.settled_at = Some(cost);
        }
        let reserved = holder.cost;
        if self.twin.is_of_counters(which) {
            match (expected, self.fleet.settle_counters(server, &token, cost)) {
                (Settlement::Settled(..), CounterSettlement::Settled(counters)) => {
                    let mut charged = counters.iter().map(|counter| counter.charged);
                    prop_assert!(charged.all(|charged| charged == cost.min(reserved)));
                }
                (
                    Settlement::Repeated | Settlement::SettledBefore | Settlement::Forgotten,
                    CounterSettlement::SettledBefore,
                )
                | (
                    Settlement::Forgotten | Settlement::NotOutstanding,
                    CounterSettlement::NotOutstanding,
                ) => {}
                (expected, got) => prop_assert!(false, "expected {expected:?}, got {got:?}"),
            }
            return Ok(());
        }
        match (expected, self.fleet.settle(server, &token, cost)) {
            (Settlement::Settled(charged, released), Ok(settled)) => {
                let charged = charged.least..=charged.most;
                prop_assert!(
                    charged.contains(&settled.settled),
                    "{settled:?} {charged:?}"
                );
                let unused = reserved.saturating_sub(cost);
                let are_released = match released {
                    Released::All => settled.released == unused,
                    Released::Nothing => settled.released == 0,
                    Released::Either => [0, unused].contains(&settled.released),
                };
                prop_assert!(are_released, "{settled:?} {released:?}");
                holder.released = settled.released;
                prop_assert_eq!(settled.over, cost.saturating_sub(reserved));
            }
            (Settlement::Repeated, Ok(settled)) => {
                let reply = (settled.settled, settled.released);
                prop_assert_eq!(reply, (cost, holder.released));
            }
            (
                Settlement::SettledBefore | Settlement::Forgotten | Settlement::NotOutstanding,
                Err(ReservationError::NotOutstanding(_)),
            ) => {}
            (expected, got) => prop_assert!(false, "expected {expected:?}, got {got:?}"),
        }
        Ok(())
    }

    fn settle_forged(
        &mut self,
        server: &Index,
        which: &Index,
        changed: Option<&Index>,
    ) -> Result<(), TestCaseError> {
        if self.holders.is_empty() {
            return Ok(());
        }
        let (server, which) = (
            server.index(self.fleet.len()),
            which.index(self.holders.len()),
        );
        let mut token = self.holders[which].token.clone().into_bytes();
        let mut is_of_counters = self.twin.is_of_counters(which);
        match changed {
            Some(at) => {
                // The last character has unused bits.
                let byte = &mut token[at.index(self.holders[which].token.len() - 1)];
                *byte = if *byte == b'A' { b'B' } else { b'A' };
            }
            None => is_of_counters = !is_of_counters,
        }
        let token = String::from_utf8(token).unwrap();
        if is_of_counters {
            let settled = self.fleet.settle_counters(server, &token, 0);
            prop_assert_eq!(settled, CounterSettlement::NotOutstanding);
        } else {
            let settled = self.fleet.settle(server, &token, 0);
            prop_assert_eq!(settled, Err(ReservationError::Invalid));
        }
        Ok(())
    }

    fn renew(
        &mut self,
        server: &Index,
        which: &Index,
        ttl: u64,
        with_former_token: bool,
    ) -> Result<(), TestCaseError> {
        if self.holders.is_empty() {
            return Ok(());
        }
        let (server, which) = (
            server.index(self.fleet.len()),
            which.index(self.holders.len()),
        );
        let holder = &mut self.holders[which];
        let former = holder.former_token.as_ref().filter(|_| with_former_token);
        let token = former.unwrap_or(&holder.token).clone();
        let renewed = self.fleet.renew(server, &token, ttl);
        if self.twin.is_of_counters(which) {
            prop_assert_eq!(renewed, Err(ReservationError::Invalid));
            return Ok(());
        }
        let slot_lost = ReservationError::NotOutstanding(NotOutstanding::SlotLost);
        let is_slot_lost = renewed.as_ref().is_err_and(|error| *error == slot_lost);
        match (self.twin.renew(server, which, ttl, is_slot_lost), renewed) {
            (Renewal::Renewed(ttl), Ok(renewed)) => {
                prop_assert_eq!(renewed.expires_in.as_micros(), ttl);
                let former = std::mem::replace(&mut holder.token, renewed.token);
                holder.former_token = Some(former);
            }
            (Renewal::SlotLost, Err(error)) if error == slot_lost => {}
            (Renewal::NotOutstanding, Err(ReservationError::NotOutstanding(_))) => {}
            (expected, got) => prop_assert!(false, "expected {expected:?}, got {got:?}"),
        }
        Ok(())
    }

    /// Compares the remaining units of every key. The servers take turns.
    fn compare(&self, number: usize) -> Result<(), TestCaseError> {
        self.twin.assert_limits();
        for key in 0..self.twin.key_count() {
            let expected = self.twin.remaining(key);
            let got = self.fleet.remaining((number + key) % self.fleet.len(), key);
            let range = expected.least..=expected.most;
            prop_assert!(
                range.contains(&got),
                "key {}: {} is not in {:?}",
                key,
                got,
                range
            );
        }
        Ok(())
    }
}

/// Takes `cases` random sequences of steps.
pub(crate) fn compare(runtime: &Runtime, backend: &Backend, changes: Changes, cases: u32) {
    let default = ProptestConfig::default();
    let scaled = u64::from(cases) * u64::from(default.cases) / 256;
    let config = ProptestConfig {
        cases: u32::try_from(scaled).unwrap_or(u32::MAX),
        failure_persistence: None,
        ..default
    };
    let number = Cell::new(0);
    let result =
        TestRunner::new(config).run(&sequence(changes), |(kinds, on_expiry, start, steps)| {
            number.set(number.get() + 1);
            let prefix = format!("t{}", number.get());
            let fleet = Fleet::start(runtime, backend, &kinds, on_expiry, prefix, start);
            let charges_expired = on_expiry == ReservationExpiry::Charge;
            let is_shared = backend.is_shared();
            let twin = Twin::new(fleet.kinds_of_keys(), is_shared, charges_expired, start);
            let mut pair = Pair {
                fleet,
                twin,
                snapshot: None,
                holders: Vec::new(),
                has_slots: kinds.contains(&Kind::Slots),
            };
            for (number, step) in steps.iter().enumerate() {
                let result = pair.take(step).and_then(|()| pair.compare(number));
                result.map_err(|error| {
                    TestCaseError::fail(format!(
                        "step {number} {step:?} at {}: {error}",
                        pair.twin.now
                    ))
                })?;
            }
            // All reservations expire, including those of killed servers.
            pair.pass(LONGEST_TTL + 12 * TICK);
            pair.compare(0)?;
            prop_assert!(pair.fleet.is_idle(), "a reservation is still outstanding");
            Ok(())
        });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}
