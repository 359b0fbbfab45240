//! The recent events, and the clients that follow them.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::broadcast::{self, error::RecvError};

/// The number of recent events that are kept. A subscriber that is further behind misses events.
pub const MAX_RECENT_EVENTS: usize = 1_024;

/// The maximum number of subscribers.
pub const MAX_SUBSCRIBERS: usize = 32;

/// An event with its number. The first event of the process has the number 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    /// The number.
    pub number: u64,
    /// The event as a JSON document in one line.
    pub json: Arc<str>,
}

/// Recent events, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventList {
    /// The events.
    pub events: Vec<NumberedEvent>,
    /// The number of requested events that are no longer in memory.
    pub missed: u64,
}

/// The recent events of a process.
#[derive(Debug)]
pub(super) struct EventStream {
    recent: Mutex<VecDeque<NumberedEvent>>,
    sender: broadcast::Sender<NumberedEvent>,
    subscribers: Arc<AtomicUsize>,
}

impl Default for EventStream {
    fn default() -> Self {
        Self {
            recent: Mutex::default(),
            sender: broadcast::Sender::new(MAX_RECENT_EVENTS),
            subscribers: Arc::default(),
        }
    }
}

impl EventStream {
    /// Numbers an event, renders it with its number, and sends it to the subscribers.
    pub(super) fn push(&self, last: &mut u64, render: impl FnOnce(u64) -> Arc<str>) -> Arc<str> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        let event = NumberedEvent {
            number: *last,
            json: render(*last),
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

    /// Returns a subscription to the events with numbers above `after`; `None` if there are too
    /// many subscribers.
    pub(super) fn subscribe(&self, after: u64) -> Option<EventSubscription> {
        let count = self.subscribers.fetch_add(1, Ordering::Relaxed);
        let slot = SubscriberSlot(Arc::clone(&self.subscribers));
        if count >= MAX_SUBSCRIBERS {
            return None;
        }
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.sender.subscribe();
        let after = known(&recent, after);
        let missed = missed(&recent, after);
        let backlog = recent.iter().filter(|event| event.number > after);
        Some(EventSubscription {
            backlog: backlog.cloned().collect(),
            missed,
            receiver,
            _slot: slot,
        })
    }

    /// Returns the first `most` events with numbers above `after`, or without `after` the last
    /// `most` events.
    pub(super) fn list(&self, after: Option<u64>, most: usize) -> EventList {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let after = after.map(|after| known(&recent, after));
        let skipped = match after {
            None => recent.len().saturating_sub(most),
            Some(after) => recent.partition_point(|event| event.number <= after),
        };
        EventList {
            events: recent.iter().skip(skipped).take(most).cloned().collect(),
            missed: after.map_or(0, |after| missed(&recent, after)),
        }
    }
}

/// Returns `after`, or 0 if there was no event with this number yet. The client has then received
/// its events from a process that was restarted since.
fn known(recent: &VecDeque<NumberedEvent>, after: u64) -> u64 {
    let last = recent.back().map_or(0, |event| event.number);
    if after > last { 0 } else { after }
}

/// Returns the number of events with numbers above `after` that are no longer in memory.
fn missed(recent: &VecDeque<NumberedEvent>, after: u64) -> u64 {
    let first = recent.front().map_or(0, |event| event.number);
    first.saturating_sub(after.saturating_add(1))
}

/// Counts a subscriber until it is dropped.
#[derive(Debug)]
struct SubscriberSlot(Arc<AtomicUsize>);

impl Drop for SubscriberSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client that follows the events.
#[derive(Debug)]
pub struct EventSubscription {
    backlog: VecDeque<NumberedEvent>,
    missed: u64,
    receiver: broadcast::Receiver<NumberedEvent>,
    _slot: SubscriberSlot,
}

/// What a subscriber receives next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamItem {
    /// An event.
    Event(NumberedEvent),
    /// The subscriber was too slow, and this number of events is no longer in memory.
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

    fn push(stream: &EventStream, last: &mut u64) {
        stream.push(last, |number| number.to_string().into());
    }

    #[tokio::test]
    async fn a_subscriber_receives_the_backlog_and_then_each_event_once() {
        let (stream, mut last) = (EventStream::default(), 0);
        for _ in 0..3 {
            push(&stream, &mut last);
        }
        let mut subscription = stream.subscribe(1).unwrap();
        push(&stream, &mut last);
        for expected in [2, 3, 4] {
            let Some(StreamItem::Event(event)) = subscription.next().await else {
                panic!("no event");
            };
            assert_eq!(
                (event.number, &*event.json),
                (expected, &*expected.to_string())
            );
        }
    }

    #[tokio::test]
    async fn a_slow_subscriber_learns_how_many_events_it_missed() {
        let (stream, mut last) = (EventStream::default(), 0);
        let mut slow = stream.subscribe(0).unwrap();
        for _ in 0..MAX_RECENT_EVENTS + 10 {
            push(&stream, &mut last);
        }
        assert_eq!(slow.next().await, Some(StreamItem::Missed(10)));
        let mut late = stream.subscribe(4).unwrap();
        assert_eq!(late.next().await, Some(StreamItem::Missed(6)));
        let Some(StreamItem::Event(event)) = late.next().await else {
            panic!("no event");
        };
        assert_eq!(event.number, 11);
    }

    #[test]
    fn a_list_continues_after_an_event() {
        let (stream, mut last) = (EventStream::default(), 0);
        let numbers = |list: &EventList| -> Vec<u64> {
            list.events.iter().map(|event| event.number).collect()
        };
        assert_eq!(stream.list(None, 10), EventList::default());
        for _ in 0..MAX_RECENT_EVENTS + 3 {
            push(&stream, &mut last);
        }
        let list = stream.list(None, 2);
        assert_eq!((numbers(&list), list.missed), (vec![last - 1, last], 0));
        let list = stream.list(Some(last - 1), 10);
        assert_eq!((numbers(&list), list.missed), (vec![last], 0));
        let list = stream.list(Some(0), 2);
        assert_eq!((numbers(&list), list.missed), (vec![4, 5], 3));
        assert_eq!(numbers(&stream.list(Some(last), 2)), [0; 0]);
        // The number is from before a restart.
        assert_eq!(numbers(&stream.list(Some(last + 1), 2)), [4, 5]);
    }

    #[test]
    fn the_number_of_subscribers_is_bounded() {
        let stream = EventStream::default();
        let mut all: Vec<_> = (0..MAX_SUBSCRIBERS)
            .map(|_| stream.subscribe(0).unwrap())
            .collect();
        assert!(stream.subscribe(0).is_none());
        all.pop();
        assert!(stream.subscribe(0).is_some());
    }
}
