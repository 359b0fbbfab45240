//! A client for Redis Cluster: keeps the slot map, and follows redirections when the map has
//! changed.
//!
//! The client library also has a cluster client. However, that client pipelines the commands for
//! only one slot at a time, and uses the same retry counter for redirections and for lost
//! connections. Tidegate's cluster client can put commands for all slots of a node into one batch.
//! A command is sent again only if the reply says that the command was not executed.

mod hash_slot_map;
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
    hash_slot_map::{Availability, HashSlotMap, HashSlotRange, merge},
    view::{ClusterView, ReportedState},
};
use super::{
    error::ConnectError,
    handshake::ServerKind,
    hash_slot::{HASH_SLOTS, hash_slot},
    node::{AddressSource, Node},
    pipeline::{NoReply, PipelinedCommand, ReplyResult},
    settings::{Address, RedisSettings, Transport},
};

/// The maximum number of redirections that one command follows.
const MAX_REDIRECTIONS: usize = 5;

/// Interval between refreshes of the slot map while all slots are served.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Interval between refreshes while a problem persists.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Delay between a redirection and the refresh of the map, so that several redirections cause only
/// one refresh.
const REFRESH_DELAY: Duration = Duration::from_millis(20);

/// The maximum number of nodes whose view of the cluster one refresh queries.
const MAX_QUERIED: usize = 16;

/// The minimum number of nodes whose view of the cluster one refresh queries. In a smaller cluster,
/// all nodes are queried.
const MIN_QUERIED: usize = 3;

/// How long to wait for the replies of the other nodes, after the first node has replied with
/// `cluster_state:ok`.
const OTHER_VIEWS_WAIT: Duration = Duration::from_millis(200);

/// The nodes of a cluster, and the task that refreshes the slot map.
#[derive(Debug)]
pub(super) struct Cluster {
    state: Arc<ClusterState>,
    task: AbortHandle,
    timeout: Duration,
}

#[derive(Debug)]
struct ClusterState {
    settings: Arc<RedisSettings>,
    seeds: Vec<Address>,
    runtime: Handle,
    map: ArcSwapOption<RoutingTable>,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    error: Mutex<Option<ConnectError>>,
    /// The number of map refreshes. In a large cluster, each refresh queries a different set of
    /// nodes.
    refreshes: AtomicUsize,
    /// Notifies the refresh task when a reply shows that the map may be stale.
    stale: Notify,
    /// True once the first refresh of the map has completed, successfully or not.
    was_refreshed: tokio::sync::watch::Sender<bool>,
}

/// The slot map in use, which contains the node of each slot.
#[derive(Debug)]
struct RoutingTable {
    owners: Vec<Option<Arc<Node>>>,
    nodes: Vec<NodeHashSlots>,
    /// All known nodes, including replicas. Any of these nodes can return the next map.
    addresses: Vec<Address>,
}

/// The slots of one node.
#[derive(Debug)]
struct NodeHashSlots {
    node: Arc<Node>,
    /// The number of slots.
    count: usize,
    availability: Availability,
}

impl RoutingTable {
    /// Returns the number of slots that no node serves.
    fn unserved_slots(&self) -> usize {
        let served = self
            .nodes
            .iter()
            .filter(|node_slots| node_slots.is_served());
        usize::from(HASH_SLOTS) - served.map(|node_slots| node_slots.count).sum::<usize>()
    }
}

impl NodeHashSlots {
    fn is_served(&self) -> bool {
        self.availability == Availability::Available && self.node.is_up()
    }
}

/// The redirection in a reply.
#[derive(Debug, PartialEq, Eq)]
enum Redirection {
    /// Not a redirection: a result, or another error.
    None,
    /// `MOVED`: the slot has moved to this address.
    Moved(String, u16),
    /// `ASK`: the slot is migrating to this address, and the key is already there.
    Ask(String, u16),
    /// The node does not serve the slot, or no longer serves it.
    Stale,
}

