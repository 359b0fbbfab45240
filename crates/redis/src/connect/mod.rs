//! The way to Redis: one server, a primary that Sentinels name, or a cluster.
//!
//! Nothing here waits for a server that is away, nothing is sent twice unless the server said that it did nothing, and
//! everything that waits is bounded in number and in time.

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

/// The servers, and the tasks that keep the connections to them.
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

/// How the servers are at the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// How many servers are known.
    pub servers: usize,
    /// How many of them are asked.
    pub up: usize,
    /// How many slots of a cluster no node decides about; 0 where there is no cluster.
    pub undecided_slots: usize,
    /// What is wrong, in words that say what to do; `None` if nothing is.
    pub trouble: Option<ConnectError>,
    /// What the servers do that costs counts one day, in words that say what to do.
    pub warnings: Vec<String>,
    /// How often a server was given up for a while.
    pub trips: u64,
    /// How many batches were sent.
    pub batches: u64,
}

impl Redis {
    /// Begins to connect, on `runtime`, and returns at once: whether anybody is there shows in [`Self::health`].
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

    /// Where the tasks run that keep the connections.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Asks the server that has the slot of `key`, within the time of a decision.
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
    /// Why it failed, if it did; others follow.
    pub async fn tried(&self) -> Result<(), ConnectError> {
        match &self.routes {
            Routes::One(node) => node.tried().await,
            Routes::Many(cluster) => cluster.tried().await,
        }
        self.health().trouble.map_or(Ok(()), Err)
    }

    /// How long a decision may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        match &self.routes {
            Routes::One(node) => node.timeout(),
            Routes::Many(cluster) => cluster.timeout(),
        }
    }

    /// Whether it is known that nobody can be asked.
    #[must_use]
    pub fn is_down(&self) -> bool {
        match &self.routes {
            Routes::One(node) => node.is_down(),
            Routes::Many(cluster) => cluster.is_down(),
        }
    }

    /// How the servers are.
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
