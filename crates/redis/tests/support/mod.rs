//! Real Redis servers for tests: alone, replicated under Sentinels, and as a cluster, each on ports that were free a
//! moment ago and in a directory that is removed with it. Tests of other crates include this too.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each of the test programs that include this uses a part of it"
)]

mod certificates;
mod cluster;
mod proxy;
mod redis;
pub mod sentinels;

pub use self::{
    certificates::Certificates,
    cluster::RedisCluster,
    proxy::{Proxy, Refused},
    redis::RedisServer,
    sentinels::Sentinels,
};

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

/// What is started where these tests say Redis.
pub const SERVER: &str = match env!("CARGO_CRATE_NAME").as_bytes() {
    b"connect_valkey" => "valkey-server",
    _ => "redis-server",
};

/// How long anything may take that takes milliseconds on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A port that is free now. Somebody may take it before it is used: start again then.
pub fn free_port() -> u16 {
    let socket = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    socket.local_addr().unwrap().port()
}

/// Tries `attempt` until it succeeds, for as long as patience lasts.
pub fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let pause = Duration::from_millis(10);
    let attempts = PATIENCE.as_millis() / pause.as_millis();
    for _ in 0..attempts {
        if let Some(done) = attempt() {
            return done;
        }
        #[expect(clippy::disallowed_methods, reason = "another program is waited for")]
        std::thread::sleep(pause);
    }
    panic!("it never came to this: {what}");
}

/// A directory that is removed with the test.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("redis-{}-{number}", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left behind is swept away with the target directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
