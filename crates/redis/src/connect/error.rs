//! Why there is no connection, and what to do about it.

use super::settings::Address;

/// Why a server cannot be asked. Every message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody answers there.
    #[error("cannot reach Redis at {address}: {problem}; is it running, and is the address right?")]
    Unreachable {
        /// Where.
        address: Address,
        /// What the system said.
        problem: String,
    },
    /// It has answered, and does not any more.
    #[error("Redis at {0} does not answer any more, and is being connected to again")]
    Lost(Address),
    /// It answers, but later than a decision may take.
    #[error(
        "Redis at {address} answers too slowly, or not at all ({problem}); look at its load and the network, or raise `store.timeout`"
    )]
    Slow {
        /// Where.
        address: Address,
        /// What was waited for.
        problem: String,
    },
    /// The user or the password is wrong, or missing.
    #[error(
        "Redis at {address} refuses the login ({problem}); set `store.username` and `store.password_env`"
    )]
    Login {
        /// Where.
        address: Address,
        /// In the server's words.
        problem: String,
    },
    /// The user may not do what a decision needs.
    #[error(
        "Redis at {address} does not allow this user what a decision needs ({problem}); grant it the ACL of the page on running a fleet"
    )]
    Permission {
        /// Where.
        address: Address,
        /// In the server's words.
        problem: String,
    },
    /// The server cannot run our scripts.
    #[error(
        "Redis at {address} is version {version}; Redis 7.0 or later, or Valkey, is needed: upgrade it"
    )]
    TooOld {
        /// Where.
        address: Address,
        /// What it calls itself.
        version: String,
    },
    /// A server that takes no writes.
    #[error(
        "Redis at {0} is a read-only replica; name the primary, or name its Sentinels so that it is found"
    )]
    Replica(Address),
    /// A cluster's node was given as the one server.
    #[error("Redis at {0} is a node of a cluster; write `redis: {{cluster: [redis://{0}]}}`")]
    IsCluster(Address),
    /// A lone server was given as a node of a cluster.
    #[error("Redis at {0} is no node of a cluster; write `redis: redis://{0}`")]
    NotCluster(Address),
    /// A Sentinel was given as a server.
    #[error(
        "Redis at {0} is a Sentinel; write `redis: {{sentinel: [redis://{0}], primary: NAME}}`"
    )]
    IsSentinel(Address),
    /// No Sentinel names a primary.
    #[error(
        "no Sentinel names a primary `{primary}`: {problem}; look at `store.redis.sentinel` and `store.redis.primary`"
    )]
    NoPrimary {
        /// The name that was asked for.
        primary: String,
        /// What the last of them said.
        problem: String,
    },
    /// The server has no database of the number that the URL names.
    #[error(
        "Redis at {address} does not give the database of its URL ({problem}); mend the number behind the last slash"
    )]
    NoDatabase {
        /// Where.
        address: Address,
        /// In the server's words.
        problem: String,
    },
    /// The server speaks, but not as expected.
    #[error("Redis at {address} answered what makes no sense: {problem}; is it Redis?")]
    Nonsense {
        /// Where.
        address: Address,
        /// What was wrong.
        problem: String,
    },
    /// Some slots of the cluster have no node that decides about them.
    #[error(
        "no node of the Redis Cluster decides about {0} of 16384 slots; look at `CLUSTER INFO` and `CLUSTER NODES` of its primaries"
    )]
    Undecided(u32),
    /// The certificates cannot be used.
    #[error("the certificates for Redis cannot be used: {0}; look at `store.tls`")]
    Certificates(String),
}

impl ConnectError {
    /// What the client library said of `address`, in our words.
    pub(super) fn from_library(address: &Address, error: &redis::RedisError) -> Self {
        use redis::{ErrorKind, ServerErrorKind};
        // What follows in further lines is the library's, about its parser.
        let problem = error.to_string();
        let problem = problem.lines().next().unwrap_or_default().to_owned();
        let address = address.clone();
        match (error.kind(), error.code()) {
            (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => {
                Self::Login { address, problem }
            }
            (ErrorKind::Server(ServerErrorKind::NoPerm), _) => {
                Self::Permission { address, problem }
            }
            (ErrorKind::RESP3NotSupported, _) => Self::TooOld {
                address,
                version: "older than 6.0".into(),
            },
            _ if problem.contains("refused to switch database") => {
                Self::NoDatabase { address, problem }
            }
            _ if error.is_timeout() => Self::Slow { address, problem },
            _ if error.is_io_error() => Self::Unreachable { address, problem },
            _ => Self::Nonsense { address, problem },
        }
    }
}
