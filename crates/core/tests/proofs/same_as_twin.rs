//! Model-based tests: for any limit and trace, every field of every outcome is the same as in the
//! reference model (the twin).

use proptest::{prelude::*, sample::Index};
use tidegate_core::{Algorithm, Decision, Effect, Limit, MemoryStore, Outcome, Span, Timestamp};

use crate::{
    strategies::{self, Ask, Kind, Price, Step},
    world::{Rule, World, one_shard},
};

/// A store and its reference model, which receive the same requests.
struct Pair {
    store: MemoryStore,
    world: World,
    now: u64,
    last: Vec<Outcome>,
}

impl Pair {
    fn new(now: u64) -> Self {
        Self {
            store: one_shard(),
            world: World::default(),
            now,
            last: Vec::new(),
        }
    }

    fn last(&self, of: Index) -> Option<&Outcome> {
        (!self.last.is_empty()).then(|| of.get(&self.last))
    }

    fn step(&mut self, step: &Step, of: Index) {
        self.now = step.from(self.now, self.last(of));
    }

    /// Sends the requests to the store and to the model. The outcomes must be equal, and a peek
    /// must have the same outcome as the following charge.
    fn ask(&mut self, asks: &[(&Rule, u64)], effect: Effect) -> Result<(), TestCaseError> {
        if effect == Effect::Charge {
            let peeked = self.ask_store(asks, Effect::Peek);
            let charged = self.ask_store(asks, effect);
            prop_assert_eq!(
                &peeked,
                &charged,
                "a peek and the check after it, {:?}",
                asks
            );
            self.compare(asks, effect, charged)
        } else {
            let answered = self.ask_store(asks, effect);
            self.compare(asks, effect, answered)
        }
    }

    fn compare(
        &mut self,
        asks: &[(&Rule, u64)],
        effect: Effect,
        (decision, outcomes): (Decision, Vec<Outcome>),
    ) -> Result<(), TestCaseError> {
        let expected = self.world.check(asks, self.now, effect);
        let costs: Vec<u64> = asks.iter().map(|(_, cost)| *cost).collect();
        prop_assert_eq!(
            &(decision, outcomes),
            &expected,
            "store, then model: {:?} of {:?} at {}",
            effect,
            costs,
            self.now
        );
        if !expected.1.is_empty() {
            self.last = expected.1;
        }
        Ok(())
    }

    fn ask_store(&self, asks: &[(&Rule, u64)], effect: Effect) -> (Decision, Vec<Outcome>) {
        let charges: Vec<_> = asks.iter().map(|(rule, cost)| rule.charge(*cost)).collect();
        let mut outcomes = Vec::new();
        let now = Timestamp::from_micros(self.now);
        let decision = self.store.check(&charges, now, effect, &mut outcomes);
        (decision, outcomes)
    }
}

fn one_limit(limit: Limit, start: u64, asks: &[Ask]) -> Result<(), TestCaseError> {
    let rule = Rule::new(b"key", vec![limit], false);
    let mut pair = Pair::new(start);
    for ask in asks {
        pair.step(&ask.step, ask.of);
        let cost = ask.price.units(pair.last(ask.of));
        pair.ask(&[(&rule, cost)], ask.effect)?;
    }
    Ok(())
}

macro_rules! one_limit_is_its_twin {
    ($($name:ident: $kind:ident,)*) => {
        proptest! {
            #![proptest_config(strategies::cases(200))]
            $(
                #[test]
                fn $name(
                    limit in strategies::limit(Kind::$kind),
                    start in strategies::start(),
                    asks in strategies::asks(40),
                ) {
                    one_limit(limit, start, &asks)?;
                }
            )*
        }
    };
}

