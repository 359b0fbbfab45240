//! Tests refunds in any order, while other clients charge and refund. With refunds, a limit must
//! never admit more requests than if the refunded charges had not been made.

#[path = "../../../tests/store/server.rs"]
#[allow(dead_code, reason = "the tests of the store use the rest")]
mod server;
#[path = "../../../../core/tests/proofs/strategies.rs"]
#[allow(dead_code, reason = "the proofs of core use the rest")]
mod strategies;

use proptest::{prelude::*, test_runner::TestRunner};
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Timestamp,
};
use tokio::runtime::Runtime;

use self::{server::Server, strategies::Kind};
use super::{CheckCall, refund_call};
use crate::{RedisStore, call::Intent, decode::CheckReply, store::Conversions};

#[derive(Clone, Debug)]
enum Step {
    /// Reserves a number of units, after a number of microseconds.
    Reserve(u64, u64),
    /// Refunds the reservation with this index, after a number of microseconds.
    Refund(usize, u64),
    /// Keeps a reservation, so that it is never refunded.
    Keep(usize),
}

/// A charge that is never refunded.
#[derive(Clone, Copy)]
struct KeptCharge {
    at: Timestamp,
    cost: u64,
}

/// A charge that is neither refunded nor kept yet.
struct Reservation {
    check: CheckCall,
    receipts: Vec<Vec<u8>>,
    charge: KeptCharge,
}

struct Trace<'r> {
    runtime: &'r Runtime,
    store: RedisStore,
    limits: Limits,
    now: u64,
    reserved: Vec<Reservation>,
    kept: Vec<KeptCharge>,
}

impl Trace<'_> {
    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge::new(b"key", &self.limits, Cost::new(cost).unwrap()).unwrap()
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Reserve(cost, later) => {
                self.pass(*later);
                let check = CheckCall {
                    call: self.store.check_call(
                        &[self.charge(*cost)],
                        Intent::Reserve,
                        &Conversions::default(),
                    ),
                    charges: 1,
                };
                let reply = self.runtime.block_on(check.run(&self.store));
                if let CheckReply::Decided {
                    admitted: true,
                    now,
                    receipts,
                    ..
                } = reply.unwrap()
                {
                    self.reserved.push(Reservation {
                        check,
                        receipts,
                        charge: KeptCharge {
                            at: now,
                            cost: *cost,
                        },
                    });
                }
            }
            Step::Refund(which, later) => {
                self.pass(*later);
                if !self.reserved.is_empty() {
                    let at = which % self.reserved.len();
                    self.refund(at);
                }
            }
            Step::Keep(which) => {
                if !self.reserved.is_empty() {
                    let reservation = self.reserved.remove(which % self.reserved.len());
                    self.kept.push(reservation.charge);
                }
            }
        }
    }

    fn refund(&mut self, at: usize) {
        let Reservation {
            mut check,
            receipts,
            ..
        } = self.reserved.remove(at);
        check.call.args[0] = self.now.to_string().into_bytes();
        let call = refund_call(&check.call.keys, &check.call.args, &receipts);
        self.runtime.block_on(self.store.run(&call)).unwrap();
    }

    fn pass(&mut self, micros: u64) {
        self.now += micros;
        self.store.pin_clock(Timestamp::from_micros(self.now));
    }

    /// Returns the state of the limit in Redis.
    fn limit_state(&self) -> Outcome {
        let (charges, mut outcomes) = ([self.charge(1)], Vec::new());
        let look = self.store.check(&charges, Effect::Look, &mut outcomes);
        self.runtime.block_on(look).unwrap();
        outcomes.remove(0)
    }

    /// Replays only the kept charges, on a fresh memory store, which must admit all of them.
    /// Returns the state of the limit after the replay.
    fn state_of_kept_charges(&self) -> Result<Outcome, TestCaseError> {
        let memory = MemoryStore::new(MemoryBounds::default());
        let mut outcomes = Vec::new();
        let mut kept = self.kept.clone();
        kept.sort_by_key(|charge| charge.at);
        for KeptCharge { at, cost } in kept {
            let decision = memory.check(&[self.charge(cost)], at, Effect::Charge, &mut outcomes);
            prop_assert_eq!(decision, Decision::Admitted, "{} at {:?}", cost, at);
        }
        let now = Timestamp::from_micros(self.now);
        memory.check(&[self.charge(1)], now, Effect::Look, &mut outcomes);
        Ok(outcomes.remove(0))
    }
}

/// Time between two steps. The time is usually much shorter than the time in which a unit drains.
/// In practice, the time between a charge and its refund is also that short.
fn later() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 3 => 0..=5_u64, 2 => 0..=40_u64, 1 => 0..=2_000_u64]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1..=4_u64, later()).prop_map(|(cost, later)| Step::Reserve(cost, later)),
        4 => (0..8_usize, later()).prop_map(|(which, later)| Step::Refund(which, later)),
        2 => (0..8_usize).prop_map(Step::Keep),
    ];
    prop::collection::vec(step, 1..=60)
}

