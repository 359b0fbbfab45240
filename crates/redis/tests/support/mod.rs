//! Real Redis servers for tests: standalone, replicated with Sentinels, or a cluster. Each server
//! uses reserved ports, and a directory that is removed at the end. Tests of other crates also
//! include this module.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test program that includes this uses a part of it"
)]

mod certificates;
mod cluster;
mod ports;
mod proxy;
mod redis;
pub mod sentinels;

pub use self::{
    certificates::Certificates,
    cluster::RedisCluster,
    ports::reserve_port,
    proxy::{Proxy, Refused},
    redis::RedisServer,
    sentinels::Sentinels,
};

use std::{path::PathBuf, time::Duration};

/// The program that these tests start as Redis.
pub const SERVER: &str = match env!("CARGO_CRATE_NAME").as_bytes() {
    b"client_valkey" => "valkey-server",
    _ => "redis-server",
};

/// Timeout of operations that take milliseconds on an idle machine.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Repeats `attempt` until it succeeds; panics after [`TIMEOUT`].
pub fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let pause = Duration::from_millis(10);
    let attempts = TIMEOUT.as_millis() / pause.as_millis();
    for _ in 0..attempts {
        if let Some(done) = attempt() {
            return done;
        }
        #[expect(clippy::disallowed_methods, reason = "another program is waited for")]
        std::thread::sleep(pause);
    }
    panic!("the condition was never met: {what}");
}

/// A directory that is removed at the end of the test.
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
        // If the removal fails, the directory remains until Cargo's target directory is removed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
