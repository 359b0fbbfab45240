//! Limits the requests in flight per client, so that one client cannot use up all connections to an
//! upstream.
//!
//! A client is identified by the peer address of its socket: an IPv4 address or an IPv6 network. A
//! client's counter exists only while the client has a connection, so there are never more counters
//! than connections.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher as _,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The number of lock shards. The lock of a shard is taken only when a connection opens or closes.
const SHARDS: usize = 16;

/// The counters of all clients that have at least one connection.
#[derive(Debug, Default)]
pub(crate) struct ClientRegistry {
    shards: [Mutex<HashMap<IpAddr, Weak<ClientRequests>>>; SHARDS],
    hasher: RandomState,
}

/// The counter of one client's requests in flight.
#[derive(Debug)]
pub(crate) struct ClientRequests {
    count: AtomicUsize,
    client: IpAddr,
    clients: Arc<ClientRegistry>,
}

impl ClientRegistry {
    /// Returns the counter that all connections of `client` share.
    pub(crate) fn counter(self: &Arc<Self>, client: IpAddr) -> Arc<ClientRequests> {
        let mut shard = self.shard(client);
        if let Some(counter) = shard.get(&client).and_then(Weak::upgrade) {
            return counter;
        }
        let count = Arc::new(ClientRequests {
            count: AtomicUsize::new(0),
            client,
            clients: Arc::clone(self),
        });
        shard.insert(client, Arc::downgrade(&count));
        count
    }

    fn shard(&self, client: IpAddr) -> MutexGuard<'_, HashMap<IpAddr, Weak<ClientRequests>>> {
        let shards = u64::try_from(SHARDS).unwrap_or(1);
        let at = usize::try_from(self.hasher.hash_one(client) % shards).unwrap_or(0);
        self.shards[at]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ClientRequests {
    fn drop(&mut self) {
        let mut shard = self.clients.shard(self.client);
        // Another connection of the same client may already have inserted a new counter.
        let is_gone = |counter: &Weak<Self>| counter.strong_count() == 0;
        if shard.get(&self.client).is_some_and(is_gone) {
            shard.remove(&self.client);
        }
    }
}

impl ClientRequests {
    /// Counts a request as in flight until the returned value is dropped. Returns `None` if `max`
    /// requests are already in flight.
    pub(crate) fn try_begin(self: &Arc<Self>, max: usize) -> Option<ClientRequest> {
        let request = self.begin_unlimited();
        // The counter is incremented before the comparison, so two concurrent requests cannot both
        // take the last slot.
        (request.0.count.load(Ordering::Relaxed) <= max).then_some(request)
    }

    /// Counts a request as in flight without a limit.
    pub(crate) fn begin_unlimited(self: &Arc<Self>) -> ClientRequest {
        self.count.fetch_add(1, Ordering::Relaxed);
        ClientRequest(Arc::clone(self))
    }
}

/// A request extension that marks a request above its client's limit of requests in flight. The
/// variant contains the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientLimitExceeded(pub(crate) usize);

/// A request that counts as in flight until this value is dropped.
#[derive(Debug)]
pub(crate) struct ClientRequest(Arc<ClientRequests>);

impl Drop for ClientRequest {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_client_share_a_counteruntil_the_last_closes() {
        let clients = Arc::<ClientRegistry>::default();
        let (one, other) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        let (first, second) = (clients.counter(one), clients.counter(one));
        let request = [first.try_begin(2), second.try_begin(2)];
        assert!(request.iter().all(Option::is_some));
        assert!(first.try_begin(2).is_none());
        assert!(clients.counter(other).try_begin(2).is_some());
        drop(request);
        assert!(second.try_begin(1).is_some());
        drop((first, second));
        assert!(
            clients
                .shards
                .iter()
                .all(|shard| shard.lock().unwrap().is_empty())
        );
    }
}
