use tidegate_core::{
    AlgorithmName, Cost, Decision, Effect, LimitSpec, MemoryBounds, MemoryStore, notation,
};

use super::*;

const SECOND: Span = Span::from_secs(1);

fn limits(rate: &str) -> Limits {
    let rate = notation::rate(rate).unwrap();
    Limits::new(vec![
        LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog)
            .build()
            .unwrap(),
    ])
    .unwrap()
}

fn charge<'a>(key: &'a str, limits: &'a Limits, cost: u64) -> Charge<'a> {
    Charge::new(key.as_bytes(), limits, Cost::new(cost).unwrap()).unwrap()
}

fn at(millis: u64) -> Timestamp {
    Timestamp::from_micros(1_000_000_000 + millis * 1_000)
}

/// Charges all units of `key` at time 0, and returns the outcomes of the next request, which is
/// denied immediately.
fn denied(charge: Charge<'_>) -> Vec<Outcome> {
    let (store, mut outcomes) = (MemoryStore::new(MemoryBounds::default()), Vec::new());
    let one = Charge {
        cost: Cost::ONE,
        ..charge
    };
    while store.check(&[one], at(0), Effect::Charge, &mut outcomes) == Decision::Admitted {}
    assert_eq!(
        store.check(&[charge], at(0), Effect::Charge, &mut outcomes),
        Decision::Limited
    );
    outcomes
}

/// Returns the time interval of a decision. The request was sent at `sent_at`, and the reply
/// arrived `elapsed` later.
fn time(sent_at: Timestamp, elapsed: Span) -> DecisionTime {
    DecisionTime { sent_at, elapsed }
}

