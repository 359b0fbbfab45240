//! Denial cache (a negative cache): a request that was just denied is denied again without a call
//! to Redis.
//!
//! A cached denial becomes invalid as soon as one of the denying limits would admit the request, or
//! as soon as the key is charged or refunded. A denial is never cached longer than the configured
//! maximum, so that this node notices a charge or refund on another node within this maximum.
//! Denials by concurrency limits are not cached, because their leases may be released at any time.
//!
//! A reply from Redis is already old when it arrives. A denial is cached only if no denial of its
//! keys was invalidated since the request was sent. The cache has a fixed number of slots, each of
//! which holds the latest denial that hashes to it.

use std::{
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwapOption;

use tidegate_core::{
    Algorithm, Charge, Limit, Limits, Outcome, RetryAfter, Span, Timestamp,
    remote_eval::parameters_digest,
};

/// Number of cached denials, a power of two.
const SLOTS: usize = 1 << 14;

/// Number of invalidation counters, a power of two. A charge or refund on a key invalidates the
/// denials of all keys that share the key's counter. The number of counters is large, so that other
/// keys are rarely affected.
const COUNTERS: usize = 1 << 16;

/// The maximum total size, in bytes, of the keys of a request whose denial is cached.
const MAX_KEY_BYTES: usize = 512;
/// The maximum number of limits of a request whose denial is cached.
const MAX_LIMITS: usize = 16;

#[derive(Debug)]
pub(super) struct DenialCache {
    hasher: RandomState,
    /// Every decision reads the cache first, so a read must not take a lock.
    slots: Box<[ArcSwapOption<CachedDenial>]>,
    /// How often the whole cache has been invalidated.
    full_invalidations: AtomicU64,
    /// The invalidation counters, indexed by key hash: how often the denials of keys with this hash
    /// have been invalidated.
    key_invalidations: Box<[AtomicU64]>,
}

#[derive(Debug)]
struct CachedDenial {
    hash: u64,
    charges: Box<[ChargeKey]>,
    epoch: Epoch,
    /// The time at which the request was sent. Redis made the decision no earlier than `sent_at`.
    sent_at: Timestamp,
    /// The time at which the reply arrived. Redis made the decision no later than `received_at`.
    /// Waits are measured from the arrival of the reply, so that they are never too short.
    received_at: Timestamp,
    expires_at: Timestamp,
    outcomes: Box<[Outcome]>,
}

/// The sum of the invalidation counters for the keys of a request. The counters are read before the
/// decision begins. The counters only increase. Therefore, if the sum has not changed, no counter
/// has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch(u64);

/// The properties of a charge that determine whether a cached denial applies to it.
#[derive(Debug)]
struct ChargeKey {
    key: Box<[u8]>,
    limits: LimitsIdentity,
    cost: u64,
    longest_wait: Option<Span>,
}

/// The time interval in which Redis made a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecisionTime {
    /// When the request was sent.
    pub(super) sent_at: Timestamp,
    /// The time from the request to the reply.
    pub(super) elapsed: Span,
}

/// Properties of a limit that affect the decision but are not part of its state: an elastic limit
/// can be raised (stretched), and a limit in shadow mode never denies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LimitsIdentity {
    numbers: u32,
    stretched: bool,
    shadow: bool,
}

impl LimitsIdentity {
    fn of(limits: &Limits) -> Self {
        Self {
            numbers: parameters_digest(limits),
            stretched: limits.is_stretched(),
            shadow: limits.is_shadow(),
        }
    }
}

