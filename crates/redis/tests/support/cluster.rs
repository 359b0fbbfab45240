//! A Redis Cluster of three primaries, each with a replica.

use std::{
    cell::RefCell,
    net::{IpAddr, Ipv4Addr},
    process::{Command, Stdio},
};

use super::{Proxy, RedisServer, Refused, SERVER, eventually, redis::ask};

/// The nodes of a cluster, which are killed at the end of the test.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    /// The proxies in front of the nodes' cluster buses; empty if nodes cannot be partitioned.
    buses: Vec<Proxy>,
}

impl RedisCluster {
    /// Starts six nodes, and waits until every slot is served.
    pub fn start() -> Self {
        Self::of((0..6).map(|_| node()).collect(), Vec::new())
    }

    /// Works like [`Self::start`], with nodes that [`Self::cut_off`] can partition from each other.
    pub fn start_with_proxied_buses() -> Self {
        let (nodes, buses) = (0..6).map(node_with_proxied_bus).unzip();
        Self::of(nodes, buses)
    }

    fn of(nodes: Vec<RedisServer>, buses: Vec<Proxy>) -> Self {
        let addresses = nodes
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.port()));
        let created = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("cannot start redis-cli: {error}; run scripts/setup"));
        assert!(
            created.status.success(),
            "{}",
            String::from_utf8_lossy(&created.stdout)
        );
        let cluster = Self { nodes, buses };
        for node in &cluster.nodes {
            eventually("every node knows the cluster", || {
                let info = ask(node.port(), &["CLUSTER", "INFO"])?;
                (info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:6"))
                    .then_some(())
            });
        }
        cluster
    }

    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// Returns the URL of the first node.
    pub fn url(&self) -> String {
        self.nodes[0].url()
    }

    /// Returns the index of the node that owns the slot of `key`.
    pub fn owner(&self, key: &str) -> usize {
        let slot = self.nodes[0].ask(&["CLUSTER", "KEYSLOT", key]);
        let slot: u32 = slot.trim_start_matches(':').parse().unwrap();
        let owns = |node: &RedisServer| {
            let all = node.ask(&["CLUSTER", "NODES"]);
            let own = all
                .lines()
                .find(|line| line.contains("myself"))
                .unwrap_or_default()
                .to_owned();
            own.contains("master")
                && own
                    .split_whitespace()
                    .skip(8)
                    .any(|range| holds(range, slot))
        };
        self.nodes.iter().position(owns).unwrap()
    }

    /// Partitions a node from all other nodes, but not from its clients.
    pub fn cut_off(&self, number: usize) {
        for (other, bus) in self.buses.iter().enumerate() {
            bus.refuse(if other == number {
                Refused::All
            } else {
                Refused::From(source(number))
            });
        }
    }

    /// Partitions every node from all other nodes.
    pub fn cut_all_buses(&self) {
        for bus in &self.buses {
            bus.refuse(Refused::All);
        }
    }

    /// Kills a node.
    pub fn kill(&mut self, number: usize) {
        self.nodes[number].kill();
    }
}

fn holds(range: &str, slot: u32) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    matches!(
        (first.parse::<u32>(), last.parse::<u32>()),
        (Ok(first), Ok(last)) if (first..=last).contains(&slot)
    )
}

fn node() -> RedisServer {
    RedisServer::node(SERVER, &OPTIONS)
}

const OPTIONS: [&str; 6] = [
    "--cluster-node-timeout",
    "1000",
    // Replicas synchronise immediately, and may be promoted even with stale data, because the tests
    // do not need durability.
    "--repl-diskless-sync-delay",
    "0",
    "--cluster-replica-validity-factor",
    "0",
];

/// Starts a node that the other nodes reach through a proxy. The outgoing connections of the node
/// are identified by their source address.
fn node_with_proxied_bus(number: usize) -> (RedisServer, Proxy) {
    let proxy = RefCell::new(None);
    let server = RedisServer::node_with(SERVER, |bus| {
        let before = Proxy::before(bus);
        let announced = before.port().to_string();
        proxy.replace(Some(before));
        let source = source(number).to_string();
        let own = [
            "--cluster-announce-bus-port",
            &announced,
            "--bind-source-addr",
            &source,
        ];
        OPTIONS
            .iter()
            .chain(&own)
            .map(|option| (*option).to_owned())
            .collect()
    });
    (server, proxy.into_inner().unwrap())
}

/// Returns the loopback address from which a node connects.
fn source(number: usize) -> IpAddr {
    let last = u8::try_from(10 + number).unwrap();
    Ipv4Addr::new(127, 0, 0, last).into()
}
