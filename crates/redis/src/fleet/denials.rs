//! Denials of a moment ago: who asks again too soon is denied again, and Redis is not asked.
//!
//! A denial names the instant until which nothing can change, unless something is given back, as places are all the time. It is
//! kept until then,
//! but never longer than the bound that the settings name: what another node gives back is noticed after that.
//! What a decision finds is old by the time that it is known, so it is kept only if nothing was forgotten of its keys since the decision
//! began. What is kept is bounded too: so many slots, each with the denial that came last.

use std::{
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwapOption;

use tidegate_core::{
    Algorithm, Charge, Limit, Limits, Outcome, Retry, Span, Timestamp, remote::fingerprint,
};

/// How many denials are kept, a power of two.
const SLOTS: usize = 1 << 14;

/// So many keys can be told apart when something is given back to one, a power of two.
const KEYS: usize = 1 << 12;

/// The most bytes of keys and the most limits of a request whose denial is kept.
const MAX_KEY_BYTES: usize = 512;
const MAX_LIMITS: usize = 16;

#[derive(Debug)]
pub(super) struct Denials {
    hasher: RandomState,
    /// Every decision looks here first, so it must be read without a lock.
    slots: Box<[ArcSwapOption<Denial>]>,
    /// How often everything was forgotten.
    all: AtomicU64,
    /// How often what is known of a key was, by its hash.
    lifted: Box<[AtomicU64]>,
}

#[derive(Debug)]
struct Denial {
    hash: u64,
    charges: Box<[Charged]>,
    epoch: Epoch,
    /// When it was asked for: it was decided no earlier,
    since: Timestamp,
    /// and no later than it was heard, from when on its waits run, so that nobody is told too short a one.
    heard: Timestamp,
    until: Timestamp,
    outcomes: Box<[Outcome]>,
}

/// How often everything, or what is known of one of its keys, had been forgotten when a decision began: a sum of what only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch(u64);

/// One charge of a request: whose count, which limits, at which cost, and how long it may wait.
type Charged = (Box<[u8]>, Deciding, u64, Option<Span>);

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
        Self {
            hasher: RandomState::new(),
            slots: (0..SLOTS).map(|_| ArcSwapOption::empty()).collect(),
            all: AtomicU64::new(0),
            lifted: (0..KEYS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Denials {
    /// When a decision about `charges` begins.
    pub(super) fn epoch(&self, charges: &[Charge<'_>]) -> Epoch {
        let all = self.all.load(Ordering::Acquire);
        let lifted = charges
            .iter()
            .map(|charge| self.lifted[self.number(charge)].load(Ordering::Acquire));
        Epoch(lifted.fold(all, u64::wrapping_add))
    }

    /// Remembers that `charges`, asked about at `now` and answered `after` that, were denied with `outcomes` by a decision that was begun
    /// in the `epoch`.
    pub(super) fn remember(
        &self,
        charges: &[Charge<'_>],
        (now, after): (Timestamp, Span),
        longest: Span,
        (outcomes, epoch): (&[Outcome], Epoch),
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
                        charge.longest_wait,
                    )
                })
                .collect(),
            epoch,
            since: now,
            heard: now.after(after),
            until,
            outcomes: outcomes.into(),
        };
        self.slots[place(hash)].store(Some(Arc::new(denial)));
    }

    /// Whether `charges` were denied and are so still; `outcomes` say how long, then.
    pub(super) fn recall(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let hash = self.hash(charges);
        let slot = self.slots[place(hash)].load();
        let Some(denial) = slot.as_ref() else {
            return false;
        };
        let stands = denial.hash == hash
            && denial.epoch == self.epoch(charges)
            && (denial.since..denial.until).contains(&now)
            && denial.is_of(charges);
        if stands {
            let passed = now.since(denial.heard);
            outcomes.clear();
            outcomes.extend(denial.outcomes.iter().map(|outcome| later(outcome, passed)));
        }
        stands
    }

    /// Forgets those that the keys of `charges` have to do with when what it returns is dropped: something is being given back to
    /// them, and whoever waits for that may go.
    pub(super) fn forgetting<'c>(
        &self,
        charges: impl Iterator<Item = &'c Charge<'c>>,
    ) -> Forgetting<'_> {
        let keys = charges.map(|charge| self.number(charge));
        Forgetting(self, keys.collect())
    }

    /// Forgets all of them.
    pub(super) fn forget(&self) {
        self.all.fetch_add(1, Ordering::AcqRel);
    }

    /// The number of a charge's key, which others may have too: so much more is forgotten than need be.
    fn number(&self, charge: &Charge<'_>) -> usize {
        let hash = self.hasher.hash_one(charge.key);
        usize::try_from(hash >> 32).unwrap_or(0) % KEYS
    }

    fn hash(&self, charges: &[Charge<'_>]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        for charge in charges {
            charge.key.hash(&mut hasher);
            Deciding::by(charge.limits).hash(&mut hasher);
            hasher.write_u64(charge.cost.units());
            charge.longest_wait.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Forgets at its end every denial that keys of these numbers have to do with.
#[derive(Debug)]
pub(super) struct Forgetting<'d>(&'d Denials, Box<[usize]>);

impl Drop for Forgetting<'_> {
    fn drop(&mut self) {
        for number in &self.1 {
            self.0.lifted[*number].fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl Denial {
    fn is_of(&self, charges: &[Charge<'_>]) -> bool {
        self.charges.len() == charges.len()
            && self.charges.iter().zip(charges).all(
                |((key, limits, cost, longest_wait), charge)| {
                    **key == *charge.key
                        && *limits == Deciding::by(charge.limits)
                        && *cost == charge.cost.units()
                        && *longest_wait == charge.longest_wait
                },
            )
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

/// The slot of a denial.
fn place(hash: u64) -> usize {
    usize::try_from(hash >> 32).unwrap_or(0) % SLOTS
}

#[cfg(test)]
mod tests;
