//! Runs the same traces on the memory store and on the servers. All fields of all results must be
//! equal.

#[path = "../../../core/tests/proofs/strategies.rs"]
#[allow(dead_code, reason = "the proofs of core use the rest")]
pub(crate) mod strategies;

use std::{fmt::Debug, sync::Arc};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};
use tidegate_core::{
    Charge, Cost, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Receipt, Settlement,
    Span, Timestamp,
};
use tidegate_redis::{RedisReceipt, RedisStore};
use tokio::runtime::Runtime;

use self::strategies::{Ask, Kind};
use crate::{server::Server, support::RedisServer};

/// A rule with its own key.
#[derive(Clone, Debug)]
struct Rule {
    key: Vec<u8>,
    limits: Arc<Limits>,
    /// The limits before the latest change.
    former: Option<Vec<Limit>>,
    has_room: bool,
    longest_wait: Option<Span>,
}

/// Makes the limits elastic, if their kinds allow it.
fn elastic(limits: Vec<Limit>) -> Limits {
    let limits = Limits::new(limits).unwrap();
    limits.clone().stretching(50).unwrap_or(limits)
}

impl Rule {
    fn charge(&self, cost: u64) -> Charge<'_> {
        let stretched = self.limits.stretched().filter(|_| self.has_room);
        let limits = stretched.unwrap_or(&self.limits);
        let charge = Charge::new(&self.key, limits, Cost::new(cost).unwrap()).unwrap();
        Charge {
            longest_wait: self.longest_wait,
            ..charge
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Charges or peeks the rules whose bits are set in `rules`.
    Ask {
        rules: u8,
        ask: Ask,
    },
    /// Reserves units of the rules whose bits are set in `rules`, and keeps the receipts.
    Reserve {
        rules: u8,
        ask: Ask,
    },
    /// Settles one of the reservations, with this number of unused units per charge.
    Settle {
        which: Index,
        unused: u64,
    },
    /// Renews the leases of a reservation.
    Renew {
        which: Index,
    },
    Block {
        rule: Index,
        micros: u64,
    },
    Unblock {
        rule: Index,
    },
    Reset {
        rule: Index,
    },
    /// Changes the limits of a rule.
    Change {
        rule: Index,
        limits: Vec<Limit>,
    },
    /// Undoes the latest change of a rule.
    ChangeBack {
        rule: Index,
    },
}

fn limits() -> impl Strategy<Value = Vec<Limit>> {
    prop::collection::vec(
        strategies::any_kind().prop_flat_map(strategies::limit),
        1..=3,
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        20 => (1..8_u8, strategies::ask()).prop_map(|(rules, ask)| Step::Ask { rules, ask }),
        8 => (1..8_u8, strategies::ask()).prop_map(|(rules, ask)| Step::Reserve { rules, ask }),
        6 => settle(),
        6 => any::<Index>().prop_map(|which| Step::Renew { which }),
        1 => (any::<Index>(), 1..=1_000_000_u64)
            .prop_map(|(rule, micros)| Step::Block { rule, micros }),
        1 => any::<Index>().prop_map(|rule| Step::Unblock { rule }),
        1 => any::<Index>().prop_map(|rule| Step::Reset { rule }),
        2 => (any::<Index>(), limits()).prop_map(|(rule, limits)| Step::Change { rule, limits }),
        2 => any::<Index>().prop_map(|rule| Step::ChangeBack { rule }),
    ]
}

fn settle() -> impl Strategy<Value = Step> {
    let unused = prop_oneof![3 => Just(u64::MAX), 2 => 0..=4_u64, 1 => any::<u64>()];
    (any::<Index>(), unused).prop_map(|(which, unused)| Step::Settle { which, unused })
}

/// A trace: the rules, the start time, and the steps. Each rule consists of its limits and of
/// whether it is in shadow mode.
type Trace = (Vec<(Vec<Limit>, bool)>, u64, Vec<Step>);

/// A trace with up to three rules, each of any kind.
fn trace() -> impl Strategy<Value = Trace> {
    let rules = prop::collection::vec((limits(), prop::bool::weighted(0.2)), 1..=3);
    (
        rules,
        strategies::start(),
        prop::collection::vec(step(), 1..=40),
    )
}

/// A trace with a single rule of this kind, so that every kind is tested often enough.
fn trace_of(kind: Kind) -> impl Strategy<Value = Trace> {
    let rules = strategies::limit(kind).prop_map(|limit| vec![(vec![limit], false)]);
    let steps = prop::collection::vec(
        prop_oneof![
            12 => strategies::ask().prop_map(|ask| Step::Ask { rules: 1, ask }),
            8 => strategies::ask().prop_map(|ask| Step::Reserve { rules: 1, ask }),
            6 => settle(),
            6 => any::<Index>().prop_map(|which| Step::Renew { which }),
            1 => (any::<Index>(), strategies::limit(kind))
                .prop_map(|(rule, limit)| Step::Change { rule, limits: vec![limit] }),
            1 => any::<Index>().prop_map(|rule| Step::ChangeBack { rule }),
        ],
        1..=40,
    );
    (rules, strategies::start(), steps)
}

/// A reservation in both stores.
struct Reservation {
    /// The rules at the time of the reservation.
    rules: Vec<Rule>,
    /// The cost of each charge.
    cost: u64,
    memory_receipt: Receipt,
    redis_receipt: RedisReceipt,
}

/// A memory store and a Redis store whose clocks are set to the same time.
struct Pair<'r> {
    runtime: &'r Runtime,
    redis: RedisStore,
    memory: MemoryStore,
    rules: Vec<Rule>,
    now: u64,
    last: Vec<Outcome>,
    reserved: Vec<Reservation>,
}

