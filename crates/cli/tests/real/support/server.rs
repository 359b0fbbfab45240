//! `tidegate serve` on ephemeral ports.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use serde_json::Value;

use super::{Answer, Ask, Process, Scratch};

/// All listeners on ephemeral ports.
pub(crate) const EVERY_LISTENER: &str = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', resp: '127.0.0.1:0', admin: '127.0.0.1:0'}\n";

/// A running server and its working directory.
#[derive(Debug)]
pub(crate) struct Server {
    process: Process,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) resp: SocketAddr,
    pub(crate) admin: SocketAddr,
    scratch: Scratch,
}

impl Server {
    /// Starts a server with all listeners and these rules.
    pub(crate) fn start(rules: &str) -> Self {
        Self::start_in(Scratch::new(), &format!("{EVERY_LISTENER}{rules}"))
    }

    /// Starts a server with this configuration in this directory.
    pub(crate) fn start_in(scratch: Scratch, config: &str) -> Self {
        Self::start_with(scratch, config, &[])
    }

    /// Starts a server with this configuration in this directory, and with these environment
    /// variables.
    pub(crate) fn start_with(scratch: Scratch, config: &str, variables: &[(&str, String)]) -> Self {
        let mut command = tidegate(&["serve", "--config", "rules.yaml"]);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Self::start_command(scratch, config, command)
    }

    /// Starts a server like [`Self::start_with`], from another path of the program.
    pub(crate) fn start_program(
        scratch: Scratch,
        program: &Path,
        config: &str,
        variables: &[(&str, String)],
    ) -> Self {
        let mut command = Command::new(program);
        command.args(["serve", "--config", "rules.yaml"]);
        command.env("NO_COLOR", "1").env_remove("TIDEGATE_LOG");
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Self::start_command(scratch, config, command)
    }

    fn start_command(scratch: Scratch, config: &str, mut command: Command) -> Self {
        scratch.write("rules.yaml", config);
        let mut process = Process::start(command.current_dir(scratch.path()));
        let [http, grpc, resp, admin] =
            ["http", "grpc", "resp", "admin"].map(|listener| address(&mut process, listener));
        Self {
            process,
            http,
            grpc,
            resp,
            admin,
            scratch,
        }
    }

    /// Starts a server with the README's quickstart file.
    pub(crate) fn quickstart() -> Self {
        Self::example("quickstart.yaml")
    }

    /// Starts a server with the rules in `file` of the examples, on free ports.
    pub(crate) fn example(file: &str) -> Self {
        let file = repository().join("examples").join(file);
        let text = std::fs::read_to_string(file).unwrap();
        let ports = [":8080", ":8081", ":6380", ":8082"];
        let free = ports
            .iter()
            .fold(text, |text, port| text.replacen(port, ":0", 1));
        Self::start_in(Scratch::new(), &free)
    }

    /// Returns the address of the reverse proxy.
    pub(crate) fn proxy(&self) -> SocketAddr {
        self.optional("\"proxy\"")
    }

    /// Returns the address of the SPOP listener.
    pub(crate) fn spop(&self) -> SocketAddr {
        self.optional("\"spop\"")
    }

    /// Returns the address of an optional listener. `name` is the listener's name in quotes, as in
    /// the log.
    fn optional(&self, name: &str) -> SocketAddr {
        let log = self.log_text();
        let mut lines = log.lines();
        let line = lines.find(|line| line.contains("listening") && line.contains(name));
        address_in(line.unwrap_or_else(|| panic!("no {name} in: {log}")))
    }

    /// Sends a request to `/v1/check`.
    pub(crate) fn check(&self, entries: &Value) -> Answer {
        let body = serde_json::json!({ "entries": entries });
        Ask::new("POST", self.http, "/v1/check").body(&body).send()
    }

    /// Returns the Prometheus metrics.
    pub(crate) fn metrics(&self) -> String {
        Ask::get(self.admin, "/metrics").send().body
    }

    /// Runs `tidegate` against this server's admin listener.
    pub(crate) fn operate(&self, args: &[&str]) -> std::process::Output {
        super::run(tidegate(args).env("TIDEGATE_ADMIN", self.admin.to_string()))
    }

    pub(crate) fn rules_file(&self) -> PathBuf {
        self.scratch.join("rules.yaml")
    }

    pub(crate) fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the server's peak resident memory, in bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.process.peak_bytes()
    }

    pub(crate) fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// Limits the server's number of open files to `most`.
    pub(crate) fn limit_files(&self, most: u32) {
        self.process.limit_files(most);
    }

    /// Returns the log lines that have been read so far.
    pub(crate) fn log_text(&self) -> String {
        self.process.log_text()
    }

    pub(crate) fn wait_for(&mut self, words: &[&str]) -> String {
        self.process.wait_for(words)
    }

    /// Returns the last line that has been read so far and contains all of `words`.
    pub(crate) fn line_with(&self, words: &[&str]) -> Option<String> {
        let log = self.log_text();
        let mut lines = log.lines();
        let line = lines.rfind(|line| words.iter().all(|word| line.contains(word)));
        line.map(str::to_owned)
    }

    /// Returns whether any line that has been read so far contains all of `words`.
    pub(crate) fn has_logged(&self, words: &[&str]) -> bool {
        self.process.has_logged(words)
    }

    /// Returns whether the first server process has ended. After an upgrade, another one serves.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.has_ended()
    }

    /// Waits until the server process has exited. The server's directory is kept.
    pub(crate) fn wait(self) -> (ExitStatus, Vec<String>, Scratch) {
        let Self {
            mut process,
            scratch,
            ..
        } = self;
        let (status, log) = process.wait();
        (status, log, scratch)
    }

    /// Stops the server with SIGTERM, as an operator would.
    pub(crate) fn stop(self) -> Scratch {
        self.signal("TERM");
        let (status, log, scratch) = self.wait();
        assert!(status.success(), "{status}:\n{}", log.join("\n"));
        scratch
    }
}

fn address(process: &mut Process, listener: &str) -> SocketAddr {
    address_in(&process.wait_for(&["listening", &format!("listener=\"{listener}\"")]))
}

fn address_in(line: &str) -> SocketAddr {
    let line = line.replace('"', "");
    let address = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("address="));
    address
        .unwrap_or_else(|| panic!("no address in: {line}"))
        .parse()
        .unwrap()
}

/// Returns a command for the built binary, without environment variables that would change its
/// behaviour.
pub(crate) fn tidegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(args)
        .env("NO_COLOR", "1")
        .env_remove("TIDEGATE_LOG")
        .env_remove("TIDEGATE_ADMIN")
        .env_remove("TIDEGATE_ADMIN_TOKEN");
    command
}

/// Returns the root of the repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}
