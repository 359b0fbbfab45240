//! The recent events, and the clients that subscribe to them.

use std::{
    collections::VecDeque,
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tidegate_core::Timestamp;
use tokio::sync::broadcast::{self, error::RecvError};

/// The number of recent events that are kept. A subscriber that is further behind misses events.
pub const MAX_RECENT_EVENTS: usize = 1_024;

/// The maximum number of subscribers.
pub const MAX_SUBSCRIBERS: usize = 32;

/// The ID of an event: the start time of the process, and the event's number within the process.
/// IDs from different processes differ, so a client that resumes after a server restart misses no
/// event. No event has the default ID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventId {
    /// When the process that sent the event started, in milliseconds since 1970.
    start_ms: u64,
    /// The number of the event, counted from 1 since the process started.
    number: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start_ms, self.number)
    }
}

/// The error for a string that is not an event ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAnEventId;

impl FromStr for EventId {
    type Err = NotAnEventId;

    fn from_str(text: &str) -> Result<Self, NotAnEventId> {
        let (start_ms, number) = text.split_once('-').ok_or(NotAnEventId)?;
        let parse = |text: &str| text.parse().map_err(|_| NotAnEventId);
        Ok(Self {
            start_ms: parse(start_ms)?,
            number: parse(number)?,
        })
    }
}

/// An event with its ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentEvent {
    /// The ID of the event.
    pub id: EventId,
    /// The event as a JSON document in one line.
    pub json: Arc<str>,
}

/// Recent events, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventList {
    /// The events.
    pub events: Vec<RecentEvent>,
    /// The number of requested events that are no longer in memory.
    pub missed: u64,
}

/// The recent events of a process.
#[derive(Debug)]
pub(super) struct EventStream {
    /// The start time of the process, in milliseconds since 1970.
    start_ms: u64,
    recent: Mutex<VecDeque<RecentEvent>>,
    sender: broadcast::Sender<RecentEvent>,
    subscribers: Arc<AtomicUsize>,
}

impl EventStream {
    /// Creates an empty stream for a process that starts at `now`.
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            start_ms: now.as_micros() / 1_000,
            recent: Mutex::default(),
            sender: broadcast::Sender::new(MAX_RECENT_EVENTS),
            subscribers: Arc::default(),
        }
    }

    /// Assigns the next number to an event, formats the event with its ID, and sends it to the
    /// subscribers.
    pub(super) fn push(
        &self,
        last: &mut u64,
        render: impl FnOnce(EventId) -> Arc<str>,
    ) -> Arc<str> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        let id = EventId {
            start_ms: self.start_ms,
            number: *last,
        };
        let event = RecentEvent {
            id,
            json: render(id),
        };
        if recent.len() == MAX_RECENT_EVENTS {
            recent.pop_front();
        }
        let json = Arc::clone(&event.json);
        recent.push_back(event.clone());
        // An error means that there are no subscribers. The event is sent under the lock, so that a
        // subscriber receives each event exactly once.
        let _ = self.sender.send(event);
        json
    }

    /// Subscribes to the events after the event `after`, or to all recent events if this process
    /// has not sent that event. Returns `None` if there are too many subscribers.
    pub(super) fn subscribe(&self, after: EventId) -> Option<EventSubscription> {
        let count = self.subscribers.fetch_add(1, Ordering::Relaxed);
        let slot = SubscriberSlot(Arc::clone(&self.subscribers));
        if count >= MAX_SUBSCRIBERS {
            return None;
        }
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.sender.subscribe();
        let after = self.known(&recent, after);
        let missed = missed(&recent, after);
        let backlog = recent.iter().filter(|event| event.id.number > after);
        Some(EventSubscription {
            backlog: backlog.cloned().collect(),
            missed,
            receiver,
            _slot: slot,
        })
    }

    /// Returns the first `most` recent events after the event `after`. If this process did not send
    /// that event, the list begins with the oldest recent event. Without `after`, returns the last
    /// `most` events.
    pub(super) fn list(&self, after: Option<EventId>, most: usize) -> EventList {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let after = after.map(|after| self.known(&recent, after));
        let skipped = match after {
            None => recent.len().saturating_sub(most),
            Some(after) => recent.partition_point(|event| event.id.number <= after),
        };
        EventList {
            events: recent.iter().skip(skipped).take(most).cloned().collect(),
            missed: after.map_or(0, |after| missed(&recent, after)),
        }
    }

    /// Returns the number of the event `after`, or 0 if this process has not sent that event. In
    /// the second case, the client received `after` before a restart, or from another server.
    fn known(&self, recent: &VecDeque<RecentEvent>, after: EventId) -> u64 {
        let last = recent.back().map_or(0, |event| event.id.number);
        let is_known = after.start_ms == self.start_ms && after.number <= last;
        if is_known { after.number } else { 0 }
    }
}

