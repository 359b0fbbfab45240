//! A Redis server for tests.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpStream},
    process::{Child, Command, Stdio},
};

use super::{SERVER, Scratch, TIMEOUT, eventually, reserve_port};

/// A Redis server, which is killed at the end of the test.
#[derive(Debug)]
pub struct RedisServer {
    child: Child,
    program: &'static str,
    port: u16,
    options: Vec<String>,
    scratch: Scratch,
}

impl RedisServer {
    /// Starts a server that stores nothing on disk.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a Valkey server that stores nothing on disk.
    pub fn start_valkey() -> Self {
        Self::run("valkey-server", reserve_port(), Vec::new())
    }

    /// Starts a server with further `options`, such as `["--requirepass", "secret"]`.
    pub fn start_with(options: &[&str]) -> Self {
        Self::start_on(reserve_port(), options)
    }

    /// Starts a server on this port.
    pub fn start_on(port: u16, options: &[&str]) -> Self {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        Self::run(SERVER, port, options)
    }

    /// Starts a node in cluster mode that has not joined a cluster yet, with additional `options`.
    /// `program` is `redis-server` or `valkey-server`.
    pub fn node(program: &'static str, options: &[&str]) -> Self {
        Self::node_with(program, |_| {
            options.iter().map(|option| (*option).to_owned()).collect()
        })
    }

    /// Works like [`Self::node`], with options that depend on the port of the cluster bus.
    pub fn node_with(program: &'static str, options: impl Fn(u16) -> Vec<String>) -> Self {
        // By default, the cluster bus uses the server's port plus 10,000.
        let bus = reserve_port();
        let clustered = ["--cluster-enabled", "yes", "--cluster-port"].map(str::to_owned);
        let clustered = clustered.into_iter().chain([bus.to_string()]);
        let options = clustered.chain(options(bus)).collect();
        Self::run(program, reserve_port(), options)
    }

    /// Starts a cluster of one node that owns all slots. The node refuses calls with keys in
    /// different slots, as every cluster does.
    pub fn slotted(program: &'static str) -> Self {
        let server = Self::node(program, &[]);
        assert_eq!(
            server.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]),
            "+OK"
        );
        eventually("the node serves all slots", || {
            let info = ask(server.port, &["CLUSTER", "INFO"])?;
            info.contains("cluster_state:ok").then_some(())
        });
        server
    }

    fn run(program: &'static str, port: u16, options: Vec<String>) -> Self {
        let scratch = Scratch::new();
        let child = spawn(program, port, &options, &scratch);
        let mut server = Self {
            child,
            program,
            port,
            options,
            scratch,
        };
        assert!(
            server.wait_until_it_answers(),
            "{program} exited at once on port {port}"
        );
        server
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Kills the server without a graceful shutdown.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts the server again on its port, with the data that it has stored on disk.
    pub fn restart(&mut self) {
        self.child = spawn(self.program, self.port, &self.options, &self.scratch);
        assert!(
            self.wait_until_it_answers(),
            "{} exited at once on port {}",
            self.program,
            self.port
        );
    }

    /// Pauses the process: its connections stay open, but it does not reply to requests.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    pub fn resume(&self) {
        self.signal("CONT");
    }

    /// Sends a command and returns the reply. The reply is returned in protocol form, such as `+OK`
    /// or `:3`. For a bulk string, only its content is returned.
    pub fn ask(&self, words: &[&str]) -> String {
        ask(self.port, words).unwrap_or_else(|| panic!("no reply to {words:?}"))
    }

    /// Waits until the server replies; returns false if the server has exited.
    fn wait_until_it_answers(&mut self) -> bool {
        eventually("Redis answers", || {
            if self.child.try_wait().unwrap().is_some() {
                return Some(false);
            }
            let answer = ask(self.port, &["PING"])?;
            // An error that asks for a password also shows that the server is ready.
            (answer == "+PONG" || answer.starts_with("-NOAUTH") || answer.starts_with("-DENIED"))
                .then_some(true)
        })
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status();
        assert!(status.unwrap().success());
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // `kill` fails if the test has already killed the server.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(program: &str, port: u16, options: &[String], scratch: &Scratch) -> Child {
    Command::new(program)
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .args([
            "--dir",
            scratch.path().to_str().unwrap(),
            "--daemonize",
            "no",
        ])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {program}: {error}; run scripts/setup"))
}

/// Sends a command to the server on `port`; `None` if there is no reply.
pub(super) fn ask(port: u16, words: &[&str]) -> Option<String> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    let mut question = format!("*{}\r\n", words.len());
    for word in words {
        question.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    (&stream).write_all(question.as_bytes()).ok()?;
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let line = line.trim_end();
    let Some(length) = line
        .strip_prefix('$')
        .and_then(|length| length.parse::<usize>().ok())
    else {
        return (!line.is_empty()).then(|| line.to_owned());
    };
    let mut text = vec![0; length];
    reader.read_exact(&mut text).ok()?;
    String::from_utf8(text).ok()
}
