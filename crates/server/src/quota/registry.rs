//! Who is connected, which buckets there are, and who is told of what.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::Entry},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_core::Timestamp;
use tokio::sync::mpsc;

use super::{
    bucket::{Assignment, Bucket, Changes, StreamId, Usage},
    rule::{BucketId, QuotaLimit, QuotaRule},
};

/// The most buckets of one stream; more of them are let pass unassigned.
pub const MAX_STREAM_BUCKETS: usize = 10_000;

/// The most buckets of all streams.
pub const MAX_BUCKETS: usize = 100_000;

/// The most messages that wait for a stream; one that does not read them is told nothing until it reports.
const MAX_WAITING: usize = 64;

/// What is assigned to a stream, bucket by bucket. `None` asks it to forget the bucket.
pub type Assigned = Vec<(BucketId, Option<Assignment>)>;

/// How much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaCounts {
    /// Buckets, those included that are kept for what was used of them.
    pub buckets: usize,
    /// Streams.
    pub streams: usize,
}

type Key = (Box<str>, BucketId);

/// The quotas of one server: its rules, its buckets and the streams that use them.
#[derive(Debug, Default)]
pub struct Quotas {
    next_stream: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<QuotaRule>,
    buckets: HashMap<Key, Bucket>,
    streams: HashMap<StreamId, Stream>,
    /// Buckets that nobody uses, by the end of the window for which they still count.
    vacant: BTreeSet<(Timestamp, Key)>,
}

#[derive(Debug)]
struct Stream {
    outbox: mpsc::Sender<Assigned>,
    buckets: HashSet<Key>,
    /// The end of the first window of any of its buckets.
    window_end: Option<Timestamp>,
}

impl Quotas {
    /// Puts `rules` in the place of those of the moment, and tells every stream what follows from it: new shares of
    /// rates, at once; of budgets, as far as their grants are used up; and that a bucket is let pass which no quota is about any more.
    /// Buckets keep what was used of them until their windows end.
    pub fn swap_rules(&self, rules: Vec<QuotaRule>, now: Timestamp) {
        let mut state = self.state();
        if state.rules == rules {
            // Most reloads are about other things, and buckets may be many.
            return;
        }
        state.rules = rules;
        let streams: Vec<StreamId> = state.streams.keys().copied().collect();
        drop(state);
        // One at a time, so that nobody who reports waits for all of them.
        for stream in streams {
            self.state().follow(stream, now);
        }
    }