impl Pair<'_> {
    fn run(&mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for (number, step) in steps.iter().enumerate() {
            let (expected, got) = self.both(step);
            prop_assert_eq!(got, expected, "deed {} {:?} at {}", number, step, self.now);
        }
        Ok(())
    }

    /// Runs a step in both stores. Returns the result of the memory store and the result of the
    /// server.
    fn both(&mut self, step: &Step) -> (String, String) {
        match step {
            Step::Ask { rules, ask } => return self.ask(*rules, ask, false),
            Step::Reserve { rules, ask } => return self.ask(*rules, ask, true),
            Step::Settle { which, unused } => return self.settle(which, *unused),
            Step::Renew { which } => return self.renew(which),
            _ => {}
        }
        let now = Timestamp::from_micros(self.now);
        if let Step::Block { .. } | Step::Unblock { .. } = step {
            self.redis.pin_clock(now);
        }
        match step {
            Step::Ask { .. } | Step::Reserve { .. } | Step::Settle { .. } | Step::Renew { .. } => {}
            Step::Block { rule, micros } => {
                let (key, span) = (&rule.get(&self.rules).key, Some(Span::from_micros(*micros)));
                let there = self
                    .runtime
                    .block_on(self.redis.block(key, span, "by hand"));
                return shown(self.memory.block(key, span, "by hand", now), there);
            }
            Step::Unblock { rule } => {
                let key = &rule.get(&self.rules).key;
                let there = self.runtime.block_on(self.redis.unblock(key));
                return shown(self.memory.unblock(key, now), there);
            }
            Step::Reset { rule } => {
                self.reset(rule.index(self.rules.len()));
            }
            Step::Change { rule, limits } => {
                self.change(rule.index(self.rules.len()), limits.clone());
            }
            Step::ChangeBack { rule } => {
                let at = rule.index(self.rules.len());
                if let Some(former) = self.rules[at].former.clone() {
                    self.change(at, former);
                }
            }
        }
        (String::new(), String::new())
    }

    /// Changes the limits of the rule with the index `at`.
    fn change(&mut self, at: usize, limits: Vec<Limit>) {
        let old = Arc::clone(&self.rules[at].limits);
        let new = elastic(limits).in_shadow(old.is_shadow());
        let rule = &mut self.rules[at];
        rule.former = Some(old.iter().cloned().collect());
        rule.limits = Arc::new(new.inheriting_from(&old));
    }

    /// Resets the key of rule `at`. Expired states may or may not have been deleted, so the results
    /// are not compared.
    fn reset(&mut self, at: usize) {
        let rule = &self.rules[at];
        self.memory.reset(&rule.key);
        self.runtime.block_on(self.redis.reset(&rule.key)).unwrap();
    }

    fn ask(&mut self, rules: u8, ask: &Ask, reserves: bool) -> (String, String) {
        let last = (!self.last.is_empty()).then(|| ask.of.get(&self.last));
        let cost = ask.price.units(last);
        let now = ask.step.from(self.now, last);
        let chosen = self
            .rules
            .iter()
            .enumerate()
            .filter(|(at, _)| rules >> at & 1 == 1);
        let mut chosen: Vec<Rule> = chosen.map(|(_, rule)| rule.clone()).collect();
        if chosen.is_empty() {
            chosen.push(self.rules[0].clone());
        }
        let has_room = ask.of.index(3) == 0;
        // The longest wait that the request accepts: no wait, half of the time until the reset, the
        // full time until the reset, one microsecond less than the full time, or any wait.
        let ahead = last.map_or(Span::ZERO, |last| last.reset_after).as_micros();
        let longest_wait = match ask.of.index(7) {
            0 => Some(0),
            1 => Some(ahead / 2),
            2 => Some(ahead),
            3 => Some(ahead.saturating_sub(1)),
            _ => None,
        };
        for rule in &mut chosen {
            rule.has_room = has_room;
            rule.longest_wait = longest_wait.map(Span::from_micros);
        }
        let charges: Vec<Charge<'_>> = chosen.iter().map(|rule| rule.charge(cost)).collect();
        let instant = Timestamp::from_micros(now);
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        self.redis.pin_clock(instant);
        let answers = if reserves {
            let (here, receipt) = self.memory.reserve(&charges, instant, &mut expected);
            let there = self
                .runtime
                .block_on(self.redis.reserve(&charges, &mut got));
            let (there, remote) = there.unwrap();
            assert_eq!(receipt.is_empty(), remote.is_empty(), "{here:?}");
            let answers = (
                format!("{here:?} {expected:?}"),
                format!("{there:?} {got:?}"),
            );
            self.reserved.push(Reservation {
                rules: chosen,
                cost,
                memory_receipt: receipt,
                redis_receipt: remote,
            });
            answers
        } else {
            let here = self
                .memory
                .check(&charges, instant, ask.effect, &mut expected);
            let there = self.redis.check(&charges, ask.effect, &mut got);
            let there = self.runtime.block_on(there).map(|there| (there, &got));
            shown((here, &expected), there)
        };
        self.now = self.now.max(now);
        self.last = expected;
        answers
    }
}

