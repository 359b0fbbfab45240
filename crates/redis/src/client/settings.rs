//! Connection settings: the addresses of the Redis servers, and how to connect to them.

use std::{fmt, time::Duration};

use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo,
    io::tcp::TcpSettings,
};

/// All settings of the connections.
#[derive(Clone, Debug)]
pub struct RedisSettings {
    /// The topology and the addresses of the servers.
    pub topology: Topology,
    /// The login for the servers.
    pub login: Login,
    /// The login for the Sentinels, which have their own users.
    pub sentinel_login: Login,
    /// Certificates for `rediss://` addresses.
    pub tls: RedisTls,
    /// Decision timeout, from the request to the reply; default 25 ms.
    pub timeout: Duration,
    /// Timeout for connecting, including TLS and login; default 1 s.
    pub connect_timeout: Duration,
    /// Number of connections to each server, at least 1; default 2. A key always uses the same
    /// connection.
    pub connections: usize,
    /// Queue length of each connection, at least 1; default 4,096. When the queue is full, requests
    /// are not sent.
    pub queue: usize,
    /// The name of the connections in `CLIENT LIST`; default `tidegate`.
    pub client_name: String,
}

impl RedisSettings {
    /// Returns the default settings for `topology`.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        Self {
            topology,
            login: Login::default(),
            sentinel_login: Login::default(),
            tls: RedisTls::default(),
            timeout: Duration::from_millis(25),
            connect_timeout: Duration::from_secs(1),
            connections: 2,
            queue: 4_096,
            client_name: "tidegate".into(),
        }
    }
}

/// The topology of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server, or a primary whose address never changes.
    Standalone(Address),
    /// A primary whose address the Sentinels report.
    Sentinel {
        /// All Sentinels of the primary. A working primary is replaced only if a majority of the
        /// Sentinels names another server, or if a Sentinel reports a newer configuration. To find
        /// the first primary, the reply of one Sentinel is sufficient.
        sentinels: Vec<Address>,
        /// The primary's name in the Sentinel configuration.
        primary: String,
    },
    /// A Redis Cluster.
    Cluster {
        /// Some nodes of the cluster, through which the other nodes are discovered.
        seeds: Vec<Address>,
    },
}

/// The address of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A host name or an IP address. For a Unix socket, the path of the socket.
    pub host: String,
    /// The port; 0 for a Unix socket.
    pub port: u16,
    /// The transport.
    pub transport: Transport,
    /// The database number; 0 in a cluster.
    pub database: i64,
}

/// The transport to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// `redis://`: TCP without encryption.
    Plain,
    /// `rediss://`: TLS with verification of the server's certificate.
    Tls,
    /// `redis+unix://`: a Unix socket.
    Unix,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.transport, self.host.contains(':')) {
            (Transport::Unix, _) => f.write_str(&self.host),
            (_, true) => write!(f, "[{}]:{}", self.host, self.port),
            (_, false) => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// A user name and a password; both are `None` for a server without authentication.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// The ACL user; `None` is the default user.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
}

/// Hides the password, because the settings may be logged.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "…");
        f.debug_struct("Login")
            .field("username", &self.username)
            .field("password", &password)
            .finish()
    }
}

/// TLS certificates in PEM. Without a CA certificate, the system's trust anchors are used.
#[derive(Clone, Default)]
pub struct RedisTls {
    /// Trust anchors (CA certificates) for the server's certificate.
    pub ca: Option<Vec<u8>>,
    /// Client certificate and private key, for servers that require them.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

/// Hides the private key, because the settings may be logged.
impl fmt::Debug for RedisTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTls")
            .field("ca", &self.ca.is_some())
            .field("client", &self.client.is_some())
            .finish()
    }
}

