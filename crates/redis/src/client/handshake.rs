//! Sets up a connection: TCP or TLS, login, client name, and a check of the server.

use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Pipeline, PushInfo, PushKind, TlsCertificates,
    Value, aio::MultiplexedConnection,
};

use super::{
    error::ConnectError,
    settings::{Address, Login, RedisSettings, Transport},
};

/// The oldest major version of Redis that supports the scripts and sends the expected replies.
const OLDEST_MAJOR: u64 = 7;

/// The expected kind of server at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerKind {
    /// A standalone server that accepts writes.
    Primary,
    /// A node of a cluster, primary or replica.
    ClusterNode,
}

/// Connects to `address`, and checks that the server is of the expected `kind` and can run the
/// scripts.
///
/// Finally, sends a command, and fails unless the server replies within the decision timeout.
/// Therefore, requests are sent to a server again only when the server is no longer slow.
/// `on_disconnect` is called when the connection breaks, even while it is idle.
pub(super) async fn connect(
    settings: &RedisSettings,
    address: &Address,
    kind: ServerKind,
    on_disconnect: impl Fn() + Send + Sync + 'static,
) -> Result<MultiplexedConnection, ConnectError> {
    let mut connection = open(settings, address, &settings.login, on_disconnect).await?;
    let hello = say_hello(settings, address, &mut connection).await?;
    hello.verify(address, kind)?;
    Ok(connection)
}

/// Returns the server's eviction policy, which applies when its memory is full. Returns `None` if
/// the server does not evict keys, or if its policy cannot be read.
///
/// The policy is read with `INFO`, because managed services forbid `CONFIG GET`.
pub(super) async fn eviction_policy(connection: &mut MultiplexedConnection) -> Option<String> {
    let command = redis::cmd("INFO").arg("memory").to_owned();
    let info = as_text(&connection.send_packed_command(&command).await.ok()?)?;
    parse_eviction_policy(&info)
}

/// Returns the eviction policy in the reply to `INFO memory`, if the policy evicts keys and
/// `maxmemory` is set.
fn parse_eviction_policy(info: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))
    };
    let policy = field("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
    (field("maxmemory")? != "0").then(|| policy.to_owned())
}

/// Connects and logs in, but does not check the server.
pub(super) async fn open(
    settings: &RedisSettings,
    address: &Address,
    login: &Login,
    on_disconnect: impl Fn() + Send + Sync + 'static,
) -> Result<MultiplexedConnection, ConnectError> {
    let failed = |error: redis::RedisError| ConnectError::from_library(address, &error);
    let info = address.connection_info(login).map_err(failed)?;
    let client = match certificates(settings) {
        Some(certificates) if address.transport == Transport::Tls => {
            Client::build_with_tls(info, certificates)
                .map_err(|error| ConnectError::Certificates(error.to_string()))?
        }
        _ => Client::open(info).map_err(failed)?,
    };
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(settings.connect_timeout))
        .set_response_timeout(Some(settings.timeout))
        .set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                on_disconnect();
            }
            Ok::<(), ()>(())
        });
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(failed)
}

fn certificates(settings: &RedisSettings) -> Option<TlsCertificates> {
    let tls = &settings.tls;
    let client_tls = tls
        .client
        .as_ref()
        .map(|(client_cert, client_key)| ClientTlsConfig {
            client_cert: client_cert.clone(),
            client_key: client_key.clone(),
        });
    (client_tls.is_some() || tls.ca.is_some()).then(|| TlsCertificates {
        client_tls,
        root_cert: tls.ca.clone(),
    })
}

/// The reply to `HELLO`, which contains the server's version, mode and role.
#[derive(Debug, Default)]
struct HelloReply {
    version: String,
    mode: String,
    role: String,
}

async fn say_hello(
    settings: &RedisSettings,
    address: &Address,
    connection: &mut MultiplexedConnection,
) -> Result<HelloReply, ConnectError> {
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline
        .cmd("CLIENT")
        .arg("SETNAME")
        .arg(&settings.client_name);
    pipeline.cmd("HELLO");
    let replies = connection
        .send_packed_commands(&pipeline, 0, 2)
        .await
        .map_err(|error| ConnectError::from_library(address, &error))?;
    // The reply to `CLIENT SETNAME` is ignored: the name is informational, and a user without that
    // permission can still run the scripts.
    match replies.into_iter().nth(1) {
        Some(Value::Map(pairs)) => Ok(HelloReply::parse(pairs)),
        Some(Value::ServerError(error)) => Err(ConnectError::from_library(address, &error.into())),
        other => Err(ConnectError::UnexpectedReply {
            address: address.clone(),
            problem: format!("the reply to HELLO is {other:?}"),
        }),
    }
}

