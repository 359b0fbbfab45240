//! One connection, from nothing to ready: TCP or TLS, login, name, and a look at who answered.

use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Pipeline, PushInfo, PushKind, TlsCertificates,
    Value, aio::MultiplexedConnection,
};

use super::{
    error::ConnectError,
    settings::{Address, Login, Settings, Transport},
};

/// The oldest major version whose scripts and replies ours were written for.
const OLDEST_MAJOR: u64 = 7;

/// What kind of server is expected at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A server by itself that takes writes.
    Primary,
    /// A node of a cluster, whatever its part in it.
    ClusterNode,
}

/// Connects to `address`, and makes sure that it is a `kind` of server that can decide.
///
/// The last step is a question that must be answered within the time of a decision: a server that is slow is
/// not taken back into service. `lost` is called when the connection breaks off, even while nothing is asked.
pub(super) async fn connect(
    settings: &Settings,
    (address, kind): (&Address, Kind),
    lost: impl Fn() + Send + Sync + 'static,
) -> Result<MultiplexedConnection, ConnectError> {
    let mut connection = open(settings, (address, &settings.login), lost).await?;
    let hello = hello(settings, address, &mut connection).await?;
    hello.suits(address, kind)?;
    Ok(connection)
}

/// The policy by which the server evicts keys when it is full; `None` if it evicts none, or does not tell.
///
/// `INFO` and not `CONFIG GET`, which managed services forbid.
pub(super) async fn eviction_policy(connection: &mut MultiplexedConnection) -> Option<String> {
    let question = redis::cmd("INFO").arg("memory").to_owned();
    let info = text(&connection.send_packed_command(&question).await.ok()?)?;
    evicting(&info)
}

/// The policy in `INFO memory`, where it is one that evicts and there is a limit at which it would.
fn evicting(info: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))
    };
    let policy = field("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
    (field("maxmemory")? != "0").then(|| policy.to_owned())
}

/// Connects and logs in, to whatever kind of server.
pub(super) async fn open(
    settings: &Settings,
    (address, login): (&Address, &Login),
    lost: impl Fn() + Send + Sync + 'static,
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
                lost();
            }
            Ok::<(), ()>(())
        });
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(failed)
}

fn certificates(settings: &Settings) -> Option<TlsCertificates> {
    let tls = &settings.tls;
    let client_tls = tls
        .client
        .as_ref()
        .map(|(client_cert, client_key)| ClientTlsConfig {
            client_cert: client_cert.clone(),
            client_key: client_key.clone(),
        });
    (client_tls.is_some() || tls.authority.is_some()).then(|| TlsCertificates {
        client_tls,
        root_cert: tls.authority.clone(),
    })
}

/// What a server says of itself.
#[derive(Debug, Default)]
struct Hello {
    version: String,
    mode: String,
    role: String,
}

async fn hello(
    settings: &Settings,
    address: &Address,
    connection: &mut MultiplexedConnection,
) -> Result<Hello, ConnectError> {
    let mut questions = Pipeline::with_capacity(2);
    questions
        .cmd("CLIENT")
        .arg("SETNAME")
        .arg(&settings.client_name);
    questions.cmd("HELLO");
    let answers = connection
        .send_packed_commands(&questions, 0, 2)
        .await
        .map_err(|error| ConnectError::from_library(address, &error))?;
    // The name is for people; a user that may not set it decides as well.
    match answers.into_iter().nth(1) {
        Some(Value::Map(pairs)) => Ok(Hello::read(pairs)),
        Some(Value::ServerError(error)) => Err(ConnectError::from_library(address, &error.into())),
        other => Err(ConnectError::Nonsense {
            address: address.clone(),
            problem: format!("{other:?} to HELLO"),
        }),
    }
}

impl Hello {
    fn read(pairs: Vec<(Value, Value)>) -> Self {
        let mut hello = Self::default();
        for (name, value) in pairs {
            let (Some(name), Some(value)) = (text(&name), text(&value)) else {
                continue;
            };
            match name.as_str() {
                // Valkey calls itself Redis 7.2 here, for the sake of clients that ask.
                "version" => hello.version = value,
                "mode" => hello.mode = value,
                "role" => hello.role = value,
                _ => {}
            }
        }
        hello
    }

    fn suits(&self, address: &Address, kind: Kind) -> Result<(), ConnectError> {
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
            (Kind::Primary, "cluster") => Err(ConnectError::IsCluster(address())),
            (Kind::ClusterNode, "standalone") => Err(ConnectError::NotCluster(address())),
            (Kind::Primary, _) if self.role != "master" => Err(ConnectError::Replica(address())),
            _ => Ok(()),
        }
    }
}

/// The text of a simple or bulk string.
pub(super) fn text(value: &Value) -> Option<String> {
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

    fn judged(version: &str, mode: &str, role: &str, kind: Kind) -> Result<(), ConnectError> {
        let (address, _) = Address::parse("redis://127.0.0.1:7000").unwrap();
        let [version, mode, role] = [version, mode, role].map(str::to_owned);
        Hello {
            version,
            mode,
            role,
        }
        .suits(&address, kind)
    }

    #[test]
    fn a_policy_that_evicts_is_noticed_where_it_can_evict() {
        let info = |max: u64, policy: &str| {
            format!("# Memory\r\nused_memory:1\r\nmaxmemory:{max}\r\nmaxmemory_policy:{policy}\r\n")
        };
        let found = evicting(&info(1_000, "allkeys-lru"));
        assert_eq!(found.as_deref(), Some("allkeys-lru"));
        assert_eq!(evicting(&info(0, "allkeys-lru")), None);
        assert_eq!(evicting(&info(1_000, "noeviction")), None);
        assert_eq!(evicting("maxmemory_policy:\r\n"), None);
        assert_eq!(evicting(""), None);
    }

    #[test]
    fn servers_that_cannot_decide_are_told_apart() {
        assert_eq!(
            judged("7.0.15", "standalone", "master", Kind::Primary),
            Ok(())
        );
        assert_eq!(
            judged("10.1.0", "cluster", "replica", Kind::ClusterNode),
            Ok(())
        );
        let refused =
            |version, mode, role, kind| judged(version, mode, role, kind).unwrap_err().to_string();
        for (found, advice) in [
            (
                refused("6.2.14", "standalone", "master", Kind::Primary),
                "upgrade it",
            ),
            (refused("", "", "", Kind::Primary), "upgrade it"),
            (
                refused("7.0.0", "standalone", "replica", Kind::Primary),
                "name the primary",
            ),
            (
                refused("7.0.0", "cluster", "master", Kind::Primary),
                "redis: {cluster: [redis://127.0.0.1:7000]}",
            ),
            (
                refused("7.0.0", "standalone", "master", Kind::ClusterNode),
                "redis: redis://127.0.0.1:7000",
            ),
            (
                refused("7.0.0", "sentinel", "master", Kind::Primary),
                "redis: {sentinel: [",
            ),
        ] {
            assert!(found.contains(advice), "{found}");
        }
    }
}