impl Address {
    /// Parses `redis://[user[:password]@]host[:port][/database]`. A `rediss://` URL uses TLS. In a
    /// `redis+unix://` URL, the path of a socket follows.
    ///
    /// # Errors
    ///
    /// A message that says what is wrong with the URL, and what is expected.
    pub fn parse(url: &str) -> Result<(Self, Login), String> {
        let info = url
            .into_connection_info()
            .map_err(|_| expected(wrong_part(url)))?;
        let (host, port, transport) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => (host.clone(), *port, Transport::Plain),
            ConnectionAddr::Unix(path) => (path.display().to_string(), 0, Transport::Unix),
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err("an unverified certificate gives no protection: remove #insecure and set the CA in `tls.ca`".into());
            }
            ConnectionAddr::TcpTls { host, port, .. } => (host.clone(), *port, Transport::Tls),
            _ => return Err(expected(wrong_part(url))),
        };
        let redis_settings = info.redis_settings();
        let login = Login {
            username: redis_settings.username().map(str::to_owned),
            password: redis_settings.password().map(str::to_owned),
        };
        let address = Self {
            host,
            port,
            transport,
            database: redis_settings.db(),
        };
        Ok((address, login))
    }

    /// Returns an address with the same transport and database on another host.
    pub(super) fn with_endpoint(&self, host: &str, port: u16) -> Self {
        Self {
            host: host.to_owned(),
            port,
            ..self.clone()
        }
    }

    /// Converts the address for the client library.
    pub(super) fn connection_info(&self, login: &Login) -> redis::RedisResult<ConnectionInfo> {
        let mut redis_settings = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_db(self.database)
            .set_lib_name("tidegate", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &login.username {
            redis_settings = redis_settings.set_username(username);
        }
        if let Some(password) = &login.password {
            redis_settings = redis_settings.set_password(password);
        }
        let (host, port) = (self.host.clone(), self.port);
        let address = match self.transport {
            Transport::Plain => ConnectionAddr::Tcp(host, port),
            Transport::Tls => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            },
            Transport::Unix => ConnectionAddr::Unix(host.into()),
        };
        let info = address.into_connection_info()?;
        // Without `TCP_NODELAY`, Nagle's algorithm and delayed acknowledgements hold small requests
        // back for 40 ms.
        let tcp = TcpSettings::default().set_nodelay(true);
        Ok(info
            .set_redis_settings(redis_settings)
            .set_tcp_settings(tcp))
    }
}

/// Returns what is wrong with a URL that cannot be parsed. The text contains no part of the URL,
/// which can contain a password.
fn wrong_part(url: &str) -> &'static str {
    let Some((scheme, _)) = url.split_once("://") else {
        return "the scheme is missing";
    };
    if redis::parse_redis_url(url).is_some() {
        return "the host is missing, or the database is not a number";
    }
    match scheme {
        "redis" | "rediss" | "valkey" | "valkeys" => "the host or the port is not valid",
        _ => "the scheme must be redis, rediss or redis+unix",
    }
}

fn expected(problem: &str) -> String {
    format!(
        "{problem}; expected a URL such as redis://127.0.0.1:6379, or rediss:// for TLS, with an \
         optional user:password@ before the host"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed_and_printed_without_secrets() {
        let (address, login) = Address::parse("rediss://me:secret@cache.internal:7000/2").unwrap();
        assert_eq!(
            (
                address.to_string().as_str(),
                address.transport,
                address.database
            ),
            ("cache.internal:7000", Transport::Tls, 2)
        );
        assert_eq!(login.username.as_deref(), Some("me"));
        assert_eq!(login.password.as_deref(), Some("secret"));
        assert!(!format!("{login:?}").contains("secret"));
        assert_eq!(
            Address::parse("redis://[::1]").unwrap().0.to_string(),
            "[::1]:6379"
        );
    }

    #[test]
    fn an_invalid_address_is_refused_with_an_example() {
        for (wrong, problem) in [
            ("", "the scheme is missing"),
            ("127.0.0.1:6379", "the scheme is missing"),
            ("http://x", "the scheme must be redis, rediss or redis+unix"),
            ("redis://x:notaport", "the host or the port is not valid"),
            ("redis://x:70000", "the host or the port is not valid"),
            ("valkey://x:70000", "the host or the port is not valid"),
            (
                "redis:///0",
                "the host is missing, or the database is not a number",
            ),
            (
                "redis://x/first",
                "the host is missing, or the database is not a number",
            ),
        ] {
            let expected = format!("{problem}; expected a URL such as redis://127.0.0.1:6379");
            let error = Address::parse(wrong).unwrap_err();
            assert!(error.starts_with(&expected), "{wrong}: {error}");
        }
        assert!(
            Address::parse("rediss://x/#insecure")
                .unwrap_err()
                .contains("tls.ca")
        );
    }
}