impl HelloReply {
    fn parse(pairs: Vec<(Value, Value)>) -> Self {
        let mut hello = Self::default();
        for (name, value) in pairs {
            let (Some(name), Some(value)) = (as_text(&name), as_text(&value)) else {
                continue;
            };
            match name.as_str() {
                // Valkey reports a Redis 7.2 version here, for compatibility with clients.
                "version" => hello.version = value,
                "mode" => hello.mode = value,
                "role" => hello.role = value,
                _ => {}
            }
        }
        hello
    }

    fn verify(&self, address: &Address, kind: ServerKind) -> Result<(), ConnectError> {
        let address = || address.clone();
        let major = self.version.split('.').next().map(str::parse::<u64>);
        if !matches!(major, Some(Ok(major)) if major >= OLDEST_MAJOR) {
            let version = self.version.clone();
            return Err(ConnectError::TooOld {
                address: address(),
                version,
            });
        }
        match (kind, self.mode.as_str()) {
            (_, "sentinel") => Err(ConnectError::IsSentinel(address())),
            (ServerKind::Primary, "cluster") => Err(ConnectError::IsCluster(address())),
            (ServerKind::ClusterNode, "standalone") => Err(ConnectError::NotCluster(address())),
            (ServerKind::Primary, _) if self.role != "master" => {
                Err(ConnectError::Replica(address()))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the content of a simple string, a bulk string or a verbatim string.
pub(super) fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::SimpleString(text) => Some(text.clone()),
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verified(
        version: &str,
        mode: &str,
        role: &str,
        kind: ServerKind,
    ) -> Result<(), ConnectError> {
        let (address, _) = Address::parse("redis://127.0.0.1:7000").unwrap();
        let [version, mode, role] = [version, mode, role].map(str::to_owned);
        HelloReply {
            version,
            mode,
            role,
        }
        .verify(&address, kind)
    }

    #[test]
    fn an_evicting_policy_is_detected_where_it_applies() {
        let info = |max: u64, policy: &str| {
            format!("# Memory\r\nused_memory:1\r\nmaxmemory:{max}\r\nmaxmemory_policy:{policy}\r\n")
        };
        let found = parse_eviction_policy(&info(1_000, "allkeys-lru"));
        assert_eq!(found.as_deref(), Some("allkeys-lru"));
        assert_eq!(parse_eviction_policy(&info(0, "allkeys-lru")), None);
        assert_eq!(parse_eviction_policy(&info(1_000, "noeviction")), None);
        assert_eq!(parse_eviction_policy("maxmemory_policy:\r\n"), None);
        assert_eq!(parse_eviction_policy(""), None);
    }

    #[test]
    fn unusable_servers_are_distinguished() {
        assert_eq!(
            verified("7.0.15", "standalone", "master", ServerKind::Primary),
            Ok(())
        );
        assert_eq!(
            verified("10.1.0", "cluster", "replica", ServerKind::ClusterNode),
            Ok(())
        );
        let refused = |version, mode, role, kind| {
            verified(version, mode, role, kind).unwrap_err().to_string()
        };
        for (found, advice) in [
            (
                refused("6.2.14", "standalone", "master", ServerKind::Primary),
                "upgrade to Redis 7.0",
            ),
            (
                refused("", "", "", ServerKind::Primary),
                "upgrade to Redis 7.0",
            ),
            (
                refused("7.0.0", "standalone", "replica", ServerKind::Primary),
                "configure the primary",
            ),
            (
                refused("7.0.0", "cluster", "master", ServerKind::Primary),
                "redis: {cluster: [redis://127.0.0.1:7000]}",
            ),
            (
                refused("7.0.0", "standalone", "master", ServerKind::ClusterNode),
                "redis: redis://127.0.0.1:7000",
            ),
            (
                refused("7.0.0", "sentinel", "master", ServerKind::Primary),
                "redis: {sentinel: [",
            ),
        ] {
            assert!(found.contains(advice), "{found}");
        }
    }
}
