//! The connected streams, their quota buckets, and the delivery of assignments.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::Entry},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_config::quota::{BucketId, QuotaLimit, QuotaRule};
use tidegate_core::Timestamp;
use tokio::sync::mpsc;

use super::bucket::{Assignment, AssignmentChanges, Bucket, StreamId, Usage};

/// The maximum number of buckets per stream. The server asks Envoy to abandon any additional
/// bucket.
pub const MAX_STREAM_BUCKETS: usize = 10_000;

/// The maximum number of buckets in total.
pub const MAX_QUOTA_BUCKETS: usize = 100_000;

/// The maximum number of unread messages per stream. If a stream does not read its messages,
/// further messages are dropped. No assignment is lost, because the response to the stream's next
/// report contains its current assignment.
const MAX_WAITING: usize = 64;

/// The assignments for a stream, one per bucket. `None` asks Envoy to abandon the bucket.
pub type BucketAssignments = Vec<(BucketId, Option<Assignment>)>;

/// The number of buckets and streams, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaCounts {
    /// The number of buckets, including buckets without streams that are kept because their usage
    /// still counts.
    pub buckets: usize,
    /// The number of connected streams.
    pub streams: usize,
}

type BucketKey = (Box<str>, BucketId);

/// The quotas of one server: the rules, the buckets, and the streams that use the buckets.
#[derive(Debug, Default)]
pub struct Quotas {
    next_stream: AtomicU64,
    state: Mutex<QuotaState>,
}

#[derive(Debug, Default)]
struct QuotaState {
    rules: Vec<QuotaRule>,
    buckets: HashMap<BucketKey, Bucket>,
    streams: HashMap<StreamId, StreamState>,
    /// The buckets without streams, ordered by the end of the window to which their usage belongs.
    vacant: BTreeSet<(Timestamp, BucketKey)>,
}

#[derive(Debug)]
struct StreamState {
    outbox: mpsc::Sender<BucketAssignments>,
    buckets: HashSet<BucketKey>,
    /// The earliest end of a window among the stream's buckets.
    window_end: Option<Timestamp>,
}

impl Quotas {
    /// Replaces the rules, and notifies every stream whose assignments change. A rate's shares
    /// change immediately. A budget's grant changes immediately only if all of it has been reported
    /// as used. A stream whose bucket no longer matches a quota is assigned ALLOW_ALL. The buckets
    /// keep their usage until their windows end.
    pub fn swap_rules(&self, rules: Vec<QuotaRule>, now: Timestamp) {
        let mut state = self.state();
        if state.rules == rules {
            // Skip the update if a reload does not change the quotas, because there may be many
            // buckets.
            return;
        }
        state.rules = rules;
        let streams: Vec<StreamId> = state.streams.keys().copied().collect();
        drop(state);
        // Lock the state separately for each stream, so that reports do not have to wait until all
        // streams are processed.
        for stream in streams {
            self.state().apply_rules(stream, now);
        }
    }

    /// Registers a new stream. Returns the stream's ID and the receiver of its assignments.
    pub fn add_stream(&self) -> (StreamId, mpsc::Receiver<BucketAssignments>) {
        let stream = StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed));
        let (outbox, inbox) = mpsc::channel(MAX_WAITING);
        let joined = StreamState {
            outbox,
            buckets: HashSet::new(),
            window_end: None,
        };
        self.state().streams.insert(stream, joined);
        (stream, inbox)
    }

    /// Records a report from `stream` at `now`. Sends the response to the receiver of `stream`. If
    /// the assignments of other streams change, sends these assignments to the receivers of those
    /// streams.
    pub fn report(
        &self,
        stream: StreamId,
        domain: &str,
        usages: Vec<(BucketId, Usage)>,
        now: Timestamp,
    ) {
        let mut state = self.state();
        let mut notifications = HashMap::new();
        for (id, usage) in usages {
            let key = (domain.into(), id);
            match state.report(stream, &key, usage, now) {
                Some(changes) => add_notifications(&mut notifications, &key.1, changes),
                None => notifications.entry(stream).or_default().push((key.1, None)),
            }
        }
        state.send(notifications);
    }

    /// Returns the earliest end of a window among the buckets of `stream`. The caller must call
    /// [`Self::roll`] at the end of that window.
    #[must_use]
    pub fn next_window(&self, stream: StreamId) -> Option<Timestamp> {
        self.state().streams.get(&stream)?.window_end
    }

    /// Begins the next window in each bucket of `stream` whose window has ended.
    pub fn roll(&self, stream: StreamId, now: Timestamp) {
        let state = &mut *self.state();
        let Some(rolled) = state.streams.get_mut(&stream) else {
            return;
        };
        let (mut notifications, mut first_end) = (HashMap::new(), None);
        for key in &rolled.buckets {
            let Some(bucket) = state.buckets.get_mut(key) else {
                continue;
            };
            add_notifications(&mut notifications, &key.1, bucket.roll(now));
            first_end = earlier(first_end, bucket.window_end());
        }
        rolled.window_end = first_end;
        state.send(notifications);
    }

    /// Removes a closed stream, and redistributes the requests assigned to it.
    pub fn remove_stream(&self, stream: StreamId, now: Timestamp) {
        let state = &mut *self.state();
        let Some(left) = state.streams.remove(&stream) else {
            return;
        };
        let mut notifications = HashMap::new();
        for key in left.buckets {
            let Some(bucket) = state.buckets.get_mut(&key) else {
                continue;
            };
            let changes = bucket.remove_stream(stream, now);
            add_notifications(&mut notifications, &key.1, changes);
            state.vacate(key);
        }
        state.send(notifications);
    }

    /// Returns the number of buckets and streams.
    #[must_use]
    pub fn counts(&self) -> QuotaCounts {
        let state = self.state();
        QuotaCounts {
            buckets: state.buckets.len(),
            streams: state.streams.len(),
        }
    }

    fn state(&self) -> MutexGuard<'_, QuotaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the earlier of two optional times.
