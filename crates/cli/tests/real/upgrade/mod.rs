//! Tests of upgrades without a gap: a new process takes over from a running server.

mod connections;
mod failures;
mod http2;
mod tls;

use std::{
    net::TcpStream,
    os::unix::net::UnixDatagram,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::json;

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server, assert_script_passes, run, tidegate};

const FIVE_AN_HOUR: &str =
    "rules: [{name: api, key: [user], limits: [5/h], algorithm: fixed_window}]\n";

/// Requests in progress are decided before the state moves, however slow the machine is.
const PATIENT: &str = "shutdown: {drain: 1min, handover: 1min}\n";

/// The new process of an upgrade. Dropping this value stops the process.
struct NewProcess(u32);

impl NewProcess {
    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0);
        let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(status.success(), "the new process has ended");
    }
}

impl Drop for NewProcess {
    fn drop(&mut self) {
        let kill = format!("kill -TERM {}", self.0);
        let mut command = Command::new("sh");
        command.args(["-c", &kill]).stderr(Stdio::null());
        let _ = command.status();
    }
}

/// Upgrades `server`, and returns the new process when it serves.
fn upgrade(server: &mut Server) -> NewProcess {
    server.signal("USR2");
    wait_for_takeover(server)
}

/// Waits until the new process has been started, and returns it. The new process may still fail.
fn wait_for_new_process(server: &mut Server) -> NewProcess {
    let line = server.wait_for(&["upgrade: the new process starts"]);
    let process = line.split("process=").nth(1).unwrap();
    let process = process.split_whitespace().next().unwrap();
    NewProcess(process.parse().unwrap())
}

fn wait_for_takeover(server: &mut Server) -> NewProcess {
    let process = wait_for_new_process(server);
    server.wait_for(&["this process has taken over from the old process"]);
    process
}

#[test]
fn two_upgrades_under_load_lose_no_request_and_no_charge() {
    load(&[]);
}

#[test]
fn two_upgrades_with_redis_lose_no_request_and_no_charge() {
    load(&["--redis"]);
}

/// A TLS handshake for each new connection takes time, so the rate is lower.
#[test]
fn two_upgrades_with_tls_lose_no_request_and_no_charge() {
    load(&["--tls", "--rate", "500"]);
}

/// Runs `scripts/upgrade/run` briefly, with further `options`. On a busy machine, the clients may
/// not reach the rate and not exhaust the limits, so a small part of both is sufficient. The quota
/// must be exhausted exactly.
fn load(options: &[&str]) {
    let brief = "--upgrades 2 --pause 0.3 --rate 1500 --quota 200";
    let brief = brief
        .split(' ')
        .chain(["--least-rate", "1", "--least", "1"]);
    let options: Vec<&str> = brief.chain(options.iter().copied()).collect();
    assert_script_passes("scripts/upgrade/run", &options);
}

/// Counters, blocks, overrides and reservations move with the memory store, without a snapshot.
#[test]
fn the_state_of_the_memory_store_moves() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let reserve = |server: &Server, user: &str, cost: u64| {
        let body = json!({"entries": {"user": user}, "cost": cost});
        Ask::new("POST", server.http, "/v1/reserve")
            .body(&body)
            .send()
            .json()
    };
    let remaining = |server: &Server, user: &str| {
        server.check(&json!({ "user": user })).json()["remaining"].clone()
    };
    assert_eq!(remaining(&server, "counted"), json!(4));
    let reserved = reserve(&server, "reserved", 4);
    let block = server.operate(&["block", "api", "blocked", "--for", "1h"]);
    assert!(block.status.success(), "{block:?}");
    let entry = ["block", "--entry", "user=network", "--for", "1h"];
    let block = server.operate(&[&entry[..], &["--reason", "abuse"]].concat());
    assert!(block.status.success(), "{block:?}");
    let set = ["override", "api", "raised", "--limit", "10/h"];
    let set = server.operate(&set);
    assert!(set.status.success(), "{set:?}");

    let new = upgrade(&mut server);
    assert_eq!(remaining(&server, "counted"), json!(3));
    assert_eq!(remaining(&server, "raised"), json!(9));
    for user in ["blocked", "network"] {
        assert_eq!(server.check(&json!({ "user": user })).status, 429);
    }
    let blocks = server.operate(&["blocks", "--search", "network"]);
    assert!(String::from_utf8_lossy(&blocks.stdout).contains("abuse"));
    let body = json!({"reservation": reserved["reservation"], "cost": 1});
    let settled = Ask::new("POST", server.http, "/v1/settle")
        .body(&body)
        .send();
    assert_eq!(settled.status, 200, "{}", settled.body);
    assert_eq!(settled.json()["released"], json!(3));
    assert_eq!(remaining(&server, "reserved"), json!(3));
    assert!(
        server
            .metrics()
            .contains("tidegate_upgrades_total{result=\"ok\"} 1")
    );
    new.signal("TERM");
    let (status, log, _) = server.wait();
    assert!(status.success(), "{status}:\n{}", log.join("\n"));
}

