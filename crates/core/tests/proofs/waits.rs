//! Tests the maximum delay of a request in a queue. A request that would be delayed longer is
//! denied, and does not enter the queue.

use proptest::prelude::*;
use tidegate_core::{Charge, Decision, Effect, MemoryStore, Outcome, RetryAfter, Span, Timestamp};

use crate::{
    promises::copy_of,
    strategies::{self, Kind},
    world::{Rule, one_shard},
};

fn ask(store: &MemoryStore, charge: Charge<'_>, now: u64, effect: Effect) -> Outcome {
    let (mut outcomes, now) = (Vec::new(), Timestamp::from_micros(now));
    let decision = store.check(&[charge], now, effect, &mut outcomes);
    assert_eq!(decision == Decision::Admitted, outcomes[0].allowed);
    outcomes[0]
}

proptest! {
    #![proptest_config(strategies::cases(2_000))]

    /// Compares two queues that are equal, except that only the first queue has a maximum wait
    /// time, `longest`. The first queue admits a request if the second queue admits it with a delay
    /// of at most `longest`. A denied request changes nothing. The request is admitted after its
    /// wait time, but not one microsecond earlier.
    #[test]
    fn a_wait_over_the_maximum_never_joins_the_queue(
        limit in strategies::plain_limit(Kind::Queue),
        start in strategies::start(),
        asks in strategies::asks(30),
        longest in prop_oneof![Just(0), 0..=1_000_000_u64, any::<u64>()],
    ) {
        let longest = Span::from_micros(longest);
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let hurried = |cost| Charge { longest_wait: Some(longest), ..rule.charge(cost) };
        let (mut now, mut last): (u64, Option<Outcome>) = (start, None);
        for step in &asks {
            now = now.max(step.step.from(now, last.as_ref()));
            let cost = step.price.units(last.as_ref());
            let twin = ask(&copy_of(&store, now), rule.charge(cost), now, Effect::Charge);
            let before = ask(&store, rule.charge(1), now, Effect::Look);
            let peeked = ask(&store, hurried(cost), now, Effect::Peek);
            let outcome = ask(&store, hurried(cost), now, Effect::Charge);
            prop_assert_eq!(outcome.allowed, twin.allowed && twin.delay <= longest);
            prop_assert_eq!(peeked.allowed, outcome.allowed);
            if outcome.allowed {
                prop_assert_eq!(outcome, twin);
            } else {
                prop_assert_eq!(ask(&store, rule.charge(1), now, Effect::Look), before);
                if let RetryAfter::After(wait) = outcome.retry_after {
                    let at = now.saturating_add(wait.as_micros());
                    let copy = copy_of(&store, now);
                    prop_assert!(!ask(&copy, hurried(cost), at - 1, Effect::Peek).allowed);
                    prop_assert!(ask(&copy, hurried(cost), at, Effect::Peek).allowed);
                }
            }
            last = Some(outcome);
        }
    }
}