impl Pair<'_> {
    /// Settles a reservation, and returns the state of the limits after the settlement.
    fn settle(&mut self, which: &Index, unused: u64) -> (String, String) {
        if self.reserved.is_empty() {
            return (String::new(), String::new());
        }
        let reservation = self.reserved.remove(which.index(self.reserved.len()));
        let Reservation {
            rules,
            cost,
            memory_receipt,
            redis_receipt,
        } = reservation;
        let charges: Vec<Charge<'_>> = rules.iter().map(|rule| rule.charge(cost)).collect();
        let settlements = vec![Settlement { unused }; charges.len()];
        let now = Timestamp::from_micros(self.now);
        self.redis.pin_clock(now);
        self.memory
            .settle(&charges, memory_receipt, &settlements, now);
        let settled = self.redis.settle(&charges, redis_receipt, &settlements);
        self.runtime.block_on(settled).unwrap();
        self.look()
    }

    /// Returns the state of the current limits. The limits at the time of a reservation cannot be
    /// used, because in memory they do not refer to the limits that have replaced them.
    fn look(&self) -> (String, String) {
        let charges: Vec<Charge<'_>> = self.rules.iter().map(|rule| rule.charge(1)).collect();
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        let now = Timestamp::from_micros(self.now);
        self.memory
            .check(&charges, now, Effect::Look, &mut expected);
        let there = self.redis.check(&charges, Effect::Look, &mut got);
        self.runtime.block_on(there).unwrap();
        (format!("{expected:?}"), format!("{got:?}"))
    }
}

impl Pair<'_> {
    /// Renews a reservation, and returns the result and the state of the limits after the renewal.
    fn renew(&mut self, which: &Index) -> (String, String) {
        if self.reserved.is_empty() {
            return (String::new(), String::new());
        }
        let now = Timestamp::from_micros(self.now);
        self.redis.pin_clock(now);
        let at = which.index(self.reserved.len());
        let Reservation {
            rules,
            cost,
            memory_receipt,
            redis_receipt,
        } = &mut self.reserved[at];
        let charges: Vec<Charge<'_>> = rules.iter().map(|rule| rule.charge(*cost)).collect();
        let here = self.memory.renew(&charges, memory_receipt, now);
        let there = self.redis.renew(&charges, redis_receipt);
        let there = self.runtime.block_on(there).unwrap();
        let (expected, got) = self.look();
        (format!("{here:?} {expected}"), format!("{there:?} {got}"))
    }
}

fn shown<T: Debug, E: Debug>(here: T, there: Result<T, E>) -> (String, String) {
    let there = there.map_or_else(|error| format!("{error:?}"), |there| format!("{there:?}"));
    (format!("{here:?}"), there)
}

/// Runs `cases` traces on both stores.
fn compare<S>(server: &Server, cases: u32, traces: impl Fn() -> S)
where
    S: Strategy<Value = Trace>,
{
    let runtime = crate::runtime();
    let redis = runtime.block_on(RedisStore::connect(&server.url(), "tg"));
    let empty = || drop(server.command(&["FLUSHALL"]));
    compare_on(&runtime, &redis.unwrap(), &empty, cases, traces);
}