one_limit_is_its_twin! {
    gcra_is_its_twin: Gcra,
    token_bucket_is_its_twin: TokenBucket,
    interval_bucket_is_its_twin: Interval,
    meter_is_its_twin: Meter,
    queue_is_its_twin: Queue,
    epoch_window_is_its_twin: EpochWindow,
    first_request_window_is_its_twin: FirstRequestWindow,
    calendar_window_is_its_twin: CalendarWindow,
    log_is_its_twin: Log,
    lease_is_its_twin: Concurrency,
    weighted_counter_is_its_twin: Weighted,
    strict_buckets_are_their_twin: StrictBuckets,
    loose_buckets_are_their_twin: LooseBuckets,
}

/// An event in a store with several rules.
#[derive(Clone, Debug)]
enum Event {
    /// Charges each rule that has a price.
    Ask(Vec<Option<Price>>, Effect),
    Reset(Index),
    Block(Index, u64),
    Unblock(Index),
}

fn event() -> impl Strategy<Value = Event> {
    let prices = prop::collection::vec(prop::option::weighted(0.8, strategies::price()), 3);
    prop_oneof![
        20 => (prices, strategies::effect())
            .prop_map(|(prices, effect)| Event::Ask(prices, effect)),
        1 => any::<Index>().prop_map(Event::Reset),
        1 => (any::<Index>(), 1..=10_000_u64).prop_map(|(rule, micros)| Event::Block(rule, micros)),
        1 => any::<Index>().prop_map(Event::Unblock),
    ]
}

/// Generates one to three rules with one to five limits each, including rules with several sliding
/// window logs and rules in shadow mode.
fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let kind = prop_oneof![2 => strategies::any_kind(), 1 => Just(Kind::Log)];
    let limits = prop::collection::vec(kind.prop_flat_map(strategies::limit), 1..=5);
    let rule = (limits, prop::bool::weighted(0.25));
    prop::collection::vec(rule, 1..=3).prop_map(|rules| {
        let keys = [b"a", b"b", b"c"];
        let rules = rules.into_iter().zip(keys);
        rules
            .map(|((limits, shadow), key)| Rule::new(key, limits, shadow))
            .collect()
    })
}

/// Returns whether several of the rule's sliding window logs share one log that counts denied
/// requests. A shared log keeps more entries than separate logs, so it can refund more units than
/// the model.
fn shares_denials(rule: &Rule) -> bool {
    let counts = |limit: &&Limit| {
        limit.count_denied() && matches!(limit.algorithm(), Algorithm::SlidingWindowLog { .. })
    };
    rule.limits.iter().filter(counts).count() > 1
}

proptest! {
    #![proptest_config(strategies::cases(300))]

    /// Several limits behave like the combined models of the single limits: a request is charged to
    /// all limits or, if any limit denies it, to none.
    #[test]
    fn several_rules_match_their_models(
        rules in rules(),
        start in strategies::start(),
        events in prop::collection::vec((strategies::step(), any::<Index>(), event()), 1..=40),
    ) {
        let mut pair = Pair::new(start);
        for (step, of, event) in &events {
            pair.step(step, *of);
            let now = Timestamp::from_micros(pair.now);
            match event {
                Event::Ask(prices, effect) => {
                    let asks: Vec<(&Rule, u64)> = rules
                        .iter()
                        .zip(prices)
                        .filter_map(|(rule, price)| {
                            Some((rule, price.as_ref()?.units(pair.last(*of))))
                        })
                        .collect();
                    let gives_more = *effect == Effect::Refund && rules.iter().any(shares_denials);
                    if !asks.is_empty() && !gives_more {
                        pair.ask(&asks, *effect)?;
                    }
                }
                Event::Reset(rule) => {
                    let key = &rule.get(&rules).key;
                    pair.store.reset(key);
                    pair.world.reset(key);
                }
                Event::Block(rule, micros) => {
                    let key = &rule.get(&rules).key;
                    prop_assert!(pair.store.block(key, Some(Span::from_micros(*micros)), "why", now));
                    pair.world.block(key, *micros, pair.now);
                }
                Event::Unblock(rule) => {
                    let key = &rule.get(&rules).key;
                    pair.store.unblock(key, now);
                    pair.world.unblock(key, pair.now);
                }
            }
        }
    }
}
