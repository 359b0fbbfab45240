//! Denials of a moment ago: who asks again too soon is denied again, and Redis is not asked.
//!
//! A denial names the instant until which nothing can change, unless something is given back, as places are all the time. It is
//! kept until then,
//! but never longer than the bound that the settings name: what another node gives back is noticed after that.
//! What a decision finds is old by the time that it is known, so it is kept only if nothing was forgotten since the decision
//! began. What is kept is bounded too: so many slots, each with the denial that came last.

use std::{
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_core::{
    Algorithm, Charge, Limit, Limits, Outcome, Retry, Span, Timestamp, remote::fingerprint,
};

/// How many denials are kept, a power of two.
const SLOTS: usize = 1 << 14;

/// How many locks guard them, a power of two.
const GUARDS: usize = 64;

/// The most bytes of keys and the most limits of a request whose denial is kept.
const MAX_KEY_BYTES: usize = 512;
const MAX_LIMITS: usize = 16;

#[derive(Debug)]
pub(super) struct Denials {
    hasher: RandomState,
    shards: Box<[Mutex<Vec<Option<Denial>>>]>,
    /// Denials of an earlier epoch are forgotten.
    epoch: AtomicU64,
}

#[derive(Debug)]
struct Denial {
    hash: u64,
    charges: Box<[Charged]>,
    epoch: u64,
    since: Timestamp,
    until: Timestamp,
    outcomes: Box<[Outcome]>,
}

/// How often everything had been forgotten when a decision began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch(u64);

/// One charge of a request: whose count, which limits, at which cost.
type Charged = (Box<[u8]>, Deciding, u64);

/// What tells limits apart that decide differently although they leave the same states: stretched ones, and those that
/// only count and deny nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Deciding {
    numbers: u32,
    stretched: bool,
    shadow: bool,
}

impl Deciding {
    fn by(limits: &Limits) -> Self {
        Self {
            numbers: fingerprint(limits),
            stretched: limits.is_stretched(),
            shadow: limits.shadow(),
        }
    }
}

impl Default for Denials {
    fn default() -> Self {
        let shard = || Mutex::new(Vec::new());
        Self {
            hasher: RandomState::new(),
            shards: (0..GUARDS).map(|_| shard()).collect(),
            epoch: AtomicU64::new(0),
        }
    }
}

impl Denials {
    /// When a decision begins.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// Remembers that `charges`, asked about at `now`, were denied with `outcomes` by a decision that was begun in the
    /// `epoch`.
    pub(super) fn remember(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        longest: Span,
        (outcomes, Epoch(epoch)): (&[Outcome], Epoch),
    ) {
        let Some(wait) = worth_keeping(charges, outcomes) else {
            return;
        };
        let until = now.after(wait.min(longest));
        if until == now {
            return;
        }
        let hash = self.hash(charges);
        let denial = Denial {
            hash,
            charges: charges
                .iter()
                .map(|charge| {
                    (
                        charge.key.into(),
                        Deciding::by(charge.limits),
                        charge.cost.units(),
                    )
                })
                .collect(),
            epoch,
            since: now,
            until,
            outcomes: outcomes.into(),
        };
        let (shard, slot) = place(hash);
        let mut slots = lock(&self.shards[shard]);
        if slots.is_empty() {
            slots.resize_with(SLOTS / GUARDS, || None);
        }
        slots[slot] = Some(denial);
    }

    /// Whether `charges` were denied and are so still; `outcomes` say how long, then.
    pub(super) fn recall(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let hash = self.hash(charges);
        let (shard, slot) = place(hash);
        let slots = lock(&self.shards[shard]);
        let Some(Some(denial)) = slots.get(slot) else {
            return false;
        };
        let stands = denial.hash == hash
            && denial.epoch == self.epoch.load(Ordering::Acquire)
            && (denial.since..denial.until).contains(&now)
            && denial.is_of(charges);
        if stands {
            let passed = now.since(denial.since);
            outcomes.clear();
            outcomes.extend(denial.outcomes.iter().map(|outcome| later(outcome, passed)));
        }
        stands
    }