impl Default for DenialCache {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            slots: (0..SLOTS).map(|_| ArcSwapOption::empty()).collect(),
            full_invalidations: AtomicU64::new(0),
            key_invalidations: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl DenialCache {
    /// Returns the current epoch of the keys in `charges`. Call this method before a decision
    /// begins.
    pub(super) fn epoch(&self, charges: &[Charge<'_>]) -> Epoch {
        let full = self.full_invalidations.load(Ordering::Acquire);
        let of_keys = charges.iter().map(|charge| {
            self.key_invalidations[self.counter_index(charge)].load(Ordering::Acquire)
        });
        Epoch(of_keys.fold(full, u64::wrapping_add))
    }

    /// Caches a denial of `charges` with the given `outcomes`, which was decided at `time`. `epoch`
    /// was read before the request was sent, and `max_ttl` bounds how long the denial is cached.
    pub(super) fn insert(
        &self,
        charges: &[Charge<'_>],
        outcomes: &[Outcome],
        epoch: Epoch,
        time: DecisionTime,
        max_ttl: Span,
    ) {
        let Some(wait) = cacheable_wait(charges, outcomes) else {
            return;
        };
        let DecisionTime { sent_at, elapsed } = time;
        let expires_at = sent_at.after(wait.min(max_ttl));
        if expires_at == sent_at {
            return;
        }
        let hash = self.hash(charges);
        let denial = CachedDenial {
            hash,
            charges: charges.iter().map(ChargeKey::of).collect(),
            epoch,
            sent_at,
            received_at: sent_at.after(elapsed),
            expires_at,
            outcomes: outcomes.into(),
        };
        self.slots[slot_index(hash)].store(Some(Arc::new(denial)));
    }

    /// Returns whether a valid denial of `charges` is cached. If a denial is cached, writes its
    /// outcomes, with the remaining waits, to `outcomes`.
    pub(super) fn find(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let hash = self.hash(charges);
        let slot = self.slots[slot_index(hash)].load();
        let Some(denial) = slot.as_ref() else {
            return false;
        };
        let is_valid = denial.hash == hash
            && denial.epoch == self.epoch(charges)
            && (denial.sent_at..denial.expires_at).contains(&now)
            && denial.matches(charges);
        if is_valid {
            let passed = now.since(denial.received_at);
            outcomes.clear();
            let cached = denial.outcomes.iter();
            outcomes.extend(cached.map(|outcome| shorten_waits(outcome, passed)));
        }
        is_valid
    }

    /// Returns a guard that, when dropped, invalidates the denials of all keys in `charges`. A
    /// refund holds the guard, because the refunded units may be enough to admit a request that was
    /// denied. A charge also holds the guard, because a charge lengthens the wait of a denied
    /// request. The guard is disarmed if it turns out that nothing was charged.
    pub(super) fn invalidate_on_drop<'c>(
        &self,
        charges: impl Iterator<Item = &'c Charge<'c>>,
    ) -> InvalidationGuard<'_> {
        let counters = charges.map(|charge| self.counter_index(charge));
        InvalidationGuard {
            cache: self,
            counters: counters.collect(),
        }
    }

    /// Invalidates all denials.
    pub(super) fn invalidate_all(&self) {
        self.full_invalidations.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the index of the invalidation counter for a charge's key. Other keys may share the
    /// counter, so the cache may invalidate more denials than necessary.
    fn counter_index(&self, charge: &Charge<'_>) -> usize {
        let hash = self.hasher.hash_one(charge.key);
        usize::try_from(hash >> 32).unwrap_or(0) % COUNTERS
    }

    fn hash(&self, charges: &[Charge<'_>]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        for charge in charges {
            charge.key.hash(&mut hasher);
            LimitsIdentity::of(charge.limits).hash(&mut hasher);
            hasher.write_u64(charge.cost.units());
            charge.longest_wait.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// A guard that, when dropped, invalidates all denials of the keys that belong to its counters.
#[derive(Debug)]
pub(super) struct InvalidationGuard<'d> {
    cache: &'d DenialCache,
    counters: Box<[usize]>,
}

impl InvalidationGuard<'_> {
    /// Drops the guard without invalidating anything.
    pub(super) fn disarm(mut self) {
        self.counters = [].into();
    }
}

impl Drop for InvalidationGuard<'_> {
    fn drop(&mut self) {
        for counter in &self.counters {
            self.cache.key_invalidations[*counter].fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl ChargeKey {
    fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key.into(),
            limits: LimitsIdentity::of(charge.limits),
            cost: charge.cost.units(),
            longest_wait: charge.longest_wait,
        }
    }

    fn matches(&self, charge: &Charge<'_>) -> bool {
        *self.key == *charge.key
            && self.limits == LimitsIdentity::of(charge.limits)
            && self.cost == charge.cost.units()
            && self.longest_wait == charge.longest_wait
    }
}

impl CachedDenial {
    fn matches(&self, charges: &[Charge<'_>]) -> bool {
        let mut pairs = self.charges.iter().zip(charges);
        self.charges.len() == charges.len() && pairs.all(|(own, charge)| own.matches(charge))
    }
}

/// Returns how long to cache the denial; `None` if the denial must not be cached. A denial is not
/// cached if one of the limits counts denied requests, because each request must then reach Redis.
/// A denial by a concurrency limit is also not cached, because a lease can be released at any time.
fn cacheable_wait(charges: &[Charge<'_>], outcomes: &[Outcome]) -> Option<Span> {
    let bytes: usize = charges.iter().map(|charge| charge.key.len()).sum();
    let must_reach_redis = |limit: &Limit| {
        limit.count_denied()
            || limit.counts_in_full()
            || matches!(limit.algorithm(), Algorithm::Concurrency { .. })
    };
    if bytes > MAX_KEY_BYTES
        || outcomes.len() > MAX_LIMITS
        || charges
            .iter()
            .any(|charge| charge.limits.iter().any(must_reach_redis))
    {
        return None;
    }
    let wait = |outcome: &Outcome| match outcome.retry_after {
        RetryAfter::After(span) => span,
        // The longest span represents "never", because the caller limits the wait to the maximum
        // time to live.
        RetryAfter::Never => Span::from_micros(u64::MAX),
    };
    // Limits in shadow mode are included, because their reported outcomes are also valid only until
    // their own wait has passed.
    let denying = outcomes.iter().filter(|outcome| !outcome.allowed);
    denying.map(wait).min()
}

/// Returns `outcome` with its waits shortened by `passed`.
fn shorten_waits(outcome: &Outcome, passed: Span) -> Outcome {
    let left = |span: Span| Span::from_micros(span.as_micros().saturating_sub(passed.as_micros()));
    Outcome {
        reset_after: left(outcome.reset_after),
        retry_after: match outcome.retry_after {
            RetryAfter::After(span) => RetryAfter::After(left(span)),
            RetryAfter::Never => RetryAfter::Never,
        },
        ..*outcome
    }
}

/// Returns the slot index for a denial.
fn slot_index(hash: u64) -> usize {
    usize::try_from(hash >> 32).unwrap_or(0) % SLOTS
}

#[cfg(test)]
mod tests;
