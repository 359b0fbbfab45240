//! Tests of upgrades without a gap: a new process takes over from a running server.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::{fs::symlink, net::UnixDatagram},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::json;

use crate::{
    http_client::Client,
    support::{Ask, EVERY_LISTENER, Scratch, Server, repository, run, tidegate},
};

const FIVE_AN_HOUR: &str =
    "rules: [{name: api, key: [user], limits: [5/h], algorithm: fixed_window}]\n";

/// The new process of an upgrade. It is stopped when the test ends.
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
    taken_over(server)
}

fn taken_over(server: &mut Server) -> NewProcess {
    let line = server.wait_for(&["upgrade: the new process starts"]);
    let process = line.split("process=").nth(1).unwrap();
    let process = process.split_whitespace().next().unwrap();
    let process = NewProcess(process.parse().unwrap());
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

/// Runs `scripts/upgrade/run` briefly. On a busy machine, the requests may not exhaust the limits,
/// so it is sufficient if some requests are admitted. The quota must be exhausted exactly.
fn load(store: &[&str]) {
    let program = tidegate(&[]);
    let mut script = Command::new("python3");
    script
        .args(["-B", "scripts/upgrade/run", "--binary"])
        .arg(program.get_program())
        .args("--upgrades 2 --pause 0.3 --rate 1500 --quota 200 --least 1".split(' '))
        .args(store)
        .current_dir(repository());
    let output = run(&mut script);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && printed.ends_with("\npassed\n"),
        "{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
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

/// The connections stay open, with the bytes that were sent before the upgrade.
#[test]
fn open_connections_move_with_their_state() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let mut resp = Client::connect(server.resp);
    // The last command is incomplete, and is part of a transaction.
    resp.send("CLIENT SETNAME worker\r\nMULTI\r\nTIDEGATE.CHECK user u1\r\nTIDEGATE.CHE");
    resp.read_until("+QUEUED\r\n");
    let mut http = Client::connect(server.http);
    let body = r#"{"entries": {"user": "u1"}}"#;
    let check = |http: &mut Client| http.ask("POST", "/v1/check", &[], body.as_bytes());
    assert_eq!(check(&mut http).json()["remaining"], 4);
    let (begun, rest) = "GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n".split_at(9);
    http.send(begun);
    let silent = Client::connect(server.http);
    let _new = upgrade(&mut server);
    resp.send("CK user u1\r\nEXEC\r\n");
    let replies = resp.read_until("*2\r\n*6\r\n:1\r\n$3\r\napi\r\n:5\r\n:3\r\n");
    assert!(replies.starts_with("+QUEUED\r\n"), "{replies}");
    resp.send("CLIENT GETNAME\r\n");
    resp.read_until("$6\r\nworker\r\n");
    http.send(rest);
    assert_eq!(http.read_answer(false).status, 404);
    assert_eq!(check(&mut http).json()["remaining"], 1);
    let mut silent = silent;
    assert_eq!(check(&mut silent).json()["remaining"], 0);
}

#[test]
fn a_failed_upgrade_changes_nothing() {
    let scratch = Scratch::new();
    let program = scratch.join("tidegate");
    let real = tidegate(&[]);
    symlink(real.get_program(), &program).unwrap();
    let mut server = Server::start_program(scratch, &program, FIVE_AN_HOUR);
    let mut keep = TcpStream::connect(server.resp).unwrap();
    assert_eq!(server.check(&json!({"user": "u1"})).json()["remaining"], 4);

    let rules = server.rules_file();
    let valid = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(&rules, "rules: [{name: api, kye: [user], limits: [9/h]}]\n").unwrap();
    server.signal("USR2");
    server.wait_for(&[
        "ERROR",
        "upgrade failed, so this process continues to serve",
        "the new process reported: rules.yaml",
    ]);
    std::fs::write(&rules, &valid).unwrap();

    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, "#!/bin/sh\nexit 3\n").unwrap();
    let executable = Command::new("chmod").arg("+x").arg(&program).status();
    assert!(executable.unwrap().success());
    server.signal("USR2");
    server.wait_for(&["upgrade failed", "the new process ended (exit status: 3)"]);

    std::fs::remove_file(&program).unwrap();
    server.signal("USR2");
    server.wait_for(&[
        "upgrade failed",
        "cannot start ",
        "check that the program exists",
    ]);

    let failed = "tidegate_upgrades_total{result=\"failed\"} 3";
    assert!(server.metrics().contains(failed));
    assert_eq!(server.check(&json!({"user": "u1"})).json()["remaining"], 3);
    keep.write_all(b"PING\r\n").unwrap();
    keep.read_exact(&mut [0; 7]).unwrap();

    symlink(real.get_program(), &program).unwrap();
    let _new = upgrade(&mut server);
    assert_eq!(server.check(&json!({"user": "u1"})).json()["remaining"], 2);
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

#[test]
fn the_service_manager_learns_the_new_main_process() {
    let scratch = Scratch::new();
    let path = scratch.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let received = || {
        let mut buffer = [0; 4_096];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let variable = ("NOTIFY_SOCKET", path.display().to_string());
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let mut server = Server::start_with(scratch, &config, &[variable]);
    assert_eq!(received(), "READY=1\n");
    let new = upgrade(&mut server);
    assert_eq!(received(), format!("MAINPID={}\n", new.0));
    assert_eq!(received(), "READY=1\n");
    new.signal("TERM");
    assert_eq!(received(), "STOPPING=1\n");
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
