//! The listening sockets: bound at startup, or passed by the service manager.
//!
//! A service manager may open the sockets itself and pass them to the server (`sd_listen_fds(3)`,
//! "socket activation"). A socket's name (`FileDescriptorName=` in its unit) is the name of the
//! listener that uses the socket. During an upgrade, the old process also passes each socket with
//! the name of its listener. The other listeners bind to their addresses in the rules file.

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use socket2::{Domain, SockRef, Socket, Type};
use tidegate_config::Config;

use super::{
    error::{InheritedSocketError, ServeError},
    service_manager,
    upgrade::{OwnListener, PassedListener},
};

/// The listen backlog: the maximum number of connections waiting to be accepted. The operating
/// system may enforce a lower maximum (`net.core.somaxconn`).
const BACKLOG: i32 = 4_096;

/// The listening sockets; `None` for disabled listeners.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    pub(super) http: Option<TcpListener>,
    pub(super) grpc: Option<TcpListener>,
    pub(super) resp: Option<TcpListener>,
    pub(super) spop: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
    pub(super) metrics: Option<TcpListener>,
    pub(super) proxy: Option<TcpListener>,
    /// The names of the listeners whose sockets the service manager has opened.
    managed: Vec<String>,
}

impl Sockets {
    /// Takes the sockets from the service manager, and the sockets that the old process has
    /// `passed` during an upgrade. Binds the other listeners to their addresses in `config`. Sets
    /// the addresses in `config.listen` to those of the passed sockets.
    pub(super) fn open(
        config: &mut Config,
        passed: Vec<PassedListener>,
    ) -> Result<Self, ServeError> {
        let mut sockets = Self::default();
        for passed in passed {
            sockets.take(passed, config)?;
        }
        let managed = service_manager::sockets().map_err(InheritedSocketError::Variables)?;
        for (name, socket) in managed {
            sockets.managed.push(name.clone());
            sockets.inherit(name, socket, config)?;
        }
        sockets.bind_others(config)?;
        Ok(sockets)
    }

    /// Returns a copy of each socket, for a new process.
    pub(super) fn own(&self) -> io::Result<Vec<OwnListener>> {
        let sockets = [
            ("http", &self.http),
            ("grpc", &self.grpc),
            ("resp", &self.resp),
            ("spop", &self.spop),
            ("admin", &self.admin),
            ("metrics", &self.metrics),
            ("proxy", &self.proxy),
        ];
        let opened = sockets.into_iter().filter_map(|(name, socket)| {
            let copy = socket.as_ref()?.try_clone();
            let is_managed = self.managed.iter().any(|managed| managed == name);
            Some(copy.map(|socket| OwnListener {
                name,
                socket,
                is_managed,
            }))
        });
        opened.collect()
    }

    /// Uses a socket of the old process, unless its listener is now off or has another address.
    fn take(
        &mut self,
        passed: PassedListener,
        config: &mut Config,
    ) -> Result<(), InheritedSocketError> {
        let PassedListener {
            name,
            socket,
            is_managed,
        } = passed;
        let not_listening = |error: io::Error| InheritedSocketError::NotListening {
            name: name.clone(),
            problem: error.to_string(),
        };
        let address = socket.local_addr().map_err(not_listening)?;
        let Some(configured) = configured(&name, config) else {
            tracing::info!(listener = name, %address, "upgrade: the listener is now off; its socket will be closed");
            return Ok(());
        };
        // Port 0 stands for any port.
        let is_same =
            *configured == address || configured.port() == 0 && configured.ip() == address.ip();
        if !is_managed && !is_same {
            tracing::info!(
                listener = name, %address, new_address = %configured,
                "upgrade: the listener now has another address; its old socket will be closed"
            );
            return Ok(());
        }
        if is_managed {
            self.managed.push(name.clone());
        }
        self.inherit(name, Ok(socket), config)
    }

    fn inherit(
        &mut self,
        name: String,
        socket: io::Result<TcpListener>,
        config: &mut Config,
    ) -> Result<(), InheritedSocketError> {
        let slot = match name.as_str() {
            "http" => &mut self.http,
            "grpc" => &mut self.grpc,
            "resp" => &mut self.resp,
            "spop" => &mut self.spop,
            "admin" => &mut self.admin,
            "metrics" => &mut self.metrics,
            "proxy" => &mut self.proxy,
            _ => return Err(InheritedSocketError::UnknownName(name)),
        };
        let Some(address) = configured(&name, config) else {
            return Err(InheritedSocketError::Off(name));
        };
        if slot.is_some() {
            return Err(InheritedSocketError::Duplicate(name));
        }
        let not_listening = |problem| InheritedSocketError::NotListening { name, problem };
        // A child process must not inherit the descriptor.
        let checked = socket.and_then(|socket| {
            rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
            Ok((socket.local_addr()?, is_listening(&socket)?, socket))
        });
        match checked {
            Ok((actual, true, socket)) => {
                *address = actual;
                *slot = Some(socket);
                Ok(())
            }
            Ok(_) => Err(not_listening("does not listen".to_owned())),
            Err(error) => Err(not_listening(error.to_string())),
        }
    }

