//! Tests refunds in any order, while other clients charge and refund. The limit never admits more
//! than if the refunded charges had not been made.

#[path = "../../tests/store/server.rs"]
#[allow(dead_code, reason = "the tests of the store use the rest")]
mod server;
#[path = "../../../core/tests/proofs/strategies.rs"]
#[allow(dead_code, reason = "the proofs of core use the rest")]
mod strategies;

use proptest::{prelude::*, test_runner::TestRunner};
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Timestamp,
};
use tokio::runtime::Runtime;

use self::{server::Server, strategies::Kind};
use super::{Asked, give_back};
use crate::{RedisStore, call::Intent, decode::Checked, store::Conversions};

#[derive(Clone, Debug)]
enum Deed {
    /// Reserves this many units, after this many microseconds.
    Reserve(u64, u64),
    /// Refunds one of the reservations, after this many microseconds.
    GiveBack(usize, u64),
    /// Keeps one of the reservations, which is then never refunded.
    Keep(usize),
}

/// Charges that are neither refunded nor kept yet: the query, its receipts, and its instant and
/// cost.
type Reserved = (Asked, Vec<Vec<u8>>, (Timestamp, u64));

struct Trace<'r> {
    runtime: &'r Runtime,
    store: RedisStore,
    limits: Limits,
    now: u64,
    reserved: Vec<Reserved>,
    kept: Vec<(Timestamp, u64)>,
}

impl Trace<'_> {
    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge::new(b"key", &self.limits, Cost::new(cost).unwrap()).unwrap()
    }

    fn run(&mut self, deed: &Deed) {
        match deed {
            Deed::Reserve(cost, later) => {
                self.pass(*later);
                let asked = Asked {
                    call: self.store.question(
                        &[self.charge(*cost)],
                        Intent::Reserve,
                        &Conversions::default(),
                    ),
                    charges: 1,
                };
                let reply = self.runtime.block_on(asked.put(&self.store));
                if let Checked::Decided {
                    admitted: true,
                    now,
                    receipts,
                    ..
                } = reply.unwrap()
                {
                    self.reserved.push((asked, receipts, (now, *cost)));
                }
            }
            Deed::GiveBack(which, later) => {
                self.pass(*later);
                if !self.reserved.is_empty() {
                    let at = which % self.reserved.len();
                    self.give_back(at);
                }
            }
            Deed::Keep(which) => {
                if !self.reserved.is_empty() {
                    let (_, _, kept) = self.reserved.remove(which % self.reserved.len());
                    self.kept.push(kept);
                }
            }
        }
    }

    fn give_back(&mut self, at: usize) {
        let (mut asked, receipts, _) = self.reserved.remove(at);
        asked.call.args[0] = self.now.to_string().into_bytes();
        let call = give_back(&asked.call.keys, &asked.call.args, &receipts);
        self.runtime.block_on(self.store.run(&call)).unwrap();
    }

    fn pass(&mut self, micros: u64) {
        self.now += micros;
        self.store.pin_clock(Timestamp::from_micros(self.now));
    }

    /// Returns the state of the limit in Redis.
    fn standing(&self) -> Outcome {
        let (charges, mut outcomes) = ([self.charge(1)], Vec::new());
        let look = self.store.check(&charges, Effect::Look, &mut outcomes);
        self.runtime.block_on(look).unwrap();
        outcomes.remove(0)
    }

    /// Replays only the charges that were kept on a fresh memory store, which must admit all of
    /// them. Returns the state of the limit after that.
    fn without_the_rest(&self) -> Result<Outcome, TestCaseError> {
        let memory = MemoryStore::new(MemoryBounds::default());
        let mut outcomes = Vec::new();
        let mut kept = self.kept.clone();
        kept.sort_by_key(|(at, _)| *at);
        for (at, cost) in kept {
            let decision = memory.check(&[self.charge(cost)], at, Effect::Charge, &mut outcomes);
            prop_assert_eq!(decision, Decision::Admitted, "{} at {:?}", cost, at);
        }
        let now = Timestamp::from_micros(self.now);
        memory.check(&[self.charge(1)], now, Effect::Look, &mut outcomes);
        Ok(outcomes.remove(0))
    }
}

