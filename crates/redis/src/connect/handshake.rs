//! Connection set-up: TCP or TLS, login, client name, and a check of the server.

use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Pipeline, PushInfo, PushKind, TlsCertificates,
    Value, aio::MultiplexedConnection,
};

use super::{
    error::ConnectError,
    settings::{Address, Login, Settings, Transport},
};

/// The oldest major version that supports our scripts and the replies that we expect.
const OLDEST_MAJOR: u64 = 7;

/// The kind of server that is expected at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A standalone server that accepts writes.
    Primary,
    /// A node of a cluster, primary or replica.
    ClusterNode,
}

/// Connects to `address`, and checks that the server is of the expected `kind` and can run the
/// scripts.
///
/// The last step is a command that must be answered within the timeout of a decision, so that a
/// slow server is not put back into use. `lost` is called when the connection breaks, even while it
/// is idle.
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

/// Returns the policy by which the server evicts keys when its memory is full; `None` if it does
/// not evict, or if that is unknown.
///
/// The policy is read with `INFO`, because managed services forbid `CONFIG GET`.
pub(super) async fn eviction_policy(connection: &mut MultiplexedConnection) -> Option<String> {
    let question = redis::cmd("INFO").arg("memory").to_owned();
    let info = text(&connection.send_packed_command(&question).await.ok()?)?;
    evicting(&info)
}

/// Returns the policy in `INFO memory`, if it evicts keys and `maxmemory` is set.
fn evicting(info: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))
    };
    let policy = field("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
    (field("maxmemory")? != "0").then(|| policy.to_owned())
}

/// Connects and logs in, without a check of the server.
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

/// The reply to `HELLO`, in which a server describes itself.
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
    // The reply to `CLIENT SETNAME` is ignored: the name is informational, and a user without that
    // permission can still decide.
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
                // Valkey reports the version of Redis 7.2 here, for compatibility with clients.
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

/// Returns the text of a simple, bulk or verbatim string.
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
    fn an_evicting_policy_is_detected_where_it_applies() {
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
    fn unusable_servers_are_distinguished() {
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
                "configure the primary",
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
