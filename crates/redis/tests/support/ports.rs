//! Ports of this machine for the servers of tests.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Mutex,
};

use tokio::net::TcpSocket;

/// Reserves a port of 127.0.0.1 until this process ends. Connections to it are refused until a
/// server listens on it.
///
/// The socket that reserves the port has the option `SO_REUSEADDR` and does not listen. A server
/// with the same option can therefore listen on the port, but the system assigns the port to no
/// socket that asks for any port.
pub fn reserve_port() -> u16 {
    static RESERVED: Mutex<Vec<TcpSocket>> = Mutex::new(Vec::new());
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket
        .bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        .unwrap();
    let port = socket.local_addr().unwrap().port();
    RESERVED.lock().unwrap().push(socket);
    port
}
