//! The registry of a listener's open connections. The registry admits new connections and evicts
//! idle connections.
//!
//! Like nginx, a full listener closes the longest-idle connection instead of refusing a new
//! connection. If new connections were refused, an attacker could open idle connections to lock out
//! all other clients. However, a new connection from a client that has reached its own limit is
//! refused.
//!
//! Idle time is measured in accepted connections instead of seconds. Whenever a connection's task
//! is polled, the task stores the number of connections that the listener has accepted so far.
//! Storing this number takes one load and one store, and needs no clock.

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

/// The maximum number of connections examined to find one to evict. During a flood, examining all
/// 10,000 connections would take a millisecond for each new connection.
const CANDIDATES: usize = 256;

/// While a connection is idle, the listener accepts newer connections. Once the number of newer
/// connections reaches 1/8 of the connection limit, an idle connection that has never sent a
/// request is evicted before all others. Until that point, the connection is treated like all
/// others, so that a new client has time to send its first request.
const SILENT_PART: usize = 8;

/// The open connections of one listener.
#[derive(Debug, Default)]
pub(super) struct ConnectionRegistry {
    counts: Arc<ListenerCounters>,
    open: Mutex<ConnectionTable>,
}

/// Counters that all connections of a listener share.
#[derive(Debug, Default)]
struct ListenerCounters {
    accepted: AtomicU64,
    floods: AtomicU64,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    slots: Vec<Arc<ConnectionState>>,
    /// The number of connections per client.
    clients: HashMap<IpAddr, usize>,
    /// The slot at which the last search for an idle connection ended.
    cursor: usize,
}

/// The state of one connection.
#[derive(Debug, Default)]
struct ConnectionState {
    /// The index in `ConnectionTable::slots`, guarded by the lock of the slots; [`GONE`] after
    /// removal.
    index: AtomicUsize,
    client: Option<IpAddr>,
    /// The number of connections that the listener had accepted when this connection was last
    /// active.
    active: AtomicU64,
    counts: Arc<ListenerCounters>,
    /// The number of requests in flight.
    in_flight: AtomicU32,
    has_sent_request: AtomicBool,
    is_evicted: AtomicBool,
    task: AtomicWaker,
}

/// How long to wait for requests that the client may have sent before it received the `GOAWAY`.
const GOAWAY_GRACE: Duration = Duration::from_millis(250);

/// The index of a connection after its removal from the list.
const GONE: usize = usize::MAX;

/// The result of registering a new connection.
#[derive(Debug)]
pub(super) enum RegistrationResult {
    /// The connection is admitted, and the caller must serve it. An idle connection may have been
    /// closed to make room for it.
    Admitted(Registration, Eviction),
    /// The client of the connection has reached its connection limit.
    ClientFull,
    /// The listener is full, and no connection is idle.
    Full,
}

/// Whether an idle connection was closed to make room for a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    None,
    One,
}

/// The limits that apply to a new connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionLimits {
    pub(super) connections: usize,
    /// The per-client limit; `None` if the client is exempt.
    pub(super) per_client: Option<usize>,
}

impl ConnectionRegistry {
    pub(super) fn register(
        self: &Arc<Self>,
        peer: IpAddr,
        limits: ConnectionLimits,
    ) -> RegistrationResult {
        let client = network(peer);
        let mut open = self.lock();
        let has = open.clients.get(&client).copied().unwrap_or(0);
        if limits.per_client.is_some_and(|most| has >= most) {
            return RegistrationResult::ClientFull;
        }
        let mut evicted = Eviction::None;
        if open.slots.len() >= limits.connections {
            if !self.evict_from(&mut open, limits.connections) {
                return RegistrationResult::Full;
            }
            evicted = Eviction::One;
        }
        let accepted = self.counts.accepted.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = Arc::new(ConnectionState {
            index: AtomicUsize::new(open.slots.len()),
            client: Some(client),
            active: AtomicU64::new(accepted),
            counts: Arc::clone(&self.counts),
            ..ConnectionState::default()
        });
        open.slots.push(Arc::clone(&slot));
        *open.clients.entry(client).or_default() += 1;
        let registry = Arc::clone(self);
        RegistrationResult::Admitted(Registration { registry, slot }, evicted)
    }

    /// Closes the longest-idle connection. Returns false if no connection is idle.
    pub(super) fn evict(&self) -> bool {
        let mut open = self.lock();
        let bound = open.slots.len();
        self.evict_from(&mut open, bound)
    }