/// Caches a denial that Redis issued at time 0. The keys are not invalidated between the request
/// and the reply.
fn insert(cache: &DenialCache, charges: &[Charge<'_>], outcomes: &[Outcome], max_ttl: Span) {
    let epoch = cache.epoch(charges);
    cache.insert(charges, outcomes, epoch, time(at(0), Span::ZERO), max_ttl);
}

#[test]
fn a_denial_found_before_a_refund_is_not_cached() {
    let (cache, limits, mut outcomes) = (DenialCache::default(), limits("2/h"), Vec::new());
    let charge = charge("a", &limits, 1);
    let (denied, epoch) = (denied(charge), cache.epoch(&[charge]));
    drop(cache.invalidate_on_drop([charge].iter()));
    let sent = time(at(0), Span::ZERO);
    cache.insert(&[charge], &denied, epoch, sent, SECOND);
    assert!(!cache.find(&[charge], at(1), &mut outcomes));
    insert(&cache, &[charge], &denied, SECOND);
    assert!(cache.find(&[charge], at(1), &mut outcomes));
}

/// A refund to one client invalidates only the cached denials that the refund can affect.
#[test]
fn a_refund_of_one_key_keeps_the_denials_of_others() {
    let (cache, limits, mut outcomes) = (DenialCache::default(), limits("2/h"), Vec::new());
    let keys: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let shared = charge("shared", &limits, 1);
    let outcome = denied(shared)[0];
    let outcomes_of_both = [outcome; 2];
    let of = |index: usize| [charge(&keys[index], &limits, 1), shared];
    for index in 0..keys.len() {
        insert(&cache, &of(index), &outcomes_of_both, SECOND);
    }
    let mut count_cached = |keys: std::ops::Range<usize>| {
        let now = at(1);
        keys.filter(|index| cache.find(&of(*index), now, &mut outcomes))
            .count()
    };
    let before = count_cached(0..100);
    assert!(before > 90, "{before} of 100 have a slot of their own");
    drop(cache.invalidate_on_drop(of(99)[..1].iter()));
    assert_eq!(count_cached(99..100), 0);
    // A few other keys share the counter of the invalidated key.
    assert!(count_cached(0..100) + 5 > before);
    drop(cache.invalidate_on_drop([shared].iter()));
    assert_eq!(count_cached(0..100), 0);
}

#[test]
fn a_denial_is_cached_exactly_until_its_retry_time() {
    let (cache, limits, mut outcomes) = (DenialCache::default(), limits("2/s"), Vec::new());
    let charge = charge("a", &limits, 1);
    insert(&cache, &[charge], &denied(charge), Span::from_secs(60));
    assert!(cache.find(&[charge], at(400), &mut outcomes));
    assert_eq!(
        outcomes[0].retry_after,
        RetryAfter::After(Span::from_millis(600))
    );
    assert!(cache.find(&[charge], at(999), &mut outcomes));
    assert!(!cache.find(&[charge], at(1_000), &mut outcomes));
}

/// Redis decided at an unknown time between the request and the reply.
#[test]
fn a_wait_counts_from_the_reply_and_expires_from_the_request() {
    let (cache, limits) = (DenialCache::default(), limits("1/s"));
    let charge = charge("k", &limits, 1);
    let denied = denied(charge);
    let wait = denied[0].retry_after.span().unwrap();
    let epoch = cache.epoch(&[charge]);
    let sent = time(at(0), Span::from_millis(40));
    cache.insert(&[charge], &denied, epoch, sent, SECOND);
    let mut outcomes = Vec::new();
    for (millis, passed) in [(0, 0), (40, 0), (41, 1), (100, 60)] {
        assert!(cache.find(&[charge], at(millis), &mut outcomes));
        let left = outcomes[0].retry_after.span().unwrap();
        assert_eq!(
            left.as_millis_ceil(),
            wait.as_millis_ceil() - passed,
            "{millis}"
        );
    }
    let end = wait.as_millis_ceil();
    assert!(!cache.find(&[charge], at(end), &mut outcomes));
}

#[test]
fn a_denial_is_cached_per_key_limit_and_cost() {
    let (cache, limits, other, mut outcomes) = (
        DenialCache::default(),
        limits("2/h"),
        limits("3/h"),
        Vec::new(),
    );
    let dear = charge("a", &limits, 2);
    insert(&cache, &[dear], &denied(dear), SECOND);
    assert!(cache.find(&[dear], at(1), &mut outcomes));
    for another in [
        charge("a", &limits, 1),
        charge("b", &limits, 2),
        charge("a", &other, 2),
    ] {
        assert!(!cache.find(&[another], at(1), &mut outcomes));
    }
    assert!(!cache.find(&[dear, charge("b", &limits, 2)], at(1), &mut outcomes));
}

/// The limit is not in shadow mode when it denies, and is in shadow mode at the next request.
#[test]
fn a_shadow_limit_is_not_denied_by_a_cached_denial() {
    let (cache, limits, mut outcomes) = (DenialCache::default(), limits("2/h"), Vec::new());
    let counting = limits.clone().in_shadow(true);
    let denied = denied(charge("a", &limits, 1));
    let enforced = [charge("a", &limits, 1)];
    insert(&cache, &enforced, &denied, SECOND);
    assert!(!cache.find(&[charge("a", &counting, 1)], at(1), &mut outcomes));
    assert!(cache.find(&enforced, at(1), &mut outcomes));
}

#[test]
fn a_refund_and_the_bound_end_every_cached_denial() {
    let (cache, limits, mut outcomes) = (DenialCache::default(), limits("2/h"), Vec::new());
    let charge = charge("a", &limits, 1);
    insert(&cache, &[charge], &denied(charge), SECOND);
    assert!(!cache.find(&[charge], at(1_000), &mut outcomes));
    assert!(cache.find(&[charge], at(999), &mut outcomes));
    cache.invalidate_all();
    assert!(!cache.find(&[charge], at(999), &mut outcomes));
    insert(&cache, &[charge], &denied(charge), Span::ZERO);
    assert!(!cache.find(&[charge], at(0), &mut outcomes));
}

#[test]
fn the_number_of_slots_is_as_configured() {
    let (cache, limits) = (DenialCache::default(), limits("1/h"));
    let keys: Vec<String> = (0..SLOTS * 2).map(|number| number.to_string()).collect();
    let outcomes = denied(charge("0", &limits, 1));
    for key in &keys {
        let denied = [charge(key, &limits, 1)];
        insert(&cache, &denied, &outcomes, SECOND);
    }
    let kept = cache.slots.iter().filter(|slot| slot.load().is_some());
    assert!((SLOTS / 2..=SLOTS).contains(&kept.count()));
    let mut outcomes = Vec::new();
    let found = keys
        .iter()
        .filter(|key| cache.find(&[charge(key, &limits, 1)], at(1), &mut outcomes));
    assert!(found.count() > SLOTS / 2);
}
