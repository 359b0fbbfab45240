//! Denial cache (a negative cache): a request that was just denied is denied again without a call
//! to Redis.
//!
//! A denial contains the instant until which it is valid, unless units are refunded. It is cached
//! until then, but never longer than the configured maximum, so that a refund on another node is
//! noticed after at most that time. Denials by concurrency limits are not cached, because their
//! leases may be released at any time.
//!
//! A reply from Redis is already old when it arrives. It is cached only if no denial of its keys
//! was invalidated since the request was sent. The cache has a fixed number of slots, each with the
//! latest denial that hashes to it.

use std::{
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwapOption;

use tidegate_core::{
    Algorithm, Charge, Limit, Limits, Outcome, Retry, Span, Timestamp, remote_eval::fingerprint,
};

/// Number of cached denials, a power of two.
const SLOTS: usize = 1 << 14;

/// Number of invalidation counters, a power of two. A refund to a key invalidates every key that
/// shares its counter.
const KEYS: usize = 1 << 12;

/// Upper bounds of a request whose denial is cached: total bytes of its keys, and its number of
/// limits.
const MAX_KEY_BYTES: usize = 512;
const MAX_LIMITS: usize = 16;

#[derive(Debug)]
pub(super) struct Denials {
    hasher: RandomState,
    /// Every decision reads this cache first, so a read must not take a lock.
    slots: Box<[ArcSwapOption<Denial>]>,
    /// The number of times that the whole cache was invalidated.
    all: AtomicU64,
    /// The number of times that the denials of a key were invalidated, indexed by the hash of the
    /// key.
    lifted: Box<[AtomicU64]>,
}

#[derive(Debug)]
struct Denial {
    hash: u64,
    charges: Box<[Charged]>,
    epoch: Epoch,
    /// When the request was sent. Redis decided no earlier than this.
    since: Timestamp,
    /// When the reply arrived. Redis decided no later than this; waits are measured from here, so
    /// they are never understated.
    heard: Timestamp,
    until: Timestamp,
    outcomes: Box<[Outcome]>,
}

/// Sum of the invalidation counters of a request's keys when its decision began. The counters only
/// increase, so an equal sum means that no counter has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch(u64);

/// One charge of a request: its key, its limits, its cost, and the longest wait that it accepts.
type Charged = (Box<[u8]>, Deciding, u64, Option<Span>);

/// Distinguishes limits that decide differently although their states are the same: elastic limits
/// that use their headroom (stretched), and limits in shadow mode, which never deny.
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
            shadow: limits.is_shadow(),
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
    /// Returns the epoch of the keys of `charges`. Call this method before a decision begins.
    pub(super) fn epoch(&self, charges: &[Charge<'_>]) -> Epoch {
        let all = self.all.load(Ordering::Acquire);
        let lifted = charges
            .iter()
            .map(|charge| self.lifted[self.number(charge)].load(Ordering::Acquire));
        Epoch(lifted.fold(all, u64::wrapping_add))
    }

    /// Caches that `charges` were denied with `outcomes`. They were sent to Redis at `now`, and the
    /// reply came `after` that. `epoch` was taken before they were sent, and `longest` bounds how
    /// long the denial is cached.
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

    /// Returns whether a cached denial of `charges` is valid, and writes its outcomes, with the
    /// waits that remain, to `outcomes`.
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

    /// Invalidates the denials of the keys of `charges` when the returned guard is dropped. A
    /// refund holds the guard, because the units that it returns may admit a request that was
    /// denied.
    pub(super) fn forgetting<'c>(
        &self,
        charges: impl Iterator<Item = &'c Charge<'c>>,
    ) -> Forgetting<'_> {
        let keys = charges.map(|charge| self.number(charge));
        Forgetting(self, keys.collect())
    }

    /// Invalidates all denials.
    pub(super) fn forget(&self) {
        self.all.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the index of the counter for a charge's key. Other keys may share the counter, so
    /// more denials may be invalidated than necessary.
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

/// Guard that invalidates, when dropped, every denial of the keys with these counters.
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

/// Returns how long to cache the denial, or `None` if it must not be cached. A limit that counts
/// denied requests must see each request, and a concurrency lease may be released at any moment.
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
        .flat_map(|charge| charge.limits.iter().map(|_| charge.limits.is_shadow()));
    let denying = limits
        .zip(outcomes)
        .filter(|(shadow, outcome)| !shadow && !outcome.allowed);
    let wait = |outcome: &Outcome| match outcome.retry_after {
        Retry::After(span) => span,
        // The caller bounds the wait by its maximum, so the longest span can represent "never".
        Retry::Never => Span::from_micros(u64::MAX),
    };
    denying.map(|(_, outcome)| wait(outcome)).max()
}

/// Returns `outcome` with its waits shortened by `passed`.
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

/// Returns the index of the slot for a denial.
fn place(hash: u64) -> usize {
    usize::try_from(hash >> 32).unwrap_or(0) % SLOTS
}

#[cfg(test)]
mod tests;
