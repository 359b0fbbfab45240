//! Connections to Redis: to one server, to the primary that the Sentinels report, or to a cluster.
//!
//! No request waits for a server that is down. A command is sent again only if the server has
//! replied that it did not execute it. All queues and waits are bounded.

mod breaker;
mod cluster;
mod error;
mod handshake;
mod link;
mod node;
mod run;
mod sentinel;
mod settings;
mod slots;

use std::{sync::Arc, time::Duration};

use redis::Value;
use tokio::runtime::Handle;

pub(crate) use self::slots::slot;
use self::{
    cluster::Cluster,
    handshake::Kind,
    link::{Answer, Order},
    node::{Node, Place},
    sentinel::Sentinels,
};
pub use self::{
    error::ConnectError,
    settings::{Address, Login, Settings, Tls, Topology, Transport},
};

/// The servers, and the tasks that keep the connections to them open.
#[derive(Debug)]
pub struct Redis {
    routes: Routes,
    runtime: Handle,
}

#[derive(Debug)]
enum Routes {
    One(Node),
    Many(Cluster),
}

/// Current health of the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Number of known servers.
    pub servers: usize,
    /// Number of servers that are up.
    pub up: usize,
    /// Number of cluster slots that no node serves; 0 without a cluster.
    pub undecided_slots: usize,
    /// The current problem, as an error that says what to do; `None` without a problem.
    pub trouble: Option<ConnectError>,
    /// Server settings that will lose counts sooner or later, as messages that say what to do.
    pub warnings: Vec<String>,
    /// The number of times that the circuit breaker of a server opened.
    pub trips: u64,
    /// Number of batches that were sent.
    pub batches: u64,
}

impl Redis {
    /// Starts to connect, on `runtime`, and returns immediately. [`Self::health`] shows whether the
    /// servers are reachable.
    #[must_use]
    pub fn start(settings: Settings, runtime: &Handle) -> Self {
        let settings = Arc::new(settings);
        let one = |place| Routes::One(Node::start(place, &settings, runtime));
        let routes = match &settings.topology {
            Topology::Standalone(address) => one(Place::At(address.clone(), Kind::Primary)),
            Topology::Sentinel { sentinels, primary } => one(Place::Sentinels(Box::new(
                Sentinels::new(sentinels.clone(), primary.clone(), &settings),
            ))),
            Topology::Cluster { seeds } => Routes::Many(Cluster::start(seeds, &settings, runtime)),
        };
        Self {
            routes,
            runtime: runtime.clone(),
        }
    }

    /// Returns the runtime of the tasks that keep the connections open.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Sends a command to the server that has the slot of `key`, within the timeout of a decision.
    async fn ask(&self, key: &[u8], order: Order) -> Answer {
        let hash = u64::from(slot(key));
        match &self.routes {
            Routes::One(node) => {
                let answer = node.ask(hash, order, false).await;
                if let Ok(Value::ServerError(error)) = &answer
                    && let "READONLY" | "LOADING" | "MASTERDOWN" = error.code()
                {
                    node.give_up();
                }
                answer
            }
            Routes::Many(cluster) => cluster.ask(key, hash, order).await,
        }
    }

    /// Waits until the first attempt to connect has ended.
    ///
    /// # Errors
    ///
    /// The reason why the attempt failed. Further attempts follow.
    pub async fn tried(&self) -> Result<(), ConnectError> {
        match &self.routes {
            Routes::One(node) => node.tried().await,
            Routes::Many(cluster) => cluster.tried().await,
        }
        self.health().trouble.map_or(Ok(()), Err)
    }

    /// Returns the timeout of a decision.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        match &self.routes {
            Routes::One(node) => node.timeout(),
            Routes::Many(cluster) => cluster.timeout(),
        }
    }

    /// Returns whether all servers are known to be down.
    #[must_use]
    pub fn is_down(&self) -> bool {
        match &self.routes {
            Routes::One(node) => node.is_down(),
            Routes::Many(cluster) => cluster.is_down(),
        }
    }

    /// Returns the current health of the servers.
    #[must_use]
    pub fn health(&self) -> Health {
        match &self.routes {
            Routes::One(node) => Health::of(&[node], node.trouble()),
            Routes::Many(cluster) => {
                let nodes = cluster.nodes();
                let nodes: Vec<&Node> = nodes.iter().map(|node| &**node).collect();
                Health {
                    undecided_slots: cluster.undecided_slots(),
                    ..Health::of(&nodes, cluster.trouble())
                }
            }
        }
    }
}

impl Health {
    fn of(nodes: &[&Node], trouble: Option<ConnectError>) -> Self {
        Self {
            servers: nodes.len(),
            up: nodes.iter().filter(|node| node.is_up()).count(),
            undecided_slots: 0,
            trouble,
            warnings: nodes.iter().filter_map(|node| node.warning()).collect(),
            trips: nodes.iter().map(|node| node.trips()).sum(),
            batches: nodes.iter().map(|node| node.batches()).sum(),
        }
    }
}
