//! The open connections of a listener: who may have one more, and which is closed to make room.
//!
//! A listener that is full closes the connection that has been idle for longest, as nginx does, rather than refuse the
//! next client: otherwise whoever opens connections and says nothing keeps everybody else out. A client over its own
//! bound is refused.
//!
//! Idleness is measured in accepted connections: each time a connection's task is polled it notes how many the
//! listener has accepted so far. That costs one load and one store, where a clock would have to be read.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::task::AtomicWaker;

/// How many connections are looked at to find one to close. Looking at all of 10,000 would take a millisecond for each
/// connection that a flood makes.
const CANDIDATES: usize = 256;

/// A connection that has not asked for anything yet is closed before any other, once the listener has accepted this part
/// of its bound since: a client that has only just connected gets time to ask.
const SILENT_PART: usize = 8;

/// The connections of one listener.
#[derive(Debug, Default)]
pub(super) struct Registry {
    counts: Arc<Counts>,
    open: Mutex<Open>,
}

/// What the connections of a listener count together.
#[derive(Debug, Default)]
struct Counts {
    accepted: AtomicU64,
    floods: AtomicU64,
}

#[derive(Debug, Default)]
struct Open {
    slots: Vec<Arc<Slot>>,
    /// How many connections each client has.
    clients: HashMap<IpAddr, usize>,
    /// Where the last search for an idle connection ended.
    cursor: usize,
}

/// What the registry knows of one connection.
#[derive(Debug, Default)]
struct Slot {
    /// Where it is in `Open::slots`, under its lock; [`GONE`] once it is not there.
    index: AtomicUsize,
    client: Option<IpAddr>,
    /// How many connections the listener had accepted when this one was last active.
    active: AtomicU64,
    counts: Arc<Counts>,
    /// Requests that have begun and are not answered.
    in_flight: AtomicU32,
    has_asked: AtomicBool,
    is_evicted: AtomicBool,
    task: AtomicWaker,
}

/// How long a request may be on its way after a `GOAWAY`.
const GOAWAY_GRACE: Duration = Duration::from_millis(250);

/// The index of a slot that has left the list.
const GONE: usize = usize::MAX;

/// What becomes of a new connection.
#[derive(Debug)]
pub(super) enum Entry {
    /// It is served, and perhaps another was closed to make room.
    Admitted(Seat, Evicted),
    /// Its client has as many as it may have.
    ClientFull,
    /// The listener is full, and every connection is at work.
    Full,
}

/// Whether an idle connection was closed to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evicted {
    None,
    One,
}

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) connections: usize,
    /// `None` if this client is not bounded.
    pub(super) per_client: Option<usize>,
}

impl Registry {
    pub(super) fn enter(self: &Arc<Self>, peer: IpAddr, limits: Limits) -> Entry {
        let client = network(peer);
        let mut open = self.lock();
        let has = open.clients.get(&client).copied().unwrap_or(0);
        if limits.per_client.is_some_and(|most| has >= most) {
            return Entry::ClientFull;
        }
        let mut evicted = Evicted::None;
        if open.slots.len() >= limits.connections {
            if !self.evict_from(&mut open, limits.connections) {
                return Entry::Full;
            }
            evicted = Evicted::One;
        }
        let accepted = self.counts.accepted.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = Arc::new(Slot {
            index: AtomicUsize::new(open.slots.len()),
            client: Some(client),
            active: AtomicU64::new(accepted),
            counts: Arc::clone(&self.counts),
            ..Slot::default()
        });
        open.slots.push(Arc::clone(&slot));
        *open.clients.entry(client).or_default() += 1;
        let registry = Arc::clone(self);
        Entry::Admitted(Seat { registry, slot }, evicted)
    }

    /// Closes the connection that has been idle for longest; false if every one is at work.
    pub(super) fn evict(&self) -> bool {
        let mut open = self.lock();
        let bound = open.slots.len();
        self.evict_from(&mut open, bound)
    }

    fn evict_from(&self, open: &mut Open, bound: usize) -> bool {
        let count = open.slots.len();
        let silent_for = u64::try_from(bound / SILENT_PART).unwrap_or(u64::MAX);
        let now = self.counts.accepted.load(Ordering::Relaxed);
        let start = open.cursor;
        let looked_at = count.min(CANDIDATES);
        open.cursor = start.wrapping_add(looked_at);
        let candidates =
            (0..looked_at).filter_map(|step| open.slots.get(start.wrapping_add(step) % count));
        let victim = candidates
            .filter(|slot| slot.in_flight.load(Ordering::Relaxed) == 0)
            .min_by_key(|slot| {
                let active = slot.active.load(Ordering::Relaxed);
                let is_silent = !slot.has_asked.load(Ordering::Relaxed)
                    && now.saturating_sub(active) >= silent_for;
                (!is_silent, active)
            });
        let Some(victim) = victim.cloned() else {
            return false;
        };
        open.remove(&victim);
        victim.is_evicted.store(true, Ordering::Release);
        victim.task.wake();
        true
    }

