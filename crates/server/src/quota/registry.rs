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
}

impl Quotas {
    /// Puts `rules` in the place of those of the moment. Buckets keep what was used of them, and follow with
    /// their next report.
    pub fn swap_rules(&self, rules: Vec<QuotaRule>) {
        self.state().rules = rules;
    }

    /// A new stream, and where it finds what it is assigned.
    pub fn join(&self) -> (StreamId, mpsc::Receiver<Assigned>) {
        let stream = StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed));
        let (outbox, inbox) = mpsc::channel(MAX_WAITING);
        let buckets = HashSet::new();
        self.state()
            .streams
            .insert(stream, Stream { outbox, buckets });
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
        let state = self.state();
        let buckets = &state.streams.get(&stream)?.buckets;
        let ends = buckets.iter().filter_map(|key| state.buckets.get(key));
        ends.map(Bucket::window_end).min()
    }

    /// Begins the next windows of the buckets of `stream` whose time it is.
    pub fn roll(&self, stream: StreamId, now: Timestamp) {
        let mut state = self.state();
        let Some(buckets) = state
            .streams
            .get(&stream)
            .map(|stream| stream.buckets.clone())
        else {
            return;
        };
        let mut told = HashMap::new();
        for key in buckets {
            let changes = state.buckets.get_mut(&key).map(|bucket| bucket.roll(now));
            tell(&mut told, &key.1, changes.unwrap_or_default());
        }
        state.send(told);
    }

    /// The stream has ended: what it was assigned goes to others.
    pub fn leave(&self, stream: StreamId, now: Timestamp) {
        let mut state = self.state();
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
            if bucket.is_vacant() {
                let end = bucket.window_end();
                state.vacant.insert((end, key));
            }
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
            return Some(vec![(stream, Assignment::AllowAll)]);
        };
        let bucket = self.seat(stream, key, limit, now)?;
        bucket.set_limit(limit, now);
        Some(bucket.report(stream, usage, now))
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
            self.vacant.remove(&(bucket.window_end(), key.clone()));
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
