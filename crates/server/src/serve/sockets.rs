//! The listening sockets: bound at startup, or passed by the service manager.
//!
//! A service manager may open the sockets itself and pass them to the server (`sd_listen_fds(3)`,
//! "socket activation"). A socket's name (`FileDescriptorName=` in its unit) is the name of the
//! listener that uses the socket. The other listeners bind to their addresses in the rules file.

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use socket2::{Domain, SockRef, Socket, Type};
use tidegate_config::Config;

use super::{
    error::{InheritedSocketError, ServeError},
    service_manager,
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
}

impl Sockets {
    /// Takes the service manager's sockets, and binds the other listeners to their addresses in
    /// `config`. Sets the addresses in `config.listen` to those of the passed sockets.
    pub(super) fn open(config: &mut Config) -> Result<Self, ServeError> {
        let mut sockets = Self::default();
        let passed = service_manager::sockets().map_err(InheritedSocketError::Variables)?;
        for (name, socket) in passed {
            sockets.inherit(name, socket, config)?;
        }
        sockets.bind_others(config)?;
        Ok(sockets)
    }

    fn inherit(
        &mut self,
        name: String,
        socket: io::Result<TcpListener>,
        config: &mut Config,
    ) -> Result<(), InheritedSocketError> {
        let listen = &mut config.listen;
        let proxy = config.proxy.as_mut().map(|proxy| &mut proxy.listen);
        let (slot, address) = match name.as_str() {
            "http" => (&mut self.http, listen.http.as_mut()),
            "grpc" => (&mut self.grpc, listen.grpc.as_mut()),
            "resp" => (&mut self.resp, listen.resp.as_mut()),
            "spop" => (&mut self.spop, listen.spop.as_mut()),
            "admin" => (&mut self.admin, listen.admin.as_mut()),
            "metrics" => (&mut self.metrics, listen.metrics.as_mut()),
            "proxy" => (&mut self.proxy, proxy),
            _ => return Err(InheritedSocketError::UnknownName(name)),
        };
        let Some(address) = address else {
            return Err(InheritedSocketError::Off(name));
        };
        if slot.is_some() {
            return Err(InheritedSocketError::Duplicate(name));
        }
        let not_listening = |problem| InheritedSocketError::NotListening { name, problem };
        match socket.and_then(|socket| Ok((socket.local_addr()?, is_listening(&socket)?, socket))) {
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