fn earlier(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    one.into_iter().chain(other).min()
}

type Notifications = HashMap<StreamId, BucketAssignments>;

fn add_notifications(notifications: &mut Notifications, id: &BucketId, changes: AssignmentChanges) {
    for (stream, assignment) in changes {
        notifications
            .entry(stream)
            .or_default()
            .push((id.clone(), Some(assignment)));
    }
}

impl QuotaState {
    /// Records a report, and returns the assignments to send. Returns `None` if a maximum number of
    /// buckets is reached.
    fn report(
        &mut self,
        stream: StreamId,
        key: &BucketKey,
        usage: Usage,
        now: Timestamp,
    ) -> Option<AssignmentChanges> {
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

    /// Applies the changed rules to the buckets of `stream`.
    fn apply_rules(&mut self, stream: StreamId, now: Timestamp) {
        let Some(held) = self.streams.get(&stream).map(|stream| &stream.buckets) else {
            return;
        };
        let (mut notifications, mut first_end, mut gone) = (HashMap::new(), None, Vec::new());
        for key in held {
            let rule = self.rules.iter().find(|rule| rule.applies(&key.0, &key.1));
            match (rule, self.buckets.get_mut(key)) {
                (Some(rule), Some(bucket)) => {
                    add_notifications(
                        &mut notifications,
                        &key.1,
                        bucket.apply_limit(rule.limit, now),
                    );
                    first_end = earlier(first_end, bucket.window_end());
                }
                (None, _) => gone.push(key.clone()),
                (Some(_), None) => {}
            }
        }
        for key in gone {
            self.release(stream, &key);
            add_notifications(
                &mut notifications,
                &key.1,
                vec![(stream, Assignment::AllowAll)],
            );
        }
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.window_end = first_end;
        }
        self.send(notifications);
    }

    /// Removes `stream` from a bucket that no longer matches any quota.
    fn release(&mut self, stream: StreamId, key: &BucketKey) {
        let open_stream = self.streams.get_mut(&stream);
        if open_stream.is_some_and(|stream| stream.buckets.remove(key)) {
            if let Some(bucket) = self.buckets.get_mut(key) {
                bucket.remove_seat(stream);
            }
            self.vacate(key.clone());
        }
    }

    /// Marks a bucket without streams for removal at the end of its window, because its usage
    /// counts until then. The bucket of a rate is removed immediately, because it has no usage to
    /// keep.
    fn vacate(&mut self, key: BucketKey) {
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

    /// Adds `stream` to a bucket, and returns the bucket. Creates the bucket if it does not exist.
    /// Returns `None` if a maximum number of buckets is reached.
    fn seat(
        &mut self,
        stream: StreamId,
        key: &BucketKey,
        limit: QuotaLimit,
        now: Timestamp,
    ) -> Option<&mut Bucket> {
        self.remove_expired(now);
        let joined = &mut self.streams.get_mut(&stream)?.buckets;
        let is_full = self.buckets.len() >= MAX_QUOTA_BUCKETS;
        let is_known = joined.contains(key);
        if !is_known && joined.len() >= MAX_STREAM_BUCKETS {
            return None;
        }
        let bucket = match self.buckets.entry(key.clone()) {
            Entry::Occupied(bucket) => bucket.into_mut(),
            Entry::Vacant(_) if is_full => return None,
            Entry::Vacant(room) => room.insert(Bucket::new(limit, now)),
        };
        if !is_known {
            joined.insert(key.clone());
            if let Some(end) = bucket.window_end() {
                self.vacant.remove(&(end, key.clone()));
            }
        }
        Some(bucket)
    }

    /// Removes up to two buckets that have no streams and whose windows have ended. Each call of
    /// [`Self::seat`] adds at most one bucket, so expired buckets cannot accumulate.
    fn remove_expired(&mut self, now: Timestamp) {
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

    fn send(&self, notifications: Notifications) {
        for (stream, assigned) in notifications {
            if let Some(stream) = self.streams.get(&stream) {
                // If the outbox is full, the message is dropped. The response to the stream's next
                // report contains the assignment again.
                let _ = stream.outbox.try_send(assigned);
            }
        }
    }
}

#[cfg(test)]
mod tests;
