//! A Redis Cluster: which node has which slot, and where to go when that has changed.
//!
//! The client library has a cluster client too, but it pipelines one slot at a time and counts redirections and
//! lost connections with one counter. Here a node's batch carries whatever slots it serves, and only an answer that
//! says that nothing was done leads to another question.

mod ranges;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use redis::Value;
use tokio::{runtime::Handle, sync::Notify, task::AbortHandle, time::Instant};

use self::ranges::{Range, ranges};
use super::{
    error::ConnectError,
    handshake::Kind,
    link::{Answer, Fate, Order},
    node::{Node, Place},
    settings::{Address, Settings, Transport},
    slots::{SLOTS, slot},
};

/// How often one question follows the cluster's directions before it is given up.
const MAX_REDIRECTIONS: usize = 5;

/// How often the map is read anew when nothing seems wrong.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How often it is read while something is.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How long to gather directions that say the same before the map is read.
const GATHER: Duration = Duration::from_millis(20);

/// The nodes of a cluster.
#[derive(Debug)]
pub(super) struct Cluster {
    shared: Arc<Shared>,
    keeper: AbortHandle,
    timeout: Duration,
}

#[derive(Debug)]
struct Shared {
    settings: Arc<Settings>,
    seeds: Vec<Address>,
    runtime: Handle,
    map: ArcSwapOption<Map>,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    trouble: Mutex<Option<ConnectError>>,
    /// Somebody was sent elsewhere.
    stale: Notify,
    /// The map was read, or could not be.
    looked: tokio::sync::watch::Sender<bool>,
}

/// Who has which slot.
#[derive(Debug)]
struct Map {
    owners: Vec<Option<Arc<Node>>>,
    /// Every node, replicas too: whom to ask for the next map.
    addresses: Vec<Address>,
}

/// What an answer tells us to do.
#[derive(Debug, PartialEq, Eq)]
enum Direction {
    /// It is an answer, or an error that is no direction.
    None,
    /// The slot has moved there.
    Moved(String, u16),
    /// The slot is moving there; this key is there already.
    Ask(String, u16),
    /// The node is not, or no longer, the one to ask.
    Stale,
}

impl Cluster {
    pub(super) fn start(seeds: &[Address], settings: &Arc<Settings>, runtime: &Handle) -> Self {
        let shared = Arc::new(Shared {
            settings: Arc::clone(settings),
            seeds: seeds.to_vec(),
            runtime: runtime.clone(),
            map: ArcSwapOption::empty(),
            nodes: Mutex::default(),
            trouble: Mutex::default(),
            stale: Notify::new(),
            looked: tokio::sync::watch::Sender::new(false),
        });
        let keeper = runtime.spawn(keep(Arc::clone(&shared))).abort_handle();
        Self {
            shared,
            keeper,
            timeout: settings.timeout,
        }
    }

    /// Asks the node that has the slot of `key`, following the cluster's directions for as long as a decision may take.
    pub(super) async fn ask(&self, key: &[u8], hash: u64, order: Order) -> Answer {
        let deadline = Instant::now() + self.timeout;
        let mut node = self.owner(slot(key)).await.ok_or(Fate::NotSent)?;
        let mut asking = false;
        for _ in 0..MAX_REDIRECTIONS {
            let answer = node.ask(hash, order.clone(), asking).await;
            let Ok(value) = answer else {
                self.shared.stale.notify_one();
                return answer;
            };
            let direction = Direction::of(&value);
            if direction == Direction::None || Instant::now() >= deadline {
                return Ok(value);
            }
            match direction {
                Direction::Moved(host, port) => {
                    self.shared.stale.notify_one();
                    (node, asking) = (self.shared.node_at(&node, &host, port), false);
                }
                Direction::Ask(host, port) => {
                    (node, asking) = (self.shared.node_at(&node, &host, port), true);
                }
                Direction::Stale | Direction::None => {
                    self.shared.stale.notify_one();
                    return Ok(value);
                }
            }
        }
        Err(Fate::NotSent)
    }

    /// Why the cluster cannot be asked in part or at all.
    pub(super) fn trouble(&self) -> Option<ConnectError> {
        let trouble = lock(&self.shared.trouble).clone();
        trouble.or_else(|| self.nodes().iter().find_map(|node| node.trouble()))
    }

    /// How long a question may take, every direction that it follows included.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits until the first attempt to read the map has ended.
    pub(super) async fn tried(&self) {
        // The sender lives in what is shared.
        let _ = self
            .shared
            .looked
            .subscribe()
            .wait_for(|looked| *looked)
            .await;
    }

    /// Whether it is known that no node can be asked.
    pub(super) fn is_down(&self) -> bool {
        *self.shared.looked.borrow() && self.nodes().iter().all(|node| node.is_down())
    }

