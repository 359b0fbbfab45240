//! A Redis Cluster: the slot map, and redirections when it has changed.
//!
//! The client library has a cluster client too, but it pipelines only one slot at a time, and has a
//! single retry counter for redirections and lost connections. Here a batch may contain commands
//! for all slots of a node, and a command is sent again only if the reply says that it was not
//! executed.

mod merge;
mod view;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::Value;
use tokio::{runtime::Handle, sync::Notify, task::AbortHandle, time::Instant};

use self::{
    merge::{Decides, SlotMap, merge},
    view::{State, View},
};
use super::{
    error::ConnectError,
    handshake::Kind,
    link::{Answer, Fate, Order},
    node::{Node, Place},
    settings::{Address, Settings, Transport},
    slots::{SLOTS, slot},
};

/// The most redirections that one command follows.
const MAX_REDIRECTIONS: usize = 5;

/// Interval between refreshes of the slot map while all slots are served.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Interval between refreshes while a problem persists.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Wait between a redirection and the refresh of the map, so that several redirections cause one
/// refresh.
const GATHER: Duration = Duration::from_millis(20);

/// The maximum number of nodes that are asked for their view at the same time.
const MAX_INFORMANTS: usize = 16;

/// The minimum number of nodes that are asked for their view, if the cluster has enough nodes.
const MIN_INFORMANTS: usize = 3;

/// The wait for further views after a node has answered with `cluster_state:ok`.
const OTHERS: Duration = Duration::from_millis(200);

/// The nodes of a cluster, and the task that refreshes the slot map.
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
    /// The number of refreshes of the map. In a large cluster each refresh asks a different set of
    /// nodes.
    looks: AtomicUsize,
    /// Notified if a reply shows that the map may be stale.
    stale: Notify,
    /// True once the first refresh of the map has ended, with or without success.
    looked: tokio::sync::watch::Sender<bool>,
}

/// The slot map: the node of each slot.
#[derive(Debug)]
struct Map {
    owners: Vec<Option<Arc<Node>>>,
    parts: Vec<Part>,
    /// Every node, including replicas. All of them can be asked for the next map.
    addresses: Vec<Address>,
}

/// The slots of one node.
#[derive(Debug)]
struct Part {
    node: Arc<Node>,
    slots: usize,
    decides: Decides,
}

impl Map {
    /// Returns the number of slots that no node serves.
    fn undecided_slots(&self) -> usize {
        let decided = self.parts.iter().filter(|part| part.is_decided());
        usize::from(SLOTS) - decided.map(|part| part.slots).sum::<usize>()
    }
}

impl Part {
    fn is_decided(&self) -> bool {
        self.decides == Decides::Yes && self.node.is_up()
    }
}

/// The redirection in a reply.
#[derive(Debug, PartialEq, Eq)]
enum Direction {
    /// Not a redirection: a result, or another error.
    None,
    /// `MOVED`: the slot has moved to this address.
    Moved(String, u16),
    /// `ASK`: the slot is migrating to this address, and the key is already there.
    Ask(String, u16),
    /// The node does not serve the slot, or no longer does.
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
            looks: AtomicUsize::new(0),
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

    /// Sends a command to the node that has the slot of `key`, and follows redirections within the
    /// timeout of a decision.
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

    /// Returns why some or all slots cannot be used; `None` if all can.
    pub(super) fn trouble(&self) -> Option<ConnectError> {
        let trouble = lock(&self.shared.trouble).clone();
        trouble.or_else(|| self.nodes().iter().find_map(|node| node.trouble()))
    }

    /// Returns the number of slots that no node serves. The owner of such a slot is unknown,
    /// unreachable, or reports a failed cluster. Zero until the first map has been read.
    pub(super) fn undecided_slots(&self) -> usize {
        let map = self.shared.map.load();
        map.as_ref().map_or(0, |map| map.undecided_slots())
    }

    /// Returns the timeout of a command, including its redirections.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits until the first attempt to read the map has ended.
    pub(super) async fn tried(&self) {
        // The sender lives in the shared state.
        let _ = self
            .shared
            .looked
            .subscribe()
            .wait_for(|looked| *looked)
            .await;
    }

    /// Returns whether all nodes are known to be down. Every decision calls this first, so it takes
    /// no lock while a node is up.
    pub(super) fn is_down(&self) -> bool {
        match &*self.shared.map.load() {
            Some(map) => map.parts.iter().all(|part| part.node.is_down()),
            None => *self.shared.looked.borrow(),
        }
    }