/// Works like [`compare`], but on a cluster in which each rule's key is in a different slot.
fn compare_across_slots<S>(server: &RedisServer, cases: u32, traces: impl Fn() -> S)
where
    S: Strategy<Value = Trace>,
{
    let runtime = crate::runtime();
    let store = runtime.block_on(crate::cross_slot::store(&server.url()));
    let empty = || drop(server.ask(&["FLUSHALL"]));
    compare_on(&runtime, &store, &empty, cases, traces);
}

fn compare_on<S>(
    runtime: &Runtime,
    redis: &RedisStore,
    empty: &dyn Fn(),
    cases: u32,
    traces: impl Fn() -> S,
) where
    S: Strategy<Value = Trace>,
{
    let mut config = strategies::cases(cases);
    config.failure_persistence = None;
    let result = TestRunner::new(config).run(&traces(), |(rules, now, steps)| {
        empty();
        let rules = (0_u8..).zip(rules).map(|(number, (limits, shadow))| {
            let limits = Arc::new(elastic(limits).in_shadow(shadow));
            Rule {
                key: vec![0xF8, number, 0, 0, 0, 0, 0, 0, b'k' + number],
                limits,
                former: None,
                has_room: false,
                longest_wait: None,
            }
        });
        // The memory store has one shard, so that all keys share one clock.
        let bounds = MemoryBounds {
            max_keys: 1_000,
            ..MemoryBounds::default()
        };
        let mut pair = Pair {
            runtime,
            redis: redis.unpinned(),
            memory: MemoryStore::new(bounds),
            rules: rules.collect(),
            now,
            last: Vec::new(),
            reserved: Vec::new(),
        };
        pair.run(&steps)
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn every_algorithm_decides_as_in_memory_in_redis() {
    let server = Server::redis();
    for kind in Kind::ALL {
        compare(&server, 12, || trace_of(kind));
    }
}

#[test]
fn every_algorithm_decides_as_in_memory_in_valkey() {
    let server = Server::valkey();
    for kind in Kind::ALL {
        compare(&server, 12, || trace_of(kind));
    }
}

/// A trace with one rule that has several GCRA limits, for which there are dedicated scripts.
fn trace_of_schedules() -> impl Strategy<Value = Trace> {
    let kinds = [Kind::Gcra, Kind::TokenBucket, Kind::Meter, Kind::Queue];
    let kind = prop::sample::select(kinds.to_vec());
    let limits = prop::collection::vec(kind.prop_flat_map(strategies::plain_limit), 2..=4);
    let step = prop_oneof![
        12 => strategies::ask().prop_map(|ask| Step::Ask { rules: 1, ask }),
        1 => (any::<Index>(), 1..=1_000_u64)
            .prop_map(|(rule, micros)| Step::Block { rule, micros }),
        1 => any::<Index>().prop_map(|rule| Step::Unblock { rule }),
        1 => any::<Index>().prop_map(|rule| Step::Reset { rule }),
    ];
    let rules = (limits, any::<bool>()).prop_map(|rule| vec![rule]);
    (
        rules,
        strategies::start(),
        prop::collection::vec(step, 1..=40),
    )
}

#[test]
fn schedules_decide_together_as_in_memory() {
    for server in Server::each() {
        compare(&server, 60, trace_of_schedules);
    }
}

#[test]
fn rules_decide_together_as_in_memory_in_redis() {
    compare(&Server::redis(), 100, trace);
}

#[test]
fn rules_decide_together_as_in_memory_in_valkey() {
    compare(&Server::valkey(), 100, trace);
}

/// A trace with rules in different slots that are charged together.
fn trace_across_slots() -> impl Strategy<Value = Trace> {
    let rules = prop::collection::vec((limits(), prop::bool::weighted(0.2)), 2..=3);
    let step = prop_oneof![
        12 => strategies::ask().prop_map(|ask| Step::Ask { rules: 7, ask }),
        2 => step(),
    ];
    (
        rules,
        strategies::start(),
        prop::collection::vec(step, 1..=40),
    )
}

#[test]
fn rules_in_several_slots_decide_as_in_memory_in_redis() {
    compare_across_slots(
        &RedisServer::slotted("redis-server"),
        150,
        trace_across_slots,
    );
}

#[test]
fn rules_in_several_slots_decide_as_in_memory_in_valkey() {
    compare_across_slots(
        &RedisServer::slotted("valkey-server"),
        150,
        trace_across_slots,
    );
}