    /// A new stream, and where it finds what it is assigned.
    pub fn join(&self) -> (StreamId, mpsc::Receiver<Assigned>) {
        let stream = StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed));
        let (outbox, inbox) = mpsc::channel(MAX_WAITING);
        let joined = Stream {
            outbox,
            buckets: HashSet::new(),
            window_end: None,
        };
        self.state().streams.insert(stream, joined);
        (stream, inbox)
    }

    /// Hears a report of `stream` at `now`. The answer arrives in the stream's inbox, and what follows from it for
    /// others in theirs.
    pub fn report(
        &self,
        stream: StreamId,
        domain: &str,
        usages: Vec<(BucketId, Usage)>,
        now: Timestamp,
    ) {
        let mut state = self.state();
        let mut told = HashMap::new();
        for (id, usage) in usages {
            let key = (domain.into(), id);
            match state.report(stream, &key, usage, now) {
                Some(changes) => tell(&mut told, &key.1, changes),
                None => told.entry(stream).or_default().push((key.1, None)),
            }
        }
        state.send(told);
    }

    /// When the first window of a bucket of `stream` ends; [`Self::roll`] is due then.
    #[must_use]
    pub fn next_window(&self, stream: StreamId) -> Option<Timestamp> {
        self.state().streams.get(&stream)?.window_end
    }

    /// Begins the next windows of the buckets of `stream` whose time it is.
    pub fn roll(&self, stream: StreamId, now: Timestamp) {
        let state = &mut *self.state();
        let Some(rolled) = state.streams.get_mut(&stream) else {
            return;
        };
        let (mut told, mut first_end) = (HashMap::new(), None);
        for key in &rolled.buckets {
            let Some(bucket) = state.buckets.get_mut(key) else {
                continue;
            };
            tell(&mut told, &key.1, bucket.roll(now));
            first_end = earlier(first_end, bucket.window_end());
        }
        rolled.window_end = first_end;
        state.send(told);
    }

    /// The stream has ended: what it was assigned goes to others.
    pub fn leave(&self, stream: StreamId, now: Timestamp) {
        let state = &mut *self.state();
        let Some(left) = state.streams.remove(&stream) else {
            return;
        };
        let mut told = HashMap::new();
        for key in left.buckets {
            let Some(bucket) = state.buckets.get_mut(&key) else {
                continue;
            };
            let changes = bucket.leave(stream, now);
            tell(&mut told, &key.1, changes);
            state.vacate(key);
        }
        state.send(told);
    }

    /// How many buckets and streams there are.
    #[must_use]
    pub fn counts(&self) -> QuotaCounts {
        let state = self.state();
        QuotaCounts {
            buckets: state.buckets.len(),
            streams: state.streams.len(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The earlier of two instants, of which either may be missing.
fn earlier(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    one.into_iter().chain(other).min()
}

type Told = HashMap<StreamId, Assigned>;

fn tell(told: &mut Told, id: &BucketId, changes: Changes) {
    for (stream, assignment) in changes {
        told.entry(stream)
            .or_default()
            .push((id.clone(), Some(assignment)));
    }
}

impl State {
    /// What changes by a report; `None` if there is no room for the bucket.
    fn report(
        &mut self,
        stream: StreamId,
        key: &Key,
        usage: Usage,
        now: Timestamp,
    ) -> Option<Changes> {
        let rule = self.rules.iter().find(|rule| rule.applies(&key.0, &key.1));
        let Some(limit) = rule.map(|rule| rule.limit) else {
            self.release(stream, key);
            return Some(vec![(stream, Assignment::AllowAll)]);
        };
        let bucket = self.seat(stream, key, limit, now)?;
        bucket.set_limit(limit, now);
        let (changes, end) = (bucket.report(stream, usage, now), bucket.window_end());
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.window_end = earlier(stream.window_end, end);
        }
        Some(changes)
    }

    /// Lets the buckets of `stream` follow rules that have changed.
    fn follow(&mut self, stream: StreamId, now: Timestamp) {
        let Some(held) = self.streams.get(&stream).map(|stream| &stream.buckets) else {
            return;
        };
        let (mut told, mut first_end, mut gone) = (HashMap::new(), None, Vec::new());
        for key in held {
            let rule = self.rules.iter().find(|rule| rule.applies(&key.0, &key.1));
            match (rule, self.buckets.get_mut(key)) {
                (Some(rule), Some(bucket)) => {
                    tell(&mut told, &key.1, bucket.follow(rule.limit, now));
                    first_end = earlier(first_end, bucket.window_end());
                }
                (None, _) => gone.push(key.clone()),
                (Some(_), None) => {}
            }
        }
        for key in gone {
            self.release(stream, &key);
            tell(&mut told, &key.1, vec![(stream, Assignment::AllowAll)]);
        }
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.window_end = first_end;
        }
        self.send(told);
    }

    /// Takes from `stream` what it has of a bucket that no quota is about any more.
    fn release(&mut self, stream: StreamId, key: &Key) {
        let held = self.streams.get_mut(&stream);
        if held.is_some_and(|stream| stream.buckets.remove(key)) {
            if let Some(bucket) = self.buckets.get_mut(key) {
                bucket.unseat(stream);
            }
            self.vacate(key.clone());
        }
    }

    /// Keeps a bucket that nobody uses for what was used of it: until its window ends. Nothing of a rate counts any longer.
    fn vacate(&mut self, key: Key) {
        let Some(bucket) = self.buckets.get(&key).filter(|bucket| bucket.is_vacant()) else {
            return;
        };
        match bucket.window_end() {
            Some(end) => {
                self.vacant.insert((end, key));
            }
            None => {
                self.buckets.remove(&key);
            }
        }
    }

    /// The bucket, made if there is none; `None` if there is no room for it.
    fn seat(
        &mut self,
        stream: StreamId,
        key: &Key,
        limit: QuotaLimit,
        now: Timestamp,
    ) -> Option<&mut Bucket> {
        self.forget_expired(now);
        let held = &mut self.streams.get_mut(&stream)?.buckets;
        let is_full = self.buckets.len() >= MAX_BUCKETS;
        let is_known = held.contains(key);
        if !is_known && held.len() >= MAX_STREAM_BUCKETS {
            return None;
        }
        let bucket = match self.buckets.entry(key.clone()) {
            Entry::Occupied(bucket) => bucket.into_mut(),
            Entry::Vacant(_) if is_full => return None,
            Entry::Vacant(room) => room.insert(Bucket::new(limit, now)),
        };
        if !is_known {
            held.insert(key.clone());
            if let Some(end) = bucket.window_end() {
                self.vacant.remove(&(end, key.clone()));
            }
        }
        Some(bucket)
    }

    /// Forgets two buckets that nobody uses and whose windows have ended: more than one call can add.
    fn forget_expired(&mut self, now: Timestamp) {
        for _ in 0..2 {
            let has_expired = self.vacant.first().is_some_and(|(end, _)| *end <= now);
            let Some((_, key)) = has_expired.then(|| self.vacant.pop_first()).flatten() else {
                return;
            };
            if self.buckets.get(&key).is_some_and(Bucket::is_vacant) {
                self.buckets.remove(&key);
            }
        }
    }

    fn send(&self, told: Told) {
        for (stream, assigned) in told {
            if let Some(stream) = self.streams.get(&stream) {
                // A stream that does not read is told anew when it reports.
                let _ = stream.outbox.try_send(assigned);
            }
        }
    }
}

#[cfg(test)]
mod tests;