    fn bind_others(&mut self, config: &Config) -> Result<(), ServeError> {
        let listen = &config.listen;
        let proxy = config.proxy.as_ref().map(|proxy| proxy.listen);
        for (listener, address, socket) in [
            ("http", listen.http, &mut self.http),
            ("grpc", listen.grpc, &mut self.grpc),
            ("resp", listen.resp, &mut self.resp),
            ("spop", listen.spop, &mut self.spop),
            ("admin", listen.admin, &mut self.admin),
            ("metrics", listen.metrics, &mut self.metrics),
            ("proxy", proxy, &mut self.proxy),
        ] {
            let Some(address) = address.filter(|_| socket.is_none()) else {
                continue;
            };
            let bound = listening(address).map_err(|source| ServeError::Bind {
                listener,
                address,
                source,
            })?;
            *socket = Some(bound);
        }
        Ok(())
    }
}

/// Returns the configured address of the listener with this name; `None` if it is off or unknown.
fn configured<'c>(name: &str, config: &'c mut Config) -> Option<&'c mut SocketAddr> {
    let listen = &mut config.listen;
    match name {
        "http" => listen.http.as_mut(),
        "grpc" => listen.grpc.as_mut(),
        "resp" => listen.resp.as_mut(),
        "spop" => listen.spop.as_mut(),
        "admin" => listen.admin.as_mut(),
        "metrics" => listen.metrics.as_mut(),
        "proxy" => config.proxy.as_mut().map(|proxy| &mut proxy.listen),
        _ => None,
    }
}

fn is_listening(socket: &TcpListener) -> io::Result<bool> {
    SockRef::from(socket).is_listener()
}

fn listening(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // With SO_REUSEADDR, which the standard library also sets, a restarted server can bind the
    // address while connections of the previous process are still in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::{net::TcpStream, time::Duration};

    use super::*;

    /// A timeout that is long enough to connect while the backlog has room. Once the backlog is
    /// full, the operating system drops the SYN packets of further connections until the listener
    /// accepts connections. The listener in this test never accepts a connection.
    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn hundreds_of_clients_connect_before_the_first_is_accepted() {
        let socket = listening(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        let connect = |number| {
            TcpStream::connect_timeout(&address, TIMEOUT)
                .unwrap_or_else(|error| panic!("client {number}: {error}"))
        };
        // The number of clients is below 1,024, the usual limit on a process's open files.
        let clients: Vec<TcpStream> = (0..900).map(connect).collect();
        assert_eq!(clients.len(), 900);
    }

    fn local() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    fn config() -> Config {
        let mut config = Config::default();
        config.listen.http = Some(local());
        config.listen.grpc = None;
        config
    }

    fn passed(name: &str, socket: TcpListener, config: &mut Config) -> Result<Sockets, String> {
        let mut sockets = Sockets::default();
        let done = sockets.inherit(name.to_owned(), Ok(socket), config);
        done.map_err(|error| error.to_string())?;
        Ok(sockets)
    }

    #[test]
    fn a_passed_socket_replaces_the_address_of_the_rules_file() {
        let socket = listening(local()).unwrap();
        let address = socket.local_addr().unwrap();
        let mut config = config();
        let sockets = passed("http", socket, &mut config).unwrap();
        assert_eq!(config.listen.http, Some(address));
        assert_eq!(sockets.http.unwrap().local_addr().unwrap(), address);
    }

    #[test]
    fn a_socket_that_no_listener_can_use_is_an_error() {
        let socket = || listening(local()).unwrap();
        for (name, expected) in [
            (
                "tidegate.socket",
                "set FileDescriptorName= in the socket unit to one of http, grpc",
            ),
            ("grpc", "this listener is off; give it an address"),
            ("proxy", "this listener is off; give it an address"),
        ] {
            let error = passed(name, socket(), &mut config()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let mut config = config();
        let mut sockets = passed("http", socket(), &mut config).unwrap();
        let again = sockets.inherit("http".to_owned(), Ok(socket()), &mut config);
        let error = again.unwrap_err().to_string();
        assert!(error.contains("passed twice"), "{error}");
    }

    fn taken(socket: TcpListener, is_managed: bool, config: &mut Config) -> Sockets {
        let passed = PassedListener {
            name: "http".to_owned(),
            socket,
            is_managed,
        };
        let mut sockets = Sockets::default();
        sockets.take(passed, config).unwrap();
        sockets
    }

    #[test]
    fn a_socket_of_the_old_process_is_used_if_its_listener_has_the_same_address() {
        let open = || listening(local()).unwrap();
        let mut with_any_port = config();
        let sockets = taken(open(), false, &mut with_any_port);
        assert!(sockets.http.is_some());
        // The next process must know which sockets the service manager has opened.
        let mut with_other_address = config();
        with_other_address.listen.http = Some(SocketAddr::from(([127, 0, 0, 1], 1)));
        assert!(taken(open(), false, &mut with_other_address).http.is_none());
        let managed = taken(open(), true, &mut with_other_address);
        assert!(managed.own().unwrap()[0].is_managed);
        let mut without = config();
        without.listen.http = None;
        assert!(taken(open(), false, &mut without).http.is_none());
    }

    #[test]
    fn a_socket_that_does_not_listen_is_an_error() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&local().into()).unwrap();
        let error = passed("http", socket.into(), &mut config()).unwrap_err();
        assert!(
            error.contains("does not listen; set ListenStream="),
            "{error}"
        );
    }
}