    /// Forgets all of them when what it returns is dropped: something is being given back, and whoever waits for that may
    /// go.
    pub(super) fn forgetting(&self) -> Forgetting<'_> {
        Forgetting(self)
    }

    /// Forgets all of them.
    pub(super) fn forget(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    fn hash(&self, charges: &[Charge<'_>]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        for charge in charges {
            charge.key.hash(&mut hasher);
            Deciding::by(charge.limits).hash(&mut hasher);
            hasher.write_u64(charge.cost.units());
        }
        hasher.finish()
    }
}

/// Forgets every denial at its end.
#[derive(Debug)]
pub(super) struct Forgetting<'d>(&'d Denials);

impl Drop for Forgetting<'_> {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl Denial {
    fn is_of(&self, charges: &[Charge<'_>]) -> bool {
        self.charges.len() == charges.len()
            && self
                .charges
                .iter()
                .zip(charges)
                .all(|((key, limits, cost), charge)| {
                    **key == *charge.key
                        && *limits == Deciding::by(charge.limits)
                        && *cost == charge.cost.units()
                })
    }
}

/// How long the denial stands; `None` if it is not to be kept: a limit that counts denied requests must hear of each, and a place
/// may be free again at any moment.
fn worth_keeping(charges: &[Charge<'_>], outcomes: &[Outcome]) -> Option<Span> {
    let bytes: usize = charges.iter().map(|charge| charge.key.len()).sum();
    let must_hear = |limit: &Limit| {
        limit.count_denied()
            || limit.counts_in_full()
            || matches!(limit.algorithm(), Algorithm::Concurrency { .. })
    };
    if bytes > MAX_KEY_BYTES
        || outcomes.len() > MAX_LIMITS
        || charges
            .iter()
            .any(|charge| charge.limits.iter().any(must_hear))
    {
        return None;
    }
    let limits = charges
        .iter()
        .flat_map(|charge| charge.limits.iter().map(|_| charge.limits.shadow()));
    let denying = limits
        .zip(outcomes)
        .filter(|(shadow, outcome)| !shadow && !outcome.allowed);
    let wait = |outcome: &Outcome| match outcome.retry_after {
        Retry::After(span) => span,
        // Never is longer than any bound.
        Retry::Never => Span::from_micros(u64::MAX),
    };
    denying.map(|(_, outcome)| wait(outcome)).max()
}

/// An outcome some time after it was given.
fn later(outcome: &Outcome, passed: Span) -> Outcome {
    let left = |span: Span| Span::from_micros(span.as_micros().saturating_sub(passed.as_micros()));
    Outcome {
        reset_after: left(outcome.reset_after),
        retry_after: match outcome.retry_after {
            Retry::After(span) => Retry::After(left(span)),
            Retry::Never => Retry::Never,
        },
        ..*outcome
    }
}

/// The shard and the slot in it: bits of the hash that have nothing to do with each other.
fn place(hash: u64) -> (usize, usize) {
    let bits = usize::try_from(hash >> 32).unwrap_or(0);
    (bits % GUARDS, (bits / GUARDS) % (SLOTS / GUARDS))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
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

    /// A store in which `key` is spent at time 0, and the denial that follows at once.
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

    /// What a decision has found that nothing came between.
    fn found<'o>(denials: &Denials, outcomes: &'o [Outcome]) -> (&'o [Outcome], Epoch) {
        (outcomes, denials.epoch())
    }

    #[test]
    fn what_was_found_before_something_was_given_back_is_not_remembered() {
        let (denials, limits, mut outcomes) = (Denials::default(), limits("2/h"), Vec::new());
        let charge = charge("a", &limits, 1);
        let (denied, begun) = (denied(charge), denials.epoch());
        drop(denials.forgetting());
        denials.remember(&[charge], at(0), SECOND, (&denied, begun));
        assert!(!denials.recall(&[charge], at(1), &mut outcomes));
        denials.remember(&[charge], at(0), SECOND, found(&denials, &denied));
        assert!(denials.recall(&[charge], at(1), &mut outcomes));
    }

    #[test]
    fn a_denial_stands_until_the_moment_it_named_and_no_longer() {
        let (denials, limits, mut outcomes) = (Denials::default(), limits("2/s"), Vec::new());
        let charge = charge("a", &limits, 1);
        denials.remember(
            &[charge],
            at(0),
            Span::from_secs(60),
            found(&denials, &denied(charge)),
        );
        assert!(denials.recall(&[charge], at(400), &mut outcomes));
        assert_eq!(
            outcomes[0].retry_after,
            Retry::After(Span::from_millis(600))
        );
        assert!(denials.recall(&[charge], at(999), &mut outcomes));
        assert!(!denials.recall(&[charge], at(1_000), &mut outcomes));
    }

    #[test]
    fn a_denial_is_of_one_key_one_limit_and_one_cost() {
        let (denials, limits, other, mut outcomes) =
            (Denials::default(), limits("2/h"), limits("3/h"), Vec::new());
        let dear = charge("a", &limits, 2);
        denials.remember(&[dear], at(0), SECOND, found(&denials, &denied(dear)));
        assert!(denials.recall(&[dear], at(1), &mut outcomes));
        for another in [
            charge("a", &limits, 1),
            charge("b", &limits, 2),
            charge("a", &other, 2),
        ] {
            assert!(!denials.recall(&[another], at(1), &mut outcomes));
        }
        assert!(!denials.recall(&[dear, charge("b", &limits, 2)], at(1), &mut outcomes));
    }

    /// As where a rule is put in shadow while a decision is underway, or where one quota of several leads no more.
    #[test]
    fn what_only_counts_is_not_denied_by_what_the_same_numbers_denied() {
        let (denials, limits, mut outcomes) = (Denials::default(), limits("2/h"), Vec::new());
        let counting = limits.clone().in_shadow(true);
        let denied = denied(charge("a", &limits, 1));
        let enforced = [charge("a", &limits, 1)];
        denials.remember(&enforced, at(0), SECOND, found(&denials, &denied));
        assert!(!denials.recall(&[charge("a", &counting, 1)], at(1), &mut outcomes));
        assert!(denials.recall(&enforced, at(1), &mut outcomes));
    }

    #[test]
    fn what_is_given_back_ends_every_denial_and_so_does_the_bound() {
        let (denials, limits, mut outcomes) = (Denials::default(), limits("2/h"), Vec::new());
        let charge = charge("a", &limits, 1);
        denials.remember(&[charge], at(0), SECOND, found(&denials, &denied(charge)));
        assert!(!denials.recall(&[charge], at(1_000), &mut outcomes));
        assert!(denials.recall(&[charge], at(999), &mut outcomes));
        denials.forget();
        assert!(!denials.recall(&[charge], at(999), &mut outcomes));
        denials.remember(
            &[charge],
            at(0),
            Span::ZERO,
            found(&denials, &denied(charge)),
        );
        assert!(!denials.recall(&[charge], at(0), &mut outcomes));
    }

    #[test]
    fn the_slots_are_as_many_as_were_said() {
        let (denials, limits) = (Denials::default(), limits("1/h"));
        let keys: Vec<String> = (0..SLOTS * 2).map(|number| number.to_string()).collect();
        let outcomes = denied(charge("0", &limits, 1));
        for key in &keys {
            denials.remember(
                &[charge(key, &limits, 1)],
                at(0),
                SECOND,
                found(&denials, &outcomes),
            );
        }
        let kept: usize = denials.shards.iter().map(|shard| lock(shard).len()).sum();
        assert_eq!(kept, SLOTS);
        let mut room = Vec::new();
        let recalled = keys
            .iter()
            .filter(|key| denials.recall(&[charge(key, &limits, 1)], at(1), &mut room));
        assert!(recalled.count() > SLOTS / 2);
    }
}