    /// How many connections were closed because of their control frames.
    pub(super) fn floods(&self) -> u64 {
        self.counts.floods.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn remove(&mut self, slot: &Slot) {
        let index = slot.index.swap(GONE, Ordering::Relaxed);
        if index == GONE {
            return;
        }
        debug_assert!(
            index < self.slots.len(),
            "a slot that is not gone is listed"
        );
        self.slots.swap_remove(index);
        if let Some(moved) = self.slots.get(index) {
            moved.index.store(index, Ordering::Relaxed);
        }
        if let Some(client) = slot.client
            && let Some(count) = self.clients.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

/// A connection's place in the registry, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    registry: Arc<Registry>,
    slot: Arc<Slot>,
}

impl Seat {
    pub(super) fn activity(&self) -> Activity {
        Activity(Arc::clone(&self.slot))
    }

    /// Runs what serves the connection, until it ends or the connection is closed to make room. It must be in a task of
    /// its own, whose waker stays the same.
    pub(super) async fn serve<F: Future<Output = ()>>(&self, serving: F) {
        let mut serving = std::pin::pin!(serving);
        let slot = &*self.slot;
        let mut is_registered = false;
        std::future::poll_fn(|cx| {
            if !is_registered {
                is_registered = true;
                slot.task.register(cx.waker());
            }
            if slot.is_evicted.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            let accepted = slot.counts.accepted.load(Ordering::Relaxed);
            slot.active.store(accepted, Ordering::Relaxed);
            serving.as_mut().poll(cx)
        })
        .await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.slot);
    }
}

/// What a handler tells of its connection, so that one that is at work is not closed to make room for another.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<Slot>);

impl Activity {
    /// A request has begun; the connection is not closed to make room until the result is dropped.
    #[must_use]
    pub fn begin(&self) -> InFlight {
        self.note_request();
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(&self.0))
    }

    /// The client has asked for something, which was answered at once.
    pub fn note_request(&self) {
        self.0.has_asked.store(true, Ordering::Relaxed);
    }

    /// Waits until nothing is in flight, and for a moment in which a request may arrive that was on its way. For the end of
    /// an HTTP/2 connection, whose client may never answer the `GOAWAY`.
    pub(crate) async fn drained(&self) {
        loop {
            tokio::time::sleep(GOAWAY_GRACE).await;
            if self.0.in_flight.load(Ordering::Relaxed) == 0 {
                return;
            }
        }
    }

    /// The connection is closed because its client sends nothing but control frames.
    pub(crate) fn note_flood(&self) {
        self.0.counts.floods.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub struct InFlight(Arc<Slot>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whom a bound per client counts as one: an address of IPv4, or a /64 of IPv6, which one host has to itself.
pub(crate) fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) & (u128::MAX << 64);
            IpAddr::V6(Ipv6Addr::from(network))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn limits(connections: usize, per_client: usize) -> Limits {
        Limits {
            connections,
            per_client: Some(per_client),
        }
    }

    fn seat(registry: &Arc<Registry>, client: &str, limits: Limits) -> Seat {
        match registry.enter(peer(client), limits) {
            Entry::Admitted(seat, _) => seat,
            refused => panic!("{refused:?}"),
        }
    }

    fn is_evicted(seat: &Seat) -> bool {
        seat.slot.is_evicted.load(Ordering::Relaxed)
    }

    #[test]
    fn a_client_has_no_more_than_its_bound_and_a_64_is_one_client() {
        let registry = Arc::new(Registry::default());
        let limits = limits(10, 2);
        let kept = [
            seat(&registry, "2001:db8::1", limits),
            seat(&registry, "2001:db8::2", limits),
        ];
        let more = registry.enter(peer("2001:db8:0:0:ffff::"), limits);
        assert!(matches!(more, Entry::ClientFull));
        let _other = seat(&registry, "2001:db8:0:1::1", limits);
        let _same = [seat(&registry, "192.0.2.1", limits), {
            seat(&registry, "::ffff:192.0.2.1", limits)
        }];
        let more = registry.enter(peer("192.0.2.1"), limits);
        assert!(matches!(more, Entry::ClientFull));
        drop(kept);
        seat(&registry, "2001:db8::3", limits);
        let open = registry.lock();
        assert_eq!((open.slots.len(), open.clients.len()), (3, 2));
    }

    #[test]
    fn the_idlest_makes_room_and_whoever_is_at_work_stays() {
        let registry = Arc::new(Registry::default());
        let limits = limits(3, 10);
        let busy = seat(&registry, "192.0.2.1", limits);
        let at_work = busy.activity().begin();
        let [first, second] = ["192.0.2.2", "192.0.2.3"].map(|ip| seat(&registry, ip, limits));
        for seat in [&first, &second] {
            seat.activity().note_request();
        }
        let third = seat(&registry, "192.0.2.4", limits);
        assert_eq!(
            [&busy, &first, &second].map(is_evicted),
            [false, true, false]
        );
        let all_at_work = [second.activity().begin(), third.activity().begin()];
        assert!(matches!(
            registry.enter(peer("192.0.2.5"), limits),
            Entry::Full
        ));
        drop((at_work, all_at_work));
        assert!(registry.evict());
        assert!(is_evicted(&busy));
    }

    #[test]
    fn a_silent_connection_goes_before_one_that_has_asked_but_not_at_once() {
        let registry = Arc::new(Registry::default());
        let limits = limits(16, 100);
        let asked: Vec<Seat> = (0..15)
            .map(|_| seat(&registry, "192.0.2.1", limits))
            .collect();
        for seat in &asked {
            seat.activity().note_request();
        }
        let silent = seat(&registry, "192.0.2.2", limits);
        let next = seat(&registry, "192.0.2.3", limits);
        assert!(!is_evicted(&silent), "it has only just come");
        assert!(is_evicted(&asked[0]));
        next.activity().note_request();
        let last = seat(&registry, "192.0.2.3", limits);
        last.activity().note_request();
        assert_eq!((is_evicted(&silent), is_evicted(&asked[1])), (false, true));
        let _more = seat(&registry, "192.0.2.3", limits);
        assert!(is_evicted(&silent));
        assert!(!is_evicted(&asked[2]));
    }
}
