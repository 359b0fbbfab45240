//! A real Envoy on ephemeral ports.

use std::{net::SocketAddr, path::PathBuf, process::Command};

use super::{Ask, Process, Scratch, repository, tool};

/// The admin interface setting, which replaces the setting in the bootstrap file. Port 0 selects a
/// free port.
const ADMIN: &str = "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}";

/// A running Envoy with its own directory.
#[derive(Debug)]
pub(crate) struct Envoy {
    admin: SocketAddr,
    _process: Process,
    _scratch: Scratch,
}

impl Envoy {
    /// Starts an Envoy that uses Tidegate's gRPC listener at `tidegate`. `bootstrap` must use the
    /// following ports, which are replaced: 8081 for Tidegate, 8001 for the application, and 8000
    /// and 8002 for Envoy's listeners.
    pub(crate) fn start(bootstrap: &str, tidegate: SocketAddr) -> Self {
        let port = |number: u16| format!("port_value: {number}}}");
        let application = "{pipe: {path: application.sock}}";
        let text = bootstrap
            .replace(
                "{socket_address: {address: 127.0.0.1, port_value: 8001}}",
                application,
            )
            .replace(&port(8000), &port(0))
            .replace(&port(8002), &port(0))
            .replace(&port(8081), &port(tidegate.port()));
        let scratch = Scratch::new();
        scratch.write("envoy.yaml", &text);
        let mut command = Command::new(envoy_program());
        command
            .args(["-c", "envoy.yaml", "--config-yaml", ADMIN])
            .args(["--admin-address-path", "admin.txt", "--concurrency", "1"])
            .args(["--disable-hot-restart", "--log-level", "info"])
            .current_dir(scratch.path());
        let mut process = Process::start(&mut command);
        process.wait_for(&["all dependencies initialized. starting workers"]);
        let admin = std::fs::read_to_string(scratch.join("admin.txt")).unwrap();
        Self {
            admin: admin.trim().parse().unwrap(),
            _process: process,
            _scratch: scratch,
        }
    }

    /// Returns the address of the listener called `name`.
    pub(crate) fn listener(&self, name: &str) -> SocketAddr {
        let list = Ask::get(self.admin, "/listeners").send().body;
        let found = list
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}::")));
        found
            .unwrap_or_else(|| panic!("no listener {name} in:\n{list}"))
            .parse()
            .unwrap()
    }
}

/// Returns the path of the Envoy program that `scripts/setup` has installed, or of the system's
/// Envoy.
pub(crate) fn envoy_program() -> PathBuf {
    let installed = repository().join("target/test-envoy/envoy");
    if installed.exists() {
        installed
    } else {
        tool("envoy")
    }
}