/// A process that has taken over can itself be upgraded. The current overrides of the process move.
#[test]
fn a_second_upgrade_moves_later_changes() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let remaining = |server: &Server, user: &str| {
        server.check(&json!({ "user": user })).json()["remaining"].clone()
    };
    let operate = |server: &Server, arguments: &[&str]| {
        let output = server.operate(arguments);
        assert!(output.status.success(), "{output:?}");
    };
    for user in ["changed", "removed"] {
        operate(&server, &["override", "api", user, "--limit", "10/h"]);
        assert_eq!(remaining(&server, user), json!(9));
    }
    let first = upgrade(&mut server);
    operate(&server, &["override", "api", "changed", "--limit", "20/h"]);
    operate(&server, &["override", "api", "removed", "--remove"]);
    operate(&server, &["override", "api", "added", "--limit", "30/h"]);
    first.signal("USR2");
    let _second = wait_for_takeover(&mut server);
    assert_eq!(remaining(&server, "changed"), json!(18));
    assert_eq!(remaining(&server, "removed"), json!(3));
    assert_eq!(remaining(&server, "added"), json!(29));
}

/// A listener that the new configuration adds is bound by the new process.
#[test]
fn an_upgrade_applies_settings_that_need_a_restart() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let rules = server.rules_file();
    let changed = std::fs::read_to_string(&rules).unwrap();
    let changed = changed.replacen("listen: {", "listen: {metrics: '127.0.0.1:0', ", 1);
    let changed = changed.replacen("resp: '127.0.0.1:0'", "resp: off", 1);
    std::fs::write(&rules, changed).unwrap();
    let resp = server.resp;
    let _new = upgrade(&mut server);
    let line = server.line_with(&["listening", "\"metrics\""]);
    assert!(line.is_some(), "{}", server.log_text());
    crate::servers::eventually("the old listener is closed", || {
        TcpStream::connect(resp).is_err().then_some(())
    });
}

/// A service manager, which receives the notifications of a server.
struct ServiceManager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl ServiceManager {
    fn in_directory(scratch: &Scratch) -> Self {
        let path = scratch.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let timeout = Duration::from_secs(30);
        socket.set_read_timeout(Some(timeout)).unwrap();
        Self { socket, path }
    }

    /// Returns the environment variable that the server needs.
    fn variable(&self) -> (&'static str, String) {
        ("NOTIFY_SOCKET", self.path.display().to_string())
    }

    /// Returns the next notification.
    fn receive(&self) -> String {
        let mut buffer = [0; 4_096];
        let length = self.socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

#[test]
fn the_service_manager_learns_the_new_main_process() {
    let scratch = Scratch::new();
    let manager = ServiceManager::in_directory(&scratch);
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let mut server = Server::start_with(scratch, &config, &[manager.variable()]);
    assert_eq!(manager.receive(), "READY=1\n");
    let new = upgrade(&mut server);
    assert_eq!(manager.receive(), format!("MAINPID={}\n", new.0));
    assert_eq!(manager.receive(), "READY=1\n");
    new.signal("TERM");
    assert_eq!(manager.receive(), "STOPPING=1\n");
}

/// Starts the program with a Unix socket as its standard input. The program `argv[1]` says who has
/// created the socket, and what it sends.
const PASS_SOCKET: &str = "
import os, socket, sys
ours, theirs = socket.socketpair()
if sys.argv[1] == 'grandparent' and (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if child := os.fork():
    theirs.close()
    ours.send(b'GET / HTTP/1.1\\r\\n\\r\\n')
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.dup2(theirs.fileno(), 0)
os.environ['TIDEGATE_UPGRADE'] = '1'
os.execv(sys.argv[2], sys.argv[2:])
";

#[test]
fn sockets_of_an_unknown_process_are_refused() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", EVERY_LISTENER);
    let server = tidegate(&["serve", "--config", "rules.yaml"]);
    for (creator, said) in [
        ("grandparent", "sockets of unknown processes are not used"),
        (
            "parent",
            "received bytes that are not a message of an upgrade",
        ),
    ] {
        let mut command = Command::new("python3");
        command.args(["-c", PASS_SOCKET, creator]);
        command.arg(server.get_program()).args(server.get_args());
        let output = run(command.current_dir(scratch.path()));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(said), "{error}");
    }
    let mut alone = tidegate(&["serve", "--config", "rules.yaml"]);
    alone.env("TIDEGATE_UPGRADE", "1");
    let output = run(alone.current_dir(scratch.path()));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("standard input is not a Unix socket"),
        "{error}"
    );
}
