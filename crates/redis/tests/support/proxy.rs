//! A TCP proxy that can delay data, close all connections, or refuse the connections of some
//! clients.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// A proxy between clients and a server on this machine.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    delay_ms: Arc<AtomicU64>,
    connections: Arc<Mutex<Connections>>,
}

#[derive(Debug, Default)]
struct Connections {
    /// Both ends of each connection, with the client's address.
    open: Vec<(IpAddr, TcpStream)>,
    refused: Refused,
}

/// The clients whose connections are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refused {
    #[default]
    None,
    From(IpAddr),
    All,
}

impl Refused {
    fn is(self, client: IpAddr) -> bool {
        self == Self::All || self == Self::From(client)
    }
}

impl Proxy {
    /// Starts a proxy in front of the server on `port`. The proxy runs until the process ends.
    pub fn before(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            delay_ms: Arc::default(),
            connections: Arc::default(),
        };
        let delay_ms = Arc::clone(&proxy.delay_ms);
        let connections = Arc::clone(&proxy.connections);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(from) = client.peer_addr().map(|address| address.ip()) else {
                    continue;
                };
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
                    continue;
                };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                {
                    let mut connections = connections.lock().unwrap();
                    if connections.refused.is(from) {
                        continue;
                    }
                    for end in [&client, &server] {
                        connections.open.push((from, end.try_clone().unwrap()));
                    }
                }
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                pump(client, server, Arc::clone(&delay_ms));
                pump(back.0, back.1, Arc::default());
            }
        });
        proxy
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Delays all data that clients send by this duration.
    pub fn delay(&self, by: Duration) {
        let millis = u64::try_from(by.as_millis()).unwrap();
        self.delay_ms.store(millis, Ordering::SeqCst);
    }

    /// Closes all connections.
    pub fn reset(&self) {
        let mut connections = self.connections.lock().unwrap();
        for (_, stream) in connections.open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Refuses the connections of these clients from now on, and closes their open connections.
    pub fn refuse(&self, refused: Refused) {
        let mut connections = self.connections.lock().unwrap();
        connections.refused = refused;
        connections.open.retain(|(from, stream)| {
            if refused.is(*from) {
                let _ = stream.shutdown(Shutdown::Both);
            }
            !refused.is(*from)
        });
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, delay_ms: Arc<AtomicU64>) {
    thread::spawn(move || {
        let mut room = [0; 65_536];
        while let Ok(length) = from.read(&mut room) {
            let delay = Duration::from_millis(delay_ms.load(Ordering::SeqCst));
            if !delay.is_zero() {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the delay simulates a slow network"
                )]
                thread::sleep(delay);
            }
            if length == 0 || to.write_all(&room[..length]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
