//! Connections to Redis: to a single server, to the primary that the Sentinels report, or to a
//! cluster.
//!
//! No request waits for a server that is down. A command is sent again only if the server has
//! replied that the command was not executed. All queues and waits are bounded.

mod breaker;
mod cluster;
mod error;
mod executor;
mod handshake;
mod hash_slot;
mod node;
mod pipeline;
mod sentinel;
mod settings;

use std::{sync::Arc, time::Duration};

use redis::Value;
use tokio::runtime::Handle;

pub(crate) use self::hash_slot::{HASH_SLOTS, hash_slot};
use self::{
    cluster::Cluster,
    handshake::ServerKind,
    node::{AddressSource, Node},
    pipeline::{PipelinedCommand, ReplyResult},
    sentinel::Sentinels,
};
pub use self::{
    error::ConnectError,
    settings::{Address, Login, RedisSettings, RedisTls, Topology, Transport},
};

/// The servers, and the tasks that maintain the connections to them.
#[derive(Debug)]
pub struct Redis {
    routes: Routes,
    runtime: Handle,
}

#[derive(Debug)]
enum Routes {
    Node(Node),
    Cluster(Cluster),
}

/// The current health of the Redis servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Number of known servers.
    pub servers: usize,
    /// Number of servers currently up.
    pub up: usize,
    /// Number of hash slots that no node serves; 0 if Redis is not a cluster.
    pub unserved_slots: usize,
    /// The current problem, as an error that says how to fix it; `None` without a problem.
    pub error: Option<ConnectError>,
    /// Warnings about server settings that will eventually cause counts to be lost. Each warning
    /// says how to fix the setting.
    pub warnings: Vec<String>,
    /// How many times a server has changed from up to down: because its circuit breaker opened,
    /// because a connection was lost, or because the server lost its role.
    pub circuit_opens: u64,
    /// Number of completed batches, including the batches that were lost.
    pub batches: u64,
}

impl Redis {
    /// Starts tasks on `runtime` that connect to the servers, and returns immediately.
    /// [`Self::health`] shows whether the servers are reachable.
    #[must_use]
    pub fn start(settings: RedisSettings, runtime: &Handle) -> Self {
        let settings = Arc::new(settings);
        let node = |source| Routes::Node(Node::start(source, &settings, runtime));
        let routes = match &settings.topology {
            Topology::Standalone(address) => {
                node(AddressSource::Fixed(address.clone(), ServerKind::Primary))
            }
            Topology::Sentinel { sentinels, primary } => node(AddressSource::Sentinels(Box::new(
                Sentinels::new(sentinels.clone(), primary.clone(), &settings),
            ))),
            Topology::Cluster { seeds } => {
                Routes::Cluster(Cluster::start(seeds, &settings, runtime))
            }
        };
        Self {
            routes,
            runtime: runtime.clone(),
        }
    }

    /// Returns the runtime of the tasks that maintain the connections.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Sends a command to the server that owns the slot of `key`, within the decision timeout.
    async fn send(&self, key: &[u8], command: PipelinedCommand) -> ReplyResult {
        let hash = u64::from(hash_slot(key));
        match &self.routes {
            Routes::Node(node) => {
                let reply = node.send(hash, command, false).await;
                if let Ok(Value::ServerError(error)) = &reply
                    && let "READONLY" | "LOADING" | "MASTERDOWN" = error.code()
                {
                    node.mark_down();
                }
                reply
            }
            Routes::Cluster(cluster) => cluster.send(key, hash, command).await,
        }
    }

    /// Waits until the first connection attempt has completed.
    ///
    /// # Errors
    ///
    /// Returns the reason why the first attempt failed. Further attempts follow.
    pub async fn wait_for_first_attempt(&self) -> Result<(), ConnectError> {
        match &self.routes {
            Routes::Node(node) => node.wait_for_first_attempt().await,
            Routes::Cluster(cluster) => cluster.wait_for_first_attempt().await,
        }
        self.health().error.map_or(Ok(()), Err)
    }

    /// Returns the decision timeout.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        match &self.routes {
            Routes::Node(node) => node.timeout(),
            Routes::Cluster(cluster) => cluster.timeout(),
        }
    }

    /// Returns whether all servers are known to be down.
    #[must_use]
    pub fn is_down(&self) -> bool {
        match &self.routes {
            Routes::Node(node) => node.is_down(),
            Routes::Cluster(cluster) => cluster.is_down(),
        }
    }

    /// Returns the current health of the servers.
    #[must_use]
    pub fn health(&self) -> Health {
        match &self.routes {
            Routes::Node(node) => Health::new(&[node], node.error()),
            Routes::Cluster(cluster) => {
                let nodes = cluster.nodes();
                let nodes: Vec<&Node> = nodes.iter().map(|node| &**node).collect();
                Health {
                    unserved_slots: cluster.unserved_slots(),
                    ..Health::new(&nodes, cluster.error())
                }
            }
        }
    }
}

impl Health {
    fn new(nodes: &[&Node], error: Option<ConnectError>) -> Self {
        Self {
            servers: nodes.len(),
            up: nodes.iter().filter(|node| node.is_up()).count(),
            unserved_slots: 0,
            error,
            warnings: nodes.iter().filter_map(|node| node.warning()).collect(),
            circuit_opens: nodes.iter().map(|node| node.circuit_opens()).sum(),
            batches: nodes.iter().map(|node| node.batches()).sum(),
        }
    }
}