    /// Returns the nodes that have slots.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        let map = self.shared.map.load();
        let parts = map.as_ref().map_or(&[][..], |map| &map.parts);
        parts.iter().map(|part| Arc::clone(&part.node)).collect()
    }

    async fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        if self.shared.map.load().is_none() && !*self.shared.looked.borrow() {
            // Waits for the first map at start-up; the load below shows whether it arrived.
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

/// Parses an address such as `3999 127.0.0.1:6381`. An empty host means the node that replied.
fn target(details: Option<&str>) -> Option<(String, u16)> {
    let (_, address) = details?.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

impl Shared {
    /// Returns the node at an address that `from` reported.
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

    /// Returns an address with the same transport as the seeds.
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

    /// Puts a new map in use, and closes the connections to nodes that no longer have slots.
    fn adopt(&self, found: SlotMap) {
        let mut owners = vec![None; usize::from(SLOTS)];
        let mut parts: Vec<Part> = Vec::new();
        for run in found.runs {
            let node = self.node(run.owner);
            let slots = usize::from(run.first)..=usize::from(run.last);
            let count = slots.clone().count();
            owners[slots].fill(Some(Arc::clone(&node)));
            let same =
                |part: &&mut Part| Arc::ptr_eq(&part.node, &node) && part.decides == run.decides;
            match parts.iter_mut().find(same) {
                Some(part) => part.slots += count,
                None => parts.push(Part {
                    node,
                    slots: count,
                    decides: run.decides,
                }),
            }
        }
        let is_owner = |node: &Arc<Node>| parts.iter().any(|part| Arc::ptr_eq(&part.node, node));
        lock(&self.nodes).retain(|_, node| is_owner(node));
        self.map.store(Some(Arc::new(Map {
            owners,
            parts,
            addresses: found.addresses,
        })));
    }

    /// Returns whether every slot is served.
    fn is_whole(&self) -> bool {
        let map = self.map.load();
        map.as_ref().is_some_and(|map| map.undecided_slots() == 0)
    }

    /// Returns the nodes to ask for their view: those that have slots. If there is a problem, or if
    /// these nodes are few, the other known nodes and the seeds are asked too. In a cluster with
    /// more nodes than one refresh asks, each refresh asks a different set.
    fn informants(&self) -> Vec<Address> {
        let map = self.map.load();
        let mut informants: Vec<Address> = Vec::new();
        let turn = self.looks.fetch_add(1, Ordering::Relaxed);
        let mut add = |addresses: Vec<Address>, most: usize| {
            let first = turn.checked_rem(addresses.len()).unwrap_or(0);
            for address in addresses.iter().cycle().skip(first).take(addresses.len()) {
                if informants.len() < most && !informants.contains(address) {
                    informants.push(address.clone());
                }
            }
        };
        let parts = map.as_ref().map_or(&[][..], |map| &map.parts);
        let owners = parts.iter().filter_map(|part| part.node.address().cloned());
        add(owners.collect(), MAX_INFORMANTS);
        let most = if self.is_whole() {
            MIN_INFORMANTS
        } else {
            MAX_INFORMANTS
        };
        add(
            map.as_ref()
                .map_or_else(Vec::new, |map| map.addresses.clone()),
            most,
        );
        add(self.seeds.clone(), most);
        informants
    }

    /// Returns the views of several nodes, and the error of a node that returned none. Waits for
    /// slow nodes until a node in the majority of the cluster has answered.
    async fn views(&self) -> (Vec<View>, Option<ConnectError>) {
        let informants = self.informants();
        let asked = informants.iter().map(|informant| {
            let open = lock(&self.nodes)
                .get(informant)
                .and_then(|node| node.connection());
            view::read(&self.settings, informant, open)
        });
        let mut asked: FuturesUnordered<_> = asked.collect();
        let (mut views, mut trouble): (Vec<View>, Option<ConnectError>) = (Vec::new(), None);
        let mut until = None;
        loop {
            let next = match until {
                None => asked.next().await,
                Some(until) => tokio::time::timeout_at(until, asked.next())
                    .await
                    .unwrap_or(None),
            };
            match next {
                Some(Ok(view)) => {
                    if view.state == State::Ok {
                        until.get_or_insert_with(|| Instant::now() + OTHERS);
                    }
                    // One node may have two addresses.
                    if views.iter().all(|known| known.informant != view.informant) {
                        views.push(view);
                    }
                }
                Some(Err(error)) => trouble = trouble.or(Some(error)),
                None => return (views, trouble),
            }
        }
    }
}

/// Refreshes the map periodically, and soon after a redirection.
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
    let (views, unread) = shared.views().await;
    let trouble = if views.is_empty() {
        unread
    } else {
        let found = merge(&views);
        let decided = found.runs.iter().filter(|run| run.decides == Decides::Yes);
        let decided = decided.map(|run| u32::from(run.last - run.first) + 1).sum();
        let undecided = u32::from(SLOTS).saturating_sub(decided);
        shared.adopt(found);
        (undecided > 0).then_some(ConnectError::Undecided(undecided))
    };
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
    fn redirection_addresses_are_parsed() {
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