impl Cluster {
    pub(super) fn start(
        seeds: &[Address],
        settings: &Arc<RedisSettings>,
        runtime: &Handle,
    ) -> Self {
        let state = Arc::new(ClusterState {
            settings: Arc::clone(settings),
            seeds: seeds.to_vec(),
            runtime: runtime.clone(),
            map: ArcSwapOption::empty(),
            nodes: Mutex::default(),
            error: Mutex::default(),
            refreshes: AtomicUsize::new(0),
            stale: Notify::new(),
            was_refreshed: tokio::sync::watch::Sender::new(false),
        });
        let task = runtime
            .spawn(keep_refreshed(Arc::clone(&state)))
            .abort_handle();
        Self {
            state,
            task,
            timeout: settings.timeout,
        }
    }

    /// Sends a command to the node that owns the slot of `key`, and follows redirections within the
    /// decision timeout.
    pub(super) async fn send(
        &self,
        key: &[u8],
        hash: u64,
        command: PipelinedCommand,
    ) -> ReplyResult {
        let deadline = Instant::now() + self.timeout;
        let mut node = self.owner(hash_slot(key)).await.ok_or(NoReply::NotSent)?;
        let mut asking = false;
        for _ in 0..MAX_REDIRECTIONS {
            let reply = node.send(hash, command.clone(), asking).await;
            let Ok(value) = reply else {
                self.state.stale.notify_one();
                return reply;
            };
            let redirection = Redirection::parse(&value);
            if redirection == Redirection::None || Instant::now() >= deadline {
                return Ok(value);
            }
            match redirection {
                Redirection::Moved(host, port) => {
                    self.state.stale.notify_one();
                    (node, asking) = (self.state.node_named_by(&node, &host, port), false);
                }
                Redirection::Ask(host, port) => {
                    (node, asking) = (self.state.node_named_by(&node, &host, port), true);
                }
                Redirection::Stale | Redirection::None => {
                    self.state.stale.notify_one();
                    return Ok(value);
                }
            }
        }
        Err(NoReply::NotSent)
    }

    /// Returns the reason why some or all slots cannot be used; `None` if all slots can be used.
    pub(super) fn error(&self) -> Option<ConnectError> {
        let error = lock(&self.state.error).clone();
        error.or_else(|| self.nodes().iter().find_map(|node| node.error()))
    }

    /// Returns the number of unserved slots; zero until the first map has been read. The owner of
    /// an unserved slot is unknown or unreachable, or reports that the cluster has failed.
    pub(super) fn unserved_slots(&self) -> usize {
        let map = self.state.map.load();
        map.as_ref().map_or(0, |map| map.unserved_slots())
    }

    /// Returns the timeout of a command, including its redirections.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits until the first attempt to read the map has completed.
    pub(super) async fn wait_for_first_attempt(&self) {
        // The wait cannot fail, because the shared state owns the sender.
        let _ = self
            .state
            .was_refreshed
            .subscribe()
            .wait_for(|was| *was)
            .await;
    }

    /// Returns whether all nodes are known to be down. Every decision calls this method first, so
    /// it takes no lock while any node is up.
    pub(super) fn is_down(&self) -> bool {
        match &*self.state.map.load() {
            Some(map) => map.nodes.iter().all(|node_slots| node_slots.node.is_down()),
            None => *self.state.was_refreshed.borrow(),
        }
    }

    /// Returns the nodes with slots.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        let map = self.state.map.load();
        let nodes = map.as_ref().map_or(&[][..], |map| &map.nodes);
        nodes
            .iter()
            .map(|node_slots| Arc::clone(&node_slots.node))
            .collect()
    }

    /// Returns the nodes with slots; `None` if the owner of any slot is unknown.
    pub(super) fn owners_of_all_slots(&self) -> Option<Vec<Arc<Node>>> {
        let map = self.state.map.load();
        let is_complete = map
            .as_ref()
            .is_some_and(|map| map.owners.iter().all(Option::is_some));
        if !is_complete {
            self.state.stale.notify_one();
            return None;
        }
        Some(self.nodes())
    }

    async fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        if self.state.map.load().is_none() && !*self.state.was_refreshed.borrow() {
            // At startup, wait for the first map. After the wait, the code below checks whether the
            // map has arrived.
            let _ = tokio::time::timeout(self.timeout, self.wait_for_first_attempt()).await;
        }
        let map = self.state.map.load();
        let owner = map.as_ref()?.owners.get(usize::from(slot))?.clone();
        if owner.is_none() {
            self.state.stale.notify_one();
        }
        owner
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Redirection {
    fn parse(value: &Value) -> Self {
        let Value::ServerError(error) = value else {
            return Self::None;
        };
        match error.code() {
            "MOVED" => parse_target(error.details())
                .map_or(Self::Stale, |(host, port)| Self::Moved(host, port)),
            "ASK" => parse_target(error.details())
                .map_or(Self::Stale, |(host, port)| Self::Ask(host, port)),
            "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "LOADING" => Self::Stale,
            _ => Self::None,
        }
    }
}

