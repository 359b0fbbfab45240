//! A primary, a replica, and three Sentinels that monitor them.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use super::{RedisServer, SERVER, Scratch, eventually, redis::ask, reserve_port};

/// The primary's name in the Sentinel configuration.
pub const PRIMARY: &str = "tide";

/// The servers, which are killed at the end of the test.
#[derive(Debug)]
pub struct Sentinels {
    pub primary: RedisServer,
    pub replica: RedisServer,
    ports: Vec<u16>,
    children: Vec<Child>,
    _scratch: Scratch,
}

impl Sentinels {
    /// Starts all five servers, and waits until the Sentinels know each other and the replica.
    pub fn start() -> Self {
        let primary = RedisServer::start();
        let of = primary.port().to_string();
        let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &of]);
        eventually("the replica follows", || {
            ask(replica.port(), &["INFO", "replication"])?
                .contains("master_link_status:up")
                .then_some(())
        });
        let scratch = Scratch::new();
        let ports: Vec<u16> = (0..3).map(|_| reserve_port()).collect();
        let children = ports
            .iter()
            .map(|port| sentinel(*port, primary.port(), &scratch))
            .collect();
        let sentinels = Self {
            primary,
            replica,
            ports,
            children,
            _scratch: scratch,
        };
        sentinels.wait_until_connected_to_each_other();
        sentinels
    }

    /// Returns the ports of the Sentinels.
    pub fn ports(&self) -> &[u16] {
        &self.ports
    }

    pub fn urls(&self) -> Vec<String> {
        self.ports
            .iter()
            .map(|port| format!("redis://127.0.0.1:{port}"))
            .collect()
    }

    /// Sends a command to the Sentinel with this index.
    pub fn ask(&self, number: usize, words: &[&str]) -> String {
        ask(self.ports[number], words).unwrap_or_else(|| panic!("no reply to {words:?}"))
    }

    /// Pauses a Sentinel's process. The Sentinel is still killed at the end of the test.
    pub fn pause(&self, number: usize) {
        let id = self.children[number].id().to_string();
        let status = Command::new("kill").args(["-STOP", &id]).status();
        assert!(status.unwrap().success());
    }

    /// Returns the number of connections that the Sentinel with this index has accepted.
    pub fn connections(&self, number: usize) -> u64 {
        let info = self.ask(number, &["INFO", "stats"]);
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().trim().parse().unwrap()
    }

    /// Returns the port of the primary, as the first Sentinel reports it.
    pub fn named(&self) -> Option<u16> {
        let info = ask(self.ports[0], &["INFO", "sentinel"])?;
        let line = info.lines().find(|line| line.contains(PRIMARY))?;
        let address = line.split("address=").nth(1)?.split(',').next()?;
        address.rsplit_once(':')?.1.parse().ok()
    }

    fn wait_until_connected_to_each_other(&self) {
        for port in &self.ports {
            eventually("the Sentinels know each other and the replica", || {
                let info = ask(*port, &["INFO", "sentinel"])?;
                (info.contains("slaves=1,sentinels=3") && info.contains("status=ok")).then_some(())
            });
        }
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn sentinel(port: u16, primary: u16, scratch: &Scratch) -> Child {
    // A Sentinel rewrites its configuration file, so each Sentinel has its own file.
    let file = scratch.path().join(format!("sentinel-{port}.conf"));
    let text = format!(
        "port {port}\nbind 127.0.0.1\nsentinel monitor {PRIMARY} 127.0.0.1 {primary} 2\n\
         sentinel down-after-milliseconds {PRIMARY} 500\nsentinel failover-timeout {PRIMARY} 3000\n"
    );
    fs::write(&file, text).unwrap();
    Command::new(SERVER)
        .arg(&file)
        .arg("--sentinel")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {SERVER}: {error}; run scripts/setup"))
}
