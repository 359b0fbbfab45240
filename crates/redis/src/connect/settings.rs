//! Where Redis is and how to speak to it.

use std::{fmt, time::Duration};

use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo,
    io::tcp::TcpSettings,
};

/// Everything that a connection needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which servers there are.
    pub topology: Topology,
    /// Who asks.
    pub login: Login,
    /// Who asks the Sentinels, which know users of their own.
    pub sentinel_login: Login,
    /// Certificates for `rediss://` addresses.
    pub tls: Tls,
    /// How long a decision may take, from the question to the answer; default 25 ms.
    pub timeout: Duration,
    /// How long connecting may take, everything included; default 1 s.
    pub connect_timeout: Duration,
    /// Connections to each server, at least 1; default 2. A key always takes the same one.
    pub connections: usize,
    /// How many questions may wait for each connection, at least 1; default 4,096. Further ones are not sent.
    pub queue: usize,
    /// The name under which `CLIENT LIST` shows the connections; default `tidegate`.
    pub client_name: String,
}

impl Settings {
    /// The usual settings for `topology`.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        Self {
            topology,
            login: Login::default(),
            sentinel_login: Login::default(),
            tls: Tls::default(),
            timeout: Duration::from_millis(25),
            connect_timeout: Duration::from_secs(1),
            connections: 2,
            queue: 4_096,
            client_name: "tidegate".into(),
        }
    }
}

/// Which servers there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server, or a primary whose address never changes.
    Standalone(Address),
    /// A primary that Sentinels name.
    Sentinel {
        /// All Sentinels of the primary: a primary that works is left only for a majority of them or a newer
        /// configuration. One that answers is enough to find the primary.
        sentinels: Vec<Address>,
        /// The name under which they know the primary.
        primary: String,
    },
    /// A Redis Cluster.
    Cluster {
        /// Some of its nodes; the others are found through them.
        seeds: Vec<Address>,
    },
}

/// The address of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name or an address; the path of a socket.
    pub host: String,
    /// The port; 0 for a socket.
    pub port: u16,
    /// How to speak to it.
    pub transport: Transport,
    /// The number of the database; 0 in a cluster.
    pub database: i64,
}

/// How to speak to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// `redis://`: as it is.
    Plain,
    /// `rediss://`: encrypted, and the server's certificate verified.
    Tls,
    /// `redis+unix://`: through a socket of this machine.
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

/// A user and a password; both empty for a server that asks for none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// The ACL user; `None` is the default user.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
}

/// Passwords are not written to logs.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "…");
        f.debug_struct("Login")
            .field("username", &self.username)
            .field("password", &password)
            .finish()
    }
}

/// Certificates in PEM; those of the system where nothing is given.
#[derive(Clone, Default)]
pub struct Tls {
    /// Who may have signed the server's certificate.
    pub authority: Option<Vec<u8>>,
    /// A certificate and its key, for servers that ask who connects.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

/// Keys are not written to logs.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("authority", &self.authority.is_some())
            .field("client", &self.client.is_some())
            .finish()
    }
}

impl Address {
    /// Reads `redis://[user[:password]@]host[:port][/database]`; `rediss://` speaks TLS, and `redis+unix://` is followed by
    /// the path of a socket.
    ///
    /// # Errors
    ///
    /// What is wrong with the text and what would be right.
    pub fn parse(url: &str) -> Result<(Self, Login), String> {
        let expected = || {
            "expected a URL such as redis://127.0.0.1:6379, or rediss:// for TLS, with user:password@ before the host if there is one".to_owned()
        };
        let info = url.into_connection_info().map_err(|_| expected())?;
        let (host, port, transport) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => (host.clone(), *port, Transport::Plain),
            ConnectionAddr::Unix(path) => (path.display().to_string(), 0, Transport::Unix),
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err("a certificate that is not verified protects nothing: remove #insecure and name the authority under `tls.ca`".into());
            }
            ConnectionAddr::TcpTls { host, port, .. } => (host.clone(), *port, Transport::Tls),
            _ => return Err(expected()),
        };
        let asked = info.redis_settings();
        let login = Login {
            username: asked.username().map(str::to_owned),
            password: asked.password().map(str::to_owned),
        };
        let address = Self {
            host,
            port,
            transport,
            database: asked.db(),
        };
        Ok((address, login))
    }

    /// The same way of connecting, to another server.
    pub(super) fn beside(&self, host: &str, port: u16) -> Self {
        Self {
            host: host.to_owned(),
            port,
            ..self.clone()
        }
    }

    /// What the client library wants to know.
    pub(super) fn connection_info(&self, login: &Login) -> redis::RedisResult<ConnectionInfo> {
        let mut asked = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_db(self.database)
            .set_lib_name("tidegate", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &login.username {
            asked = asked.set_username(username);
        }
        if let Some(password) = &login.password {
            asked = asked.set_password(password);
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
        // Without it, Nagle and delayed acknowledgements make small questions wait 40 ms for each other.
        let tcp = TcpSettings::default().set_nodelay(true);
        Ok(info.set_redis_settings(asked).set_tcp_settings(tcp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_written_without_secrets() {
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
    fn what_is_no_address_is_refused_with_an_example() {
        for wrong in ["", "127.0.0.1:6379", "http://x", "redis://x:notaport"] {
            assert!(
                Address::parse(wrong)
                    .unwrap_err()
                    .contains("redis://127.0.0.1:6379"),
                "{wrong}"
            );
        }
        assert!(
            Address::parse("rediss://x/#insecure")
                .unwrap_err()
                .contains("tls.ca")
        );
    }
}
