//! A TCP proxy that can be slow, or break every connection off.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Stands between a client and a server on this machine.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    delay_ms: Arc<AtomicU64>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    /// A proxy before the server on `port`; it ends with the process.
    pub fn before(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            delay_ms: Arc::default(),
            open: Arc::default(),
        };
        let (delay_ms, open) = (Arc::clone(&proxy.delay_ms), Arc::clone(&proxy.open));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
                    continue;
                };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                open.lock()
                    .unwrap()
                    .extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                pump(client, server, Arc::clone(&delay_ms));
                pump(back.0, back.1, Arc::default());
            }
        });
        proxy
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Holds everything that clients send back for so long.
    pub fn delay(&self, by: Duration) {
        let millis = u64::try_from(by.as_millis()).unwrap();
        self.delay_ms.store(millis, Ordering::SeqCst);
    }

    /// Breaks every connection off.
    pub fn reset(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, delay_ms: Arc<AtomicU64>) {
    thread::spawn(move || {
        let mut room = [0; 65_536];
        while let Ok(length) = from.read(&mut room) {
            let delay = Duration::from_millis(delay_ms.load(Ordering::SeqCst));
            if !delay.is_zero() {
                #[expect(clippy::disallowed_methods, reason = "being slow is what it is for")]
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
