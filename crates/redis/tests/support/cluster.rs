//! A Redis Cluster of three primaries, each with a replica.

use std::process::{Command, Stdio};

use super::{RedisServer, SERVER, eventually, redis::ask};

/// The nodes of a cluster, which end with the test.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts six nodes and waits until every slot is served.
    pub fn start() -> Self {
        let nodes: Vec<RedisServer> = (0..6).map(|_| node()).collect();
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
        let cluster = Self { nodes };
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

    /// Where a node listens that is there.
    pub fn url(&self) -> String {
        self.nodes[0].url()
    }

    /// The number of the node that has the slot of `key`.
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

    /// Ends a node at once.
    pub fn kill(&mut self, number: usize) {
        self.nodes[number].kill();
    }
}

fn holds(range: &str, slot: u32) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    matches!((first.parse::<u32>(), last.parse::<u32>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
}

fn node() -> RedisServer {
    RedisServer::node(
        SERVER,
        &[
            "--cluster-node-timeout",
            "1000",
            // A replica that follows at once and stands in however long it has heard nothing: nothing is kept here.
            "--repl-diskless-sync-delay",
            "0",
            "--cluster-replica-validity-factor",
            "0",
        ],
    )
}