/// A limit of `kind`, with up to 12 units and a period of up to 200 microseconds.
fn limit(kind: Kind) -> impl Strategy<Value = Limit> {
    (1..=12_u64, 1..=7_u64, 1..=200_u64, 1..=5_u32).prop_filter_map("sound", move |numbers| {
        let (count, per, period, buckets) = numbers;
        let rate = tidegate_core::Rate {
            count: per,
            period: tidegate_core::Span::from_micros(period),
        };
        Limit::new(kind.algorithm(count, rate, buckets)).ok()
    })
}

impl<'r> Trace<'r> {
    fn of(limit: Limit, runtime: &'r Runtime, store: &RedisStore) -> Self {
        let mut trace = Self {
            runtime,
            store: store.unpinned(),
            limits: Limits::new(vec![limit]).unwrap(),
            now: 1_767_225_600_000_000,
            reserved: Vec::new(),
            kept: Vec::new(),
        };
        trace.pass(0);
        trace
    }
}

fn check_kind(server: &Server, kind: Kind) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let store = runtime
        .block_on(RedisStore::connect(&server.url(), "tg"))
        .unwrap();
    let mut config = strategies::cases(60);
    config.failure_persistence = None;
    let traces = (limit(kind), steps(), any::<bool>());
    let result = TestRunner::new(config).run(&traces, |(limit, steps, keeps_any)| {
        server.command(&["FLUSHALL"]);
        let mut trace = Trace::of(limit, &runtime, &store);
        for step in steps
            .iter()
            .filter(|step| keeps_any || !matches!(step, Step::Keep(_)))
        {
            trace.run(step);
        }
        while !trace.reserved.is_empty() {
            trace.refund(0);
        }
        let (found, expected) = (trace.limit_state(), trace.state_of_kept_charges()?);
        prop_assert!(
            found.remaining <= expected.remaining,
            "{:?}, {:?}",
            found,
            expected
        );
        if counts_units(kind) {
            prop_assert_eq!(found.remaining, expected.remaining);
        }
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{kind:?}: {failure}");
    }
}

/// Returns whether all units of a charge can be identified and refunded, no matter how late the
/// refund is.
fn counts_units(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::EpochWindow
            | Kind::CalendarWindow
            | Kind::Log
            | Kind::Weighted
            | Kind::StrictBuckets
            | Kind::LooseBuckets
    )
}

/// Returns whether the first charge after a pause determines when the next refill or window begins.
/// With such a limit, the kept charges would have been admitted at other times if the first charge
/// had not been made.
fn has_own_grid(kind: Kind) -> bool {
    matches!(kind, Kind::Interval | Kind::FirstRequestWindow)
}

/// Runs `steps` on a GCRA limit with a unit of 100 microseconds. Returns how long the limit takes
/// to drain after the steps, in microseconds.
fn drain_micros(kind: Kind, steps: &[Step]) -> u64 {
    let server = Server::redis();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let store = runtime.block_on(RedisStore::connect(&server.url(), "tg"));
    let rate = tidegate_core::Rate {
        count: 1,
        period: tidegate_core::Span::from_micros(100),
    };
    let limit = Limit::new(kind.algorithm(10, rate, 1)).unwrap();
    let mut trace = Trace::of(limit, &runtime, &store.unwrap());
    steps.iter().for_each(|step| trace.run(step));
    trace.limit_state().reset_after.as_micros()
}

fn reserve(later: u64) -> Step {
    Step::Reserve(1, later)
}

fn refund_first(later: u64) -> Step {
    Step::Refund(0, later)
}

#[test]
fn a_charge_served_early_is_not_refunded() {
    // |── first ──|── second ──|   the first is refunded at 10, the second is done at 110, a third
    //   |─ second ─|   |── third ──|   arrives at 140 and finds the schedule empty
    let steps = [reserve(0), reserve(0), refund_first(10), reserve(130)];
    assert_eq!(drain_micros(Kind::Gcra, &steps), 100);
    let steps = [&steps[..], &[refund_first(10)]].concat();
    assert_eq!(drain_micros(Kind::Gcra, &steps), 90);
}

#[test]
fn a_queued_charge_is_refunded_in_full_however_late() {
    let steps = [reserve(0), Step::Keep(0), reserve(0)];
    let steps = [&steps[..], &[refund_first(90)]].concat();
    assert_eq!(drain_micros(Kind::Gcra, &steps), 10);
}

#[test]
fn a_refund_moves_no_queued_request_forward() {
    let two = [reserve(0), reserve(0)];
    let first_leaves = [&two[..], &[refund_first(0)]].concat();
    assert_eq!(drain_micros(Kind::Queue, &first_leaves), 200);
    assert_eq!(drain_micros(Kind::Meter, &first_leaves), 100);
    let last = Step::Refund(1, 0);
    let last_leaves = [&two[..], &[last]].concat();
    assert_eq!(drain_micros(Kind::Queue, &last_leaves), 100);
}

#[test]
fn a_refund_admits_no_more_than_without_the_charge() {
    for server in Server::each() {
        for kind in Kind::ALL.into_iter().filter(|kind| !has_own_grid(*kind)) {
            check_kind(&server, kind);
        }
    }
}
