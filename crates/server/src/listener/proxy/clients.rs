//! Bounds the requests in flight per client, so that one client cannot use up all connections to an
//! upstream.
//!
//! A client is an IPv4 address or an IPv6 network, at the other end of the socket. Its counter
//! exists while it has a connection, so there are never more counters than connections.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher as _,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The number of lock shards. A lock is held only while a connection opens or closes.
const PARTS: usize = 16;

/// All clients that have a connection.
#[derive(Debug, Default)]
pub(super) struct Clients {
    parts: [Mutex<HashMap<IpAddr, Weak<InFlight>>>; PARTS],
    hasher: RandomState,
}

/// The number of requests that one client has in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    count: AtomicUsize,
    client: IpAddr,
    clients: Arc<Clients>,
}

impl Clients {
    /// Returns the counter of `client`, which all of its connections share.
    pub(super) fn enter(self: &Arc<Self>, client: IpAddr) -> Arc<InFlight> {
        let mut part = self.part(client);
        if let Some(known) = part.get(&client).and_then(Weak::upgrade) {
            return known;
        }
        let count = Arc::new(InFlight {
            count: AtomicUsize::new(0),
            client,
            clients: Arc::clone(self),
        });
        part.insert(client, Arc::downgrade(&count));
        count
    }

    fn part(&self, client: IpAddr) -> MutexGuard<'_, HashMap<IpAddr, Weak<InFlight>>> {
        let parts = u64::try_from(PARTS).unwrap_or(1);
        let at = usize::try_from(self.hasher.hash_one(client) % parts).unwrap_or(0);
        self.parts[at]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut part = self.clients.part(self.client);
        // A new counter may have replaced this one already.
        let is_gone = |known: &Weak<Self>| known.strong_count() == 0;
        if part.get(&self.client).is_some_and(is_gone) {
            part.remove(&self.client);
        }
    }
}

impl InFlight {
    /// Counts a request as in flight until the result is dropped; `None` if `most` are in flight
    /// already.
    pub(super) fn begin(self: &Arc<Self>, most: usize) -> Option<Begun> {
        let begun = self.begin_anyway();
        // Increments before comparing, so that two concurrent requests cannot both take the last
        // slot.
        (begun.0.count.load(Ordering::Relaxed) <= most).then_some(begun)
    }

    /// Counts a request as in flight without a limit.
    pub(super) fn begin_anyway(self: &Arc<Self>) -> Begun {
        self.count.fetch_add(1, Ordering::Relaxed);
        Begun(Arc::clone(self))
    }
}

/// A request extension: the client has reached its limit of this many requests in flight, and this
/// request exceeds it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Excess(pub(super) usize);

/// A request in flight.
#[derive(Debug)]
pub(super) struct Begun(Arc<InFlight>);

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_client_share_a_counter_until_the_last_closes() {
        let clients = Arc::<Clients>::default();
        let (one, other) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        let (first, second) = (clients.enter(one), clients.enter(one));
        let begun = [first.begin(2), second.begin(2)];
        assert!(begun.iter().all(Option::is_some));
        assert!(first.begin(2).is_none());
        assert!(clients.enter(other).begin(2).is_some());
        drop(begun);
        assert!(second.begin(1).is_some());
        drop((first, second));
        assert!(
            clients
                .parts
                .iter()
                .all(|part| part.lock().unwrap().is_empty())
        );
    }
}