    /// The nodes that are asked.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        lock(&self.shared.nodes).values().cloned().collect()
    }

    async fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        if !*self.shared.looked.borrow() {
            // At the very start the map is waited for; whether it came, the map says.
            let _ = tokio::time::timeout(self.timeout, self.tried()).await;
        }
        let map = self.shared.map.load();
        let owner = map.as_ref()?.owners.get(usize::from(slot))?.clone();
        if owner.is_none() {
            self.shared.stale.notify_one();
        }
        owner
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Direction {
    fn of(value: &Value) -> Self {
        let Value::ServerError(error) = value else {
            return Self::None;
        };
        match error.code() {
            "MOVED" => {
                target(error.details()).map_or(Self::Stale, |(host, port)| Self::Moved(host, port))
            }
            "ASK" => {
                target(error.details()).map_or(Self::Stale, |(host, port)| Self::Ask(host, port))
            }
            "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "LOADING" => Self::Stale,
            _ => Self::None,
        }
    }
}

/// The address in `3999 127.0.0.1:6381`; the host is empty where it is the one that answered.
fn target(details: Option<&str>) -> Option<(String, u16)> {
    let (_, address) = details?.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

impl Shared {
    /// The node at an address that `from` named.
    fn node_at(&self, from: &Arc<Node>, host: &str, port: u16) -> Arc<Node> {
        let address = match (host, from.address()) {
            ("", Some(from)) => from.beside(&from.host, port),
            ("", None) => self.beside_seed("127.0.0.1", port),
            (host, _) => self.beside_seed(host, port),
        };
        self.node(address)
    }

    fn node(&self, address: Address) -> Arc<Node> {
        let mut nodes = lock(&self.nodes);
        let node = nodes.entry(address.clone()).or_insert_with(|| {
            let place = Place::At(address, Kind::ClusterNode);
            Arc::new(Node::start(place, &self.settings, &self.runtime))
        });
        Arc::clone(node)
    }

    /// An address that is reached as the seeds are.
    fn beside_seed(&self, host: &str, port: u16) -> Address {
        match self.seeds.first() {
            Some(seed) => seed.beside(host, port),
            None => Address {
                host: host.to_owned(),
                port,
                transport: Transport::Plain,
                database: 0,
            },
        }
    }

    /// Puts `ranges` in force; nodes that have no slot are let go.
    fn adopt(&self, ranges: Vec<Range>) {
        let mut owners = vec![None; usize::from(SLOTS)];
        let mut addresses = Vec::new();
        for range in ranges {
            let mut servers = range.servers.into_iter();
            let Some(owner) = servers.next() else {
                continue;
            };
            let node = self.node(owner.clone());
            owners[usize::from(range.first)..=usize::from(range.last)].fill(Some(node));
            for address in std::iter::once(owner).chain(servers) {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
        }
        let map = Map { owners, addresses };
        let is_owner = |node: &Arc<Node>| {
            map.owners
                .iter()
                .flatten()
                .any(|owner| Arc::ptr_eq(owner, node))
        };
        lock(&self.nodes).retain(|_, node| is_owner(node));
        self.map.store(Some(Arc::new(map)));
    }

    /// Whether there is a node for every slot, and none is down.
    fn is_whole(&self) -> bool {
        let has_all = self
            .map
            .load()
            .as_ref()
            .is_some_and(|map| map.owners.iter().all(Option::is_some));
        has_all && lock(&self.nodes).values().all(|node| node.is_up())
    }

    /// Whom to ask for the map: every node that was known, then the seeds.
    fn informants(&self) -> Vec<Address> {
        let map = self.map.load();
        let known = map
            .as_ref()
            .map_or_else(Vec::new, |map| map.addresses.clone());
        let seeds = self
            .seeds
            .iter()
            .filter(|seed| !known.contains(seed))
            .cloned()
            .collect::<Vec<_>>();
        known.into_iter().chain(seeds).collect()
    }
}

/// Reads the map now and then, and at once when somebody was sent elsewhere.
async fn keep(shared: Arc<Shared>) {
    loop {
        look(&shared).await;
        shared.looked.send_replace(true);
        let pause = if shared.is_whole() {
            LOOK_EVERY
        } else {
            LOOK_AGAIN
        };
        tokio::select! {
            () = shared.stale.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
        tokio::time::sleep(GATHER).await;
    }
}

async fn look(shared: &Shared) {
    let mut trouble = None;
    for informant in shared.informants() {
        match ranges(shared, &informant).await {
            Ok(ranges) => {
                shared.adopt(ranges);
                trouble = None;
                break;
            }
            Err(error) => trouble = trouble.or(Some(error)),
        }
    }
    let mut known = lock(&shared.trouble);
    if *known != trouble {
        if let Some(error) = &trouble {
            tracing::error!("{error}");
        }
        *known = trouble;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_redirections_are_read() {
        assert_eq!(
            target(Some("3999 127.0.0.1:6381")),
            Some(("127.0.0.1".into(), 6_381))
        );
        assert_eq!(target(Some("3999 ::1:6381")), Some(("::1".into(), 6_381)));
        assert_eq!(target(Some("3999 :6381")), Some((String::new(), 6_381)));
        for wrong in [
            None,
            Some(""),
            Some("3999"),
            Some("3999 host"),
            Some("3999 host:x"),
        ] {
            assert_eq!(target(wrong), None);
        }
    }
}
