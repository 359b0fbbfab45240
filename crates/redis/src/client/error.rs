//! Errors of connections to Redis. Each message says how to fix the problem.

use super::settings::Address;

/// The reason why a server cannot be used. Every error message says how to fix the problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The server does not accept connections at this address.
    #[error(
        "cannot reach Redis at {address}: {problem}; check that Redis is running, and that the address is right"
    )]
    Unreachable {
        /// The server's address.
        address: Address,
        /// The operating system's error message.
        problem: String,
    },
    /// The connection to the server was lost.
    #[error("the connection to Redis at {0} was lost; reconnecting")]
    Lost(Address),
    /// The server replies, but not within the decision timeout.
    #[error(
        "Redis at {address} timed out ({problem}); check its load and the network, or raise `store.timeout`"
    )]
    Slow {
        /// The server's address.
        address: Address,
        /// The operation that timed out.
        problem: String,
    },
    /// The user name or the password is invalid or missing.
    #[error(
        "Redis at {address} rejected the login ({problem}); set `store.username` and `store.password_env`"
    )]
    Login {
        /// The server's address.
        address: Address,
        /// The server's error message.
        problem: String,
    },
    /// The user lacks permissions that are needed for decisions.
    #[error(
        "Redis at {address} denies this user permissions that Tidegate needs ({problem}); grant the ACL in docs/fleet.md"
    )]
    Permission {
        /// The server's address.
        address: Address,
        /// The server's error message.
        problem: String,
    },
    /// The server's version cannot run our scripts.
    #[error("Redis at {address} is version {version}; upgrade to Redis 7.0 or later, or to Valkey")]
    TooOld {
        /// The server's address.
        address: Address,
        /// The version that the server reports.
        version: String,
    },
    /// The server is a read-only replica.
    #[error("Redis at {0} is a read-only replica; configure the primary, or its Sentinels")]
    Replica(Address),
    /// A node of a cluster was configured as a standalone server.
    #[error("Redis at {0} is a node of a cluster; write `redis: {{cluster: [redis://{0}]}}`")]
    IsCluster(Address),
    /// A standalone server was configured as a node of a cluster.
    #[error("Redis at {0} is not a cluster node; write `redis: redis://{0}`")]
    NotCluster(Address),
    /// A Sentinel was configured as a server.
    #[error(
        "Redis at {0} is a Sentinel; write `redis: {{sentinel: [redis://{0}], primary: NAME}}`"
    )]
    IsSentinel(Address),
    /// No Sentinel monitors a primary with this name.
    #[error(
        "no Sentinel knows a primary named `{primary}`: {problem}; check `store.redis.sentinel` and `store.redis.primary`"
    )]
    NoPrimary {
        /// The configured name of the primary.
        primary: String,
        /// The error of the Sentinel that replied last.
        problem: String,
    },
    /// The server does not have the database that the URL specifies.
    #[error("Redis at {address} rejected SELECT ({problem}); check the database number in the URL")]
    NoDatabase {
        /// The server's address.
        address: Address,
        /// The server's error message.
        problem: String,
    },
    /// The reply is not a valid Redis reply.
    #[error("unexpected reply from {address}: {problem}; is this a Redis server?")]
    UnexpectedReply {
        /// The server's address.
        address: Address,
        /// A description of the defect.
        problem: String,
    },
    /// Some hash slots are not served by any node.
    #[error(
        "the Redis Cluster does not serve {0} of its 16384 hash slots; check `CLUSTER INFO` and `CLUSTER NODES` on its primaries"
    )]
    UnservedSlots(u32),
    /// The TLS certificates cannot be used.
    #[error("the certificates for Redis cannot be used: {0}; check `store.tls`")]
    Certificates(String),
}

impl ConnectError {
    /// Converts an error of the client library that occurred with the server at `address`.
    pub(super) fn from_library(address: &Address, error: &redis::RedisError) -> Self {
        use redis::{ErrorKind, ServerErrorKind};
        // Keep only the first line, because the other lines come from the library's parser.
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
            _ => Self::UnexpectedReply { address, problem },
        }
    }
}