/// Time between two steps: usually much less than a unit takes to drain, like the time between a
/// charge and its refund.
fn later() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 3 => 0..=5_u64, 2 => 0..=40_u64, 1 => 0..=2_000_u64]
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        6 => (1..=4_u64, later()).prop_map(|(cost, later)| Deed::Reserve(cost, later)),
        4 => (0..8_usize, later()).prop_map(|(which, later)| Deed::GiveBack(which, later)),
        2 => (0..8_usize).prop_map(Deed::Keep),
    ];
    prop::collection::vec(deed, 1..=60)
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

fn prove(server: &Server, kind: Kind) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let store = runtime
        .block_on(RedisStore::connect(&server.url(), "tg"))
        .unwrap();
    let mut config = strategies::cases(60);
    config.failure_persistence = None;
    let traces = (limit(kind), deeds(), any::<bool>());
    let result = TestRunner::new(config).run(&traces, |(limit, deeds, keeps_any)| {
        server.command(&["FLUSHALL"]);
        let mut trace = Trace::of(limit, &runtime, &store);
        for deed in deeds
            .iter()
            .filter(|deed| keeps_any || !matches!(deed, Deed::Keep(_)))
        {
            trace.run(deed);
        }
        while !trace.reserved.is_empty() {
            trace.give_back(0);
        }
        let (found, expected) = (trace.standing(), trace.without_the_rest()?);
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

/// Whether all units of a charge can be found again and refunded, however late.
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

/// Whether the first charge after a pause determines when the next refill or window begins. If that
/// charge is refunded, the charges that were kept would have been admitted at other times.
fn has_a_grid_of_its_own(kind: Kind) -> bool {
    matches!(kind, Kind::Interval | Kind::FirstRequestWindow)
}

/// Runs `deeds`, with units of 100 microseconds, and returns how long the schedule then takes to
/// drain, in microseconds.
fn lasts(kind: Kind, deeds: &[Deed]) -> u64 {
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
    deeds.iter().for_each(|deed| trace.run(deed));
    trace.standing().reset_after.as_micros()
}

fn reserve(later: u64) -> Deed {
    Deed::Reserve(1, later)
}

fn give_back_first(later: u64) -> Deed {
    Deed::GiveBack(0, later)
}

#[test]
fn a_charge_served_early_is_not_refunded() {
    // |── first ──|── second ──|   the first is refunded at 10, the second is done at 110, a third
    //   |─ second ─|   |── third ──|   arrives at 140 and finds the schedule empty
    let deeds = [reserve(0), reserve(0), give_back_first(10), reserve(130)];
    assert_eq!(lasts(Kind::Gcra, &deeds), 100);
    let deeds = [&deeds[..], &[give_back_first(10)]].concat();
    assert_eq!(lasts(Kind::Gcra, &deeds), 90);
}

#[test]
fn a_queued_charge_is_refunded_in_full_however_late() {
    let deeds = [reserve(0), Deed::Keep(0), reserve(0)];
    let deeds = [&deeds[..], &[give_back_first(90)]].concat();
    assert_eq!(lasts(Kind::Gcra, &deeds), 10);
}

#[test]
fn a_refund_moves_no_queued_request_forward() {
    let two = [reserve(0), reserve(0)];
    let first_leaves = [&two[..], &[give_back_first(0)]].concat();
    assert_eq!(lasts(Kind::Queue, &first_leaves), 200);
    assert_eq!(lasts(Kind::Meter, &first_leaves), 100);
    let last = Deed::GiveBack(1, 0);
    let last_leaves = [&two[..], &[last]].concat();
    assert_eq!(lasts(Kind::Queue, &last_leaves), 100);
}

#[test]
fn a_refund_admits_no_more_than_without_the_charge() {
    for server in Server::each() {
        for kind in Kind::ALL
            .into_iter()
            .filter(|kind| !has_a_grid_of_its_own(*kind))
        {
            prove(&server, kind);
        }
    }
}
