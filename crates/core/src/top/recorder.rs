//! The recorder, which counts a worker's decisions.

use std::hash::BuildHasher as _;

use foldhash::{HashMap, fast::RandomState};

use super::{GroupSummaries, MAX_TOP_RULES, NO_RULE, Sketch, Stream, Tally};
use crate::rules::{DESCRIPTOR_KEY, scope_of_key};

/// A decided request.
#[derive(Clone, Copy, Debug)]
pub struct RecordedRequest {
    /// The request's cost: the highest cost among its charges.
    pub cost: u64,
    /// Whether the request was denied.
    pub denied: bool,
}

/// A charge of a decided request.
#[derive(Clone, Copy, Debug)]
pub struct ChargedKey<'k> {
    /// The encoded key, as in the store.
    pub key: &'k [u8],
    /// The cost of the charge.
    pub cost: u64,
    /// Whether a limit of this charge, or a block on its key, denied the request.
    pub denied: bool,
}

/// Counts a worker's decisions, by rule and by key.
#[derive(Debug)]
pub struct Recorder {
    hasher: RandomState,
    keep: usize,
    max_bytes: usize,
    /// The index in [`LiveSlice::groups`] for each [scope](crate::Rule::key_scope).
    by_scope: HashMap<u64, usize>,
    live: LiveSlice,
    /// The completed minutes that [`Self::take_closed`] has not returned yet.
    closed: Vec<LiveSlice>,
}

/// A worker's counts in one minute.
#[derive(Debug, Default)]
pub struct LiveSlice {
    pub(super) minute: u64,
    pub(super) total: Tally,
    pub(super) groups: Vec<Group>,
    /// The heap memory of the sketches.
    sketch_bytes: usize,
}

/// A rule's counts in a time slice.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub(super) scope: u64,
    pub(super) tally: Tally,
    sketches: [Option<Box<Sketch>>; Stream::COUNT],
}

impl Recorder {
    /// Creates a recorder without rules. Each sketch keeps at least `keep` keys, or fewer if all
    /// sketches together would exceed `max_bytes`.
    #[must_use]
    pub fn new(keep: usize, max_bytes: usize) -> Self {
        let mut recorder = Self {
            hasher: RandomState::default(),
            keep,
            max_bytes,
            by_scope: HashMap::default(),
            live: LiveSlice::default(),
            closed: Vec::new(),
        };
        recorder.set_scopes(&[]);
        recorder
    }

    /// Sets the [scopes](crate::Rule::key_scope) of the rules with lists of top talkers. Only the
    /// first [`MAX_TOP_RULES`] scopes are used. The counts of all other rules are dropped.
    pub fn set_scopes(&mut self, scopes: &[u64]) {
        let scopes = &scopes[..scopes.len().min(MAX_TOP_RULES)];
        let all = std::iter::once(NO_RULE).chain(scopes.iter().copied());
        self.by_scope = all
            .clone()
            .enumerate()
            .map(|(at, scope)| (scope, at))
            .collect();
        for slice in self.closed.iter_mut().chain([&mut self.live]) {
            let mut former = std::mem::take(&mut slice.groups);
            let mut take = |scope| {
                let group = former.iter_mut().find(|group| group.scope == scope);
                group.map_or_else(|| Group::of(scope), std::mem::take)
            };
            slice.groups = all.clone().map(&mut take).collect();
            slice.measure();
        }
    }

    /// Drops the counts of the rule with this scope.
    pub fn reset_rule(&mut self, scope: u64) {
        for slice in self.closed.iter_mut().chain([&mut self.live]) {
            if let Some(group) = slice.groups.iter_mut().find(|group| group.scope == scope) {
                *group = Group::of(scope);
            }
            slice.measure();
        }
    }

