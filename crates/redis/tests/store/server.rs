//! Real servers, each on a Unix socket in its own directory. The servers are killed at the end of
//! the test.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

/// A running Redis or Valkey server that stores nothing on disk.
pub(crate) struct Server {
    process: Child,
    folder: tempfile::TempDir,
}

impl Server {
    /// Starts a Redis server and a Valkey server.
    pub(crate) fn each() -> [Self; 2] {
        [Self::redis(), Self::valkey()]
    }

    /// Starts a Redis server of the oldest supported version.
    pub(crate) fn redis() -> Self {
        Self::start("redis-server")
    }

    /// Starts a Valkey server.
    pub(crate) fn valkey() -> Self {
        Self::start("valkey-server")
    }

    fn start(program: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(program);
        command.args([
            "--port",
            "0",
            "--save",
            "",
            "--appendonly",
            "no",
            "--unixsocket",
            "socket",
        ]);
        command.current_dir(folder.path()).stdout(Stdio::null());
        let process = command.spawn().unwrap_or_else(|error| {
            panic!("{program}: {error}; run scripts/setup, which installs it")
        });
        let server = Self { process, folder };
        server.wait_until_it_answers(program);
        server
    }

    /// Returns the URL of the server's socket.
    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.socket())
    }

    /// Runs a command, and returns the reply.
    pub(crate) fn command(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-s", &self.socket()])
            .args(arguments)
            .output();
        let output = output.unwrap_or_else(|error| panic!("redis-cli: {error}; run scripts/setup"));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn socket(&self) -> String {
        self.folder.path().join("socket").display().to_string()
    }

    fn wait_until_it_answers(&self, program: &str) {
        for _ in 0..500 {
            if self.command(&["PING"]) == "PONG" {
                return;
            }
            pause(Duration::from_millis(10));
        }
        panic!("{program} does not answer on {}", self.socket());
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a process takes real time to start"
)]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