    fn evict_from(&self, open: &mut ConnectionTable, bound: usize) -> bool {
        let count = open.slots.len();
        let silent_for = u64::try_from(bound / SILENT_PART).unwrap_or(u64::MAX);
        let now = self.counts.accepted.load(Ordering::Relaxed);
        let start = open.cursor;
        let looked_at = count.min(CANDIDATES);
        open.cursor = start.wrapping_add(looked_at);
        let candidates =
            (0..looked_at).filter_map(|step| open.slots.get(start.wrapping_add(step) % count));
        // `false` sorts before `true`, so silent connections come first. Within each of the two
        // groups, the longest-idle connection comes first.
        let victim = candidates
            .filter(|slot| slot.in_flight.load(Ordering::Relaxed) == 0)
            .min_by_key(|slot| {
                let active = slot.active.load(Ordering::Relaxed);
                let is_silent = !slot.has_sent_request.load(Ordering::Relaxed)
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

    /// Returns the number of connections closed because of control-frame floods.
    pub(super) fn floods(&self) -> u64 {
        self.counts.floods.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTable {
    fn remove(&mut self, slot: &ConnectionState) {
        let index = slot.index.swap(GONE, Ordering::Relaxed);
        if index == GONE {
            return;
        }
        debug_assert!(
            index < self.slots.len(),
            "the index of a slot that is not GONE must be in the list"
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

/// The registration of a connection. Dropping the registration removes the connection from the
/// registry.
#[derive(Debug)]
pub(super) struct Registration {
    registry: Arc<ConnectionRegistry>,
    slot: Arc<ConnectionState>,
}

impl Registration {
    pub(super) fn activity(&self) -> Activity {
        Activity(Arc::clone(&self.slot))
    }

    /// Polls the connection's handler until it completes or the connection is evicted. The function
    /// must run in its own task, so that the waker stays the same.
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

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.slot);
    }
}

/// The activity of a connection. A handler reports the requests of its connection here, so that the
/// registry does not evict a busy connection.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<ConnectionState>);

impl Activity {
    /// Records the start of a request. The connection is not evicted until the returned guard is
    /// dropped.
    #[must_use]
    pub fn begin(&self) -> InFlight {
        self.note_request();
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(&self.0))
    }

    /// Records a request that was handled immediately.
    pub fn note_request(&self) {
        self.0.has_sent_request.store(true, Ordering::Relaxed);
    }

    /// Returns whether a request is in flight.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.0.in_flight.load(Ordering::Relaxed) > 0
    }

    /// Waits until no request is in flight. Sleeps for a grace period before each check, because
    /// further requests may be on their way. Used to close an HTTP/2 connection whose client may
    /// never react to the `GOAWAY`.
    pub async fn drained(&self) {
        loop {
            tokio::time::sleep(GOAWAY_GRACE).await;
            if self.0.in_flight.load(Ordering::Relaxed) == 0 {
                return;
            }
        }
    }

    /// Counts the connection as closed because of a control-frame flood.
    pub(crate) fn note_flood(&self) {
        self.0.counts.floods.fetch_add(1, Ordering::Relaxed);
    }
}

/// A guard for a request in flight.
#[derive(Debug)]
pub struct InFlight(Arc<ConnectionState>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the address to which the per-client limit applies: an IPv4 address, or the /64 network
/// of an IPv6 address. A /64 usually belongs to one host.
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

    fn limits(connections: usize, per_client: usize) -> ConnectionLimits {
        ConnectionLimits {
            connections,
            per_client: Some(per_client),
        }
    }

    fn seat(
        registry: &Arc<ConnectionRegistry>,
        client: &str,
        limits: ConnectionLimits,
    ) -> Registration {
        match registry.register(peer(client), limits) {
            RegistrationResult::Admitted(seat, _) => seat,
            refused => panic!("{refused:?}"),
        }
    }

    fn is_evicted(seat: &Registration) -> bool {
        seat.slot.is_evicted.load(Ordering::Relaxed)
    }

    #[test]
    fn a_client_cannot_exceed_its_limit_and_a_slash_64_is_one_client() {
        let registry = Arc::new(ConnectionRegistry::default());
        let limits = limits(10, 2);
        let kept = [
            seat(&registry, "2001:db8::1", limits),
            seat(&registry, "2001:db8::2", limits),
        ];
        let more = registry.register(peer("2001:db8:0:0:ffff::"), limits);
        assert!(matches!(more, RegistrationResult::ClientFull));
        let _other = seat(&registry, "2001:db8:0:1::1", limits);
        let _same = [seat(&registry, "192.0.2.1", limits), {
            seat(&registry, "::ffff:192.0.2.1", limits)
        }];
        let more = registry.register(peer("192.0.2.1"), limits);
        assert!(matches!(more, RegistrationResult::ClientFull));
        drop(kept);
        seat(&registry, "2001:db8::3", limits);
        let open = registry.lock();
        assert_eq!((open.slots.len(), open.clients.len()), (3, 2));
    }

    #[test]
    fn the_longest_idle_connection_is_evicted_and_active_ones_stay() {
        let registry = Arc::new(ConnectionRegistry::default());
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
            registry.register(peer("192.0.2.5"), limits),
            RegistrationResult::Full
        ));
        drop((at_work, all_at_work));
        assert!(registry.evict());
        assert!(is_evicted(&busy));
    }

    #[test]
    fn a_connection_without_a_request_is_evicted_first_after_a_grace_period() {
        let registry = Arc::new(ConnectionRegistry::default());
        let limits = limits(16, 100);
        let active: Vec<Registration> = (0..15)
            .map(|_| seat(&registry, "192.0.2.1", limits))
            .collect();
        for seat in &active {
            seat.activity().note_request();
        }
        let silent = seat(&registry, "192.0.2.2", limits);
        let next = seat(&registry, "192.0.2.3", limits);
        assert!(!is_evicted(&silent), "a new connection has a grace period");
        assert!(is_evicted(&active[0]));
        next.activity().note_request();
        let last = seat(&registry, "192.0.2.3", limits);
        last.activity().note_request();
        assert_eq!((is_evicted(&silent), is_evicted(&active[1])), (false, true));
        let _more = seat(&registry, "192.0.2.3", limits);
        assert!(is_evicted(&silent));
        assert!(!is_evicted(&active[2]));
    }
}