    /// Counts a request decided in `minute`. If the clock was set back to an earlier minute, the
    /// request is counted in the latest minute that the recorder has seen.
    #[inline]
    pub fn record<'k>(
        &mut self,
        minute: u64,
        request: RecordedRequest,
        charges: impl Iterator<Item = ChargedKey<'k>>,
    ) {
        self.advance(minute);
        self.live.total.count(request.cost, request.denied);
        for charge in charges {
            self.count(charge);
        }
    }

    /// Completes the current time slice if `minute` is after the slice's minute.
    #[inline]
    pub fn advance(&mut self, minute: u64) {
        if self.live.minute < minute {
            self.start_slice(minute);
        }
    }

    /// Removes and returns the completed time slices.
    pub fn take_closed(&mut self) -> Vec<LiveSlice> {
        std::mem::take(&mut self.closed)
    }

    /// Returns the number of completed time slices that have not been taken yet.
    #[must_use]
    pub fn closed(&self) -> usize {
        self.closed.len()
    }

    /// Returns the totals of all of the recorder's time slices: the current slice, and the
    /// completed slices that have not been taken yet.
    #[must_use]
    pub fn total(&self) -> Tally {
        let mut total = Tally::default();
        self.slices().for_each(|slice| total += slice.total);
        total
    }

    /// Returns the counts of the rule with this scope in each of the recorder's time slices.
    pub fn groups(&self, scope: u64) -> impl Iterator<Item = Group> {
        let at = self.by_scope.get(&scope).copied();
        let slices = self.slices();
        let groups = slices.filter_map(move |slice| slice.groups.get(at?));
        groups.filter(|group| group.tally.requests > 0).cloned()
    }

    /// Returns the heap memory in bytes.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        let scopes = self.by_scope.capacity() * size_of::<(u64, usize)>();
        let closed = self.closed.capacity() * size_of::<LiveSlice>();
        let slices: usize = self.slices().map(LiveSlice::heap_bytes).sum();
        scopes + closed + slices
    }

    fn slices(&self) -> impl Iterator<Item = &LiveSlice> {
        self.closed.iter().chain([&self.live])
    }

    #[cold]
    fn start_slice(&mut self, minute: u64) {
        let groups = self.live.groups.iter().map(|group| Group::of(group.scope));
        let next = LiveSlice {
            minute,
            groups: groups.collect(),
            ..LiveSlice::default()
        };
        let slice = std::mem::replace(&mut self.live, next);
        if slice.total.requests > 0 {
            self.closed.push(slice);
        }
    }

    #[inline]
    fn count(&mut self, charge: ChargedKey<'_>) {
        let ChargedKey { key, cost, denied } = charge;
        let (scope, key) = match scope_of_key(key) {
            Some((scope, key)) => (scope, key),
            // The keys of Envoy descriptors are not counted here, because Envoy's rate limit
            // service has its own statistics.
            None if key.starts_with(&DESCRIPTOR_KEY) => return,
            None => (NO_RULE, key),
        };
        let Some(&at) = self.by_scope.get(&scope) else {
            return;
        };
        // `by_scope` and `groups` have the same length, so the index from `by_scope` is in bounds.
        let group = &mut self.live.groups[at];
        group.tally.count(cost, denied);
        let hash = u32::try_from(self.hasher.hash_one(key) >> 32).unwrap_or_default();
        let stream = if denied {
            Stream::Denied
        } else {
            Stream::Passed
        };
        let mut grown = group.add(stream, key, hash, 1, self.keep);
        if cost > 1 {
            grown += group.add(Stream::ExtraCost, key, hash, cost - 1, self.keep);
        }
        if grown > 0 {
            self.live.sketch_bytes += grown;
            self.bound();
        }
    }

    /// Halves the number of keys in all sketches until they take at most `max_bytes`.
    fn bound(&mut self) {
        while self.live.sketch_bytes > self.max_bytes {
            let groups = self.live.groups.iter_mut();
            let sketches = groups.flat_map(|group| group.sketches.iter_mut().flatten());
            sketches.for_each(|sketch| sketch.halve());
            self.live.measure();
        }
    }
}

impl LiveSlice {
    fn heap_bytes(&self) -> usize {
        self.groups.capacity() * size_of::<Group>() + self.measured_sketch_bytes()
    }

    fn measure(&mut self) {
        self.sketch_bytes = self.measured_sketch_bytes();
    }

    fn measured_sketch_bytes(&self) -> usize {
        let sketches = self.groups.iter().flat_map(|group| group.sketches.iter());
        sketches.flatten().map(|sketch| sketch.heap_bytes()).sum()
    }
}

impl Group {
    fn of(scope: u64) -> Self {
        Self {
            scope,
            ..Self::default()
        }
    }

    /// Returns the exact totals.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Returns the counts with each sketch converted to a [`Summary`](super::Summary).
    #[must_use]
    pub fn summaries(&self) -> GroupSummaries {
        let summary = |sketch: &Option<Box<Sketch>>| sketch.as_deref().map(Sketch::summary);
        GroupSummaries {
            tally: self.tally,
            streams: self.sketches.each_ref().map(summary),
        }
    }

    /// Adds `weight` to `key`. Returns the number of additional bytes of memory.
    #[inline]
    fn add(&mut self, stream: Stream, key: &[u8], hash: u32, weight: u64, keep: usize) -> usize {
        let sketch = &mut self.sketches[stream.index()];
        let sketch = sketch.get_or_insert_with(|| Box::new(Sketch::new(keep)));
        if sketch.increase(key, hash, weight) {
            return 0;
        }
        let before = sketch.heap_bytes();
        sketch.insert(key, hash, weight);
        sketch.heap_bytes().saturating_sub(before)
    }
}