/// Returns the number of events with numbers above `after` that are no longer in memory.
fn missed(recent: &VecDeque<RecentEvent>, after: u64) -> u64 {
    let first = recent.front().map_or(0, |event| event.id.number);
    first.saturating_sub(after.saturating_add(1))
}

/// Counts a subscriber until the slot is dropped.
#[derive(Debug)]
struct SubscriberSlot(Arc<AtomicUsize>);

impl Drop for SubscriberSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client's subscription to the events.
#[derive(Debug)]
pub struct EventSubscription {
    backlog: VecDeque<RecentEvent>,
    missed: u64,
    receiver: broadcast::Receiver<RecentEvent>,
    _slot: SubscriberSlot,
}

/// The next item that a subscriber receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamItem {
    /// An event.
    Event(RecentEvent),
    /// The subscriber was too slow and has missed this number of events. The missed events are no
    /// longer in memory.
    Missed(u64),
}

impl EventSubscription {
    /// Waits for the next event. Returns `None` when the process shuts down.
    pub async fn next(&mut self) -> Option<StreamItem> {
        if self.missed > 0 {
            return Some(StreamItem::Missed(std::mem::take(&mut self.missed)));
        }
        if let Some(event) = self.backlog.pop_front() {
            return Some(StreamItem::Event(event));
        }
        match self.receiver.recv().await {
            Ok(event) => Some(StreamItem::Event(event)),
            Err(RecvError::Lagged(missed)) => Some(StreamItem::Missed(missed)),
            Err(RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> EventStream {
        EventStream::new(Timestamp::from_micros(7_000))
    }

    fn id(number: u64) -> EventId {
        EventId {
            start_ms: 7,
            number,
        }
    }

    fn push(stream: &EventStream, last: &mut u64) {
        stream.push(last, |id| id.to_string().into());
    }

    #[tokio::test]
    async fn a_subscriber_receives_the_backlog_and_then_each_event_once() {
        let (stream, mut last) = (stream(), 0);
        for _ in 0..3 {
            push(&stream, &mut last);
        }
        let mut subscription = stream.subscribe(id(1)).unwrap();
        push(&stream, &mut last);
        for expected in [2, 3, 4] {
            let Some(StreamItem::Event(event)) = subscription.next().await else {
                panic!("no event");
            };
            assert_eq!(
                (event.id, event.json.to_string()),
                (id(expected), format!("7-{expected}"))
            );
        }
    }

    #[tokio::test]
    async fn a_slow_subscriber_learns_how_many_events_it_missed() {
        let (stream, mut last) = (stream(), 0);
        let mut slow = stream.subscribe(id(0)).unwrap();
        for _ in 0..MAX_RECENT_EVENTS + 10 {
            push(&stream, &mut last);
        }
        assert_eq!(slow.next().await, Some(StreamItem::Missed(10)));
        let mut late = stream.subscribe(id(4)).unwrap();
        assert_eq!(late.next().await, Some(StreamItem::Missed(6)));
        let Some(StreamItem::Event(event)) = late.next().await else {
            panic!("no event");
        };
        assert_eq!(event.id, id(11));
    }

    #[test]
    fn a_list_continues_after_an_event() {
        let (stream, mut last) = (stream(), 0);
        let numbers = |list: &EventList| -> Vec<u64> {
            list.events.iter().map(|event| event.id.number).collect()
        };
        assert_eq!(stream.list(None, 10), EventList::default());
        for _ in 0..MAX_RECENT_EVENTS + 3 {
            push(&stream, &mut last);
        }
        let list = stream.list(None, 2);
        assert_eq!((numbers(&list), list.missed), (vec![last - 1, last], 0));
        let list = stream.list(Some(id(last - 1)), 10);
        assert_eq!((numbers(&list), list.missed), (vec![last], 0));
        let list = stream.list(Some(id(0)), 2);
        assert_eq!((numbers(&list), list.missed), (vec![4, 5], 3));
        assert_eq!(numbers(&stream.list(Some(id(last)), 2)), [0; 0]);
        // No event of this process has the ID `earlier`.
        let earlier = EventId {
            start_ms: 6,
            number: last,
        };
        for unknown in [id(last + 1), earlier, EventId::default()] {
            assert_eq!(numbers(&stream.list(Some(unknown), 2)), [4, 5]);
        }
    }

    #[test]
    fn an_id_is_read_as_it_was_written() {
        assert_eq!("7-12".parse(), Ok(id(12)));
        assert_eq!(id(12).to_string(), "7-12");
        for text in ["", "12", "7-", "7-x", "-7-1"] {
            assert_eq!(text.parse::<EventId>(), Err(NotAnEventId), "{text}");
        }
    }

    #[test]
    fn the_number_of_subscribers_is_bounded() {
        let stream = stream();
        let mut all: Vec<_> = (0..MAX_SUBSCRIBERS)
            .map(|_| stream.subscribe(id(0)).unwrap())
            .collect();
        assert!(stream.subscribe(id(0)).is_none());
        all.pop();
        assert!(stream.subscribe(id(0)).is_some());
    }
}