/// Parses an address such as `3999 127.0.0.1:6381`. An empty host stands for the node that sent the
/// reply.
fn parse_target(details: Option<&str>) -> Option<(String, u16)> {
    let (_, address) = details?.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

impl ClusterState {
    /// Returns the node at an address that `from` reported.
    fn node_named_by(&self, from: &Arc<Node>, host: &str, port: u16) -> Arc<Node> {
        let address = match (host, from.address()) {
            ("", Some(from)) => from.with_endpoint(&from.host, port),
            ("", None) => self.address_like_seed("127.0.0.1", port),
            (host, _) => self.address_like_seed(host, port),
        };
        self.node(address)
    }

    fn node(&self, address: Address) -> Arc<Node> {
        let mut nodes = lock(&self.nodes);
        let node = nodes.entry(address.clone()).or_insert_with(|| {
            let source = AddressSource::Fixed(address, ServerKind::ClusterNode);
            Arc::new(Node::start(source, &self.settings, &self.runtime))
        });
        Arc::clone(node)
    }

    /// Returns an address with the same transport as the seeds.
    fn address_like_seed(&self, host: &str, port: u16) -> Address {
        match self.seeds.first() {
            Some(seed) => seed.with_endpoint(host, port),
            None => Address {
                host: host.to_owned(),
                port,
                transport: Transport::Plain,
                database: 0,
            },
        }
    }

    /// Activates a new map, and closes the connections to nodes that no longer have slots.
    fn install(&self, new: HashSlotMap) {
        let mut owners = vec![None; usize::from(HASH_SLOTS)];
        let mut nodes: Vec<NodeHashSlots> = Vec::new();
        for range in new.ranges {
            let node = self.node(range.owner);
            let slots = usize::from(range.first)..=usize::from(range.last);
            let count = slots.clone().count();
            owners[slots].fill(Some(Arc::clone(&node)));
            let same = |node_slots: &&mut NodeHashSlots| {
                Arc::ptr_eq(&node_slots.node, &node)
                    && node_slots.availability == range.availability
            };
            match nodes.iter_mut().find(same) {
                Some(node_slots) => node_slots.count += count,
                None => nodes.push(NodeHashSlots {
                    node,
                    count,
                    availability: range.availability,
                }),
            }
        }
        let is_owner = |node: &Arc<Node>| {
            nodes
                .iter()
                .any(|node_slots| Arc::ptr_eq(&node_slots.node, node))
        };
        lock(&self.nodes).retain(|_, node| is_owner(node));
        self.map.store(Some(Arc::new(RoutingTable {
            owners,
            nodes,
            addresses: new.addresses,
        })));
    }

    /// Returns whether every slot is served.
    fn is_fully_served(&self) -> bool {
        let map = self.map.load();
        map.as_ref().is_some_and(|map| map.unserved_slots() == 0)
    }

    /// Returns the nodes whose view of the cluster must be queried. Usually, only the nodes with
    /// slots are queried. If there is a problem, or if few nodes have slots, the result also
    /// contains the other known nodes and the seeds. If the cluster has more nodes than
    /// [`MAX_QUERIED`], each refresh queries a different set of nodes.
    fn nodes_to_query(&self) -> Vec<Address> {
        let map = self.map.load();
        let mut chosen: Vec<Address> = Vec::new();
        let turn = self.refreshes.fetch_add(1, Ordering::Relaxed);
        let mut add = |addresses: Vec<Address>, most: usize| {
            let first = turn.checked_rem(addresses.len()).unwrap_or(0);
            for address in addresses.iter().cycle().skip(first).take(addresses.len()) {
                if chosen.len() < most && !chosen.contains(address) {
                    chosen.push(address.clone());
                }
            }
        };
        let nodes = map.as_ref().map_or(&[][..], |map| &map.nodes);
        let owners = nodes
            .iter()
            .filter_map(|node_slots| node_slots.node.address().cloned());
        add(owners.collect(), MAX_QUERIED);
        let most = if self.is_fully_served() {
            MIN_QUERIED
        } else {
            MAX_QUERIED
        };
        add(
            map.as_ref()
                .map_or_else(Vec::new, |map| map.addresses.clone()),
            most,
        );
        add(self.seeds.clone(), most);
        chosen
    }

    /// Returns several nodes' views of the cluster, and the first error of a node that returned no
    /// view. Once a node has replied with `cluster_state:ok`, the function waits for the other
    /// nodes for at most [`OTHER_VIEWS_WAIT`].
    async fn collect_views(&self) -> (Vec<ClusterView>, Option<ConnectError>) {
        let addresses = self.nodes_to_query();
        let queries = addresses.iter().map(|address| {
            let open = lock(&self.nodes)
                .get(address)
                .and_then(|node| node.unqueued_connection());
            view::read(&self.settings, address, open)
        });
        let mut queries: FuturesUnordered<_> = queries.collect();
        let (mut views, mut first_error): (Vec<ClusterView>, Option<ConnectError>) =
            (Vec::new(), None);
        let mut until = None;
        loop {
            let next = match until {
                None => queries.next().await,
                Some(until) => tokio::time::timeout_at(until, queries.next())
                    .await
                    .unwrap_or(None),
            };
            match next {
                Some(Ok(view)) => {
                    if view.state == ReportedState::Ok {
                        until.get_or_insert_with(|| Instant::now() + OTHER_VIEWS_WAIT);
                    }
                    // Two addresses may belong to the same node.
                    if views.iter().all(|known| known.reporter != view.reporter) {
                        views.push(view);
                    }
                }
                Some(Err(error)) => first_error = first_error.or(Some(error)),
                None => return (views, first_error),
            }
        }
    }
}

/// Refreshes the map periodically, and soon after a redirection.
async fn keep_refreshed(state: Arc<ClusterState>) {
    loop {
        refresh(&state).await;
        state.was_refreshed.send_replace(true);
        let pause = if state.is_fully_served() {
            REFRESH_INTERVAL
        } else {
            RETRY_INTERVAL
        };
        tokio::select! {
            () = state.stale.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
        tokio::time::sleep(REFRESH_DELAY).await;
    }
}

async fn refresh(state: &ClusterState) {
    let (views, unread) = state.collect_views().await;
    let error = if views.is_empty() {
        unread
    } else {
        let map = merge(&views);
        let is_available = |range: &&HashSlotRange| range.availability == Availability::Available;
        let served = map.ranges.iter().filter(is_available);
        let served = served
            .map(|range| u32::from(range.last - range.first) + 1)
            .sum();
        let unserved = u32::from(HASH_SLOTS).saturating_sub(served);
        state.install(map);
        (unserved > 0).then_some(ConnectError::UnservedSlots(unserved))
    };
    let mut last = lock(&state.error);
    if *last != error {
        if let Some(error) = &error {
            tracing::error!("{error}");
        }
        *last = error;
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
            parse_target(Some("3999 127.0.0.1:6381")),
            Some(("127.0.0.1".into(), 6_381))
        );
        assert_eq!(
            parse_target(Some("3999 ::1:6381")),
            Some(("::1".into(), 6_381))
        );
        assert_eq!(
            parse_target(Some("3999 :6381")),
            Some((String::new(), 6_381))
        );
        for wrong in [
            None,
            Some(""),
            Some("3999"),
            Some("3999 host"),
            Some("3999 host:x"),
        ] {
            assert_eq!(parse_target(wrong), None);
        }
    }
}
