//! Tests of upgrades that fail: the old process continues to serve with its whole state.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{
    FIVE_AN_HOUR, NewProcess, ServiceManager,
    tls::{TlsClient, assert_admitted, check, directory_with_certificates, tls_config},
    upgrade, wait_for_new_process,
};
use crate::{
    http_client::Client,
    support::{EVERY_LISTENER, Scratch, Server, tidegate, tool},
};

/// A program that implements the protocol of an upgrade, and fails in the way that its variable
/// `FAILURE` specifies.
const STAND_IN: &str = "
import os, signal, socket, sys

HELLO, LISTENER, START, PREPARED, FAILED, CONNECTION, STATE, END, RESTORED = range(1, 10)
channel = socket.socket(fileno=0)

def send(kind, body=b''):
    channel.sendall(b'Tg' + bytes([kind, 0]) + len(body).to_bytes(4, 'little') + body)

def read(length):
    data = b''
    while len(data) < length:
        data += channel.recv(length - len(data)) or sys.exit('the old process has ended')
    return data

def receive():
    # Sockets that are not received are closed.
    header = read(8)
    return header[2], read(int.from_bytes(header[4:], 'little'))

def receive_until(last):
    kinds = []
    while kinds[-1:] != [last]:
        kinds.append(receive()[0])
    return kinds

receive_until(START)
if FAILURE == 'is slow':
    signal.pause()
send(PREPARED)
kinds = receive_until(END)
if CONNECTION in kinds and STATE in kinds:
    print('stand-in: received connections and state', file=sys.stderr)
if FAILURE == 'reports':
    send(FAILED, b'no more memory')
elif FAILURE == 'ends':
    sys.exit(7)
elif FAILURE == 'receives no commit':
    # From now on, the old process cannot send.
    channel.shutdown(socket.SHUT_RD)
    send(RESTORED)
signal.pause()
";

/// A path at which a test replaces the program of the server.
struct ReplaceableProgram(PathBuf);

impl ReplaceableProgram {
    fn in_directory(scratch: &Scratch) -> Self {
        let replaceable = Self(scratch.join("tidegate"));
        replaceable.link_real();
        replaceable
    }

    fn link_real(&self) {
        let real = tidegate(&[]);
        symlink(real.get_program(), &self.0).unwrap();
    }

    fn remove(&self) {
        std::fs::remove_file(&self.0).unwrap();
    }

    fn replace(&self, script: &str) {
        self.remove();
        std::fs::write(&self.0, script).unwrap();
        std::fs::set_permissions(&self.0, PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Replaces the program by a stand-in whose variable `FAILURE` is `failure`.
    fn replace_by_stand_in(&self, failure: &str) {
        let python = tool("python3");
        let script = format!("#!{}\nFAILURE = '{failure}'\n{STAND_IN}", python.display());
        self.replace(&script);
    }

    fn restore(&self) {
        self.remove();
        self.link_real();
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

fn start() -> (Server, ReplaceableProgram) {
    let scratch = Scratch::new();
    let program = ReplaceableProgram::in_directory(&scratch);
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let server = Server::start_program(scratch, program.path(), &config, &[]);
    (server, program)
}

fn remaining(server: &Server, user: &str) -> u64 {
    let answer = server.check(&json!({ "user": user })).json();
    answer["remaining"].as_u64().unwrap()
}

fn set_override(server: &Server, user: &str, limit: &str) {
    let set = server.operate(&["override", "api", user, "--limit", limit]);
    assert!(set.status.success(), "{set:?}");
}

#[test]
fn a_failed_upgrade_changes_nothing() {
    let (mut server, program) = start();
    let mut keep = TcpStream::connect(server.resp).unwrap();
    assert_eq!(remaining(&server, "u1"), 4);

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

    program.replace("#!/bin/sh\nexit 3\n");
    server.signal("USR2");
    server.wait_for(&["upgrade failed", "the new process ended (exit status: 3)"]);

    program.remove();
    server.signal("USR2");
    server.wait_for(&[
        "upgrade failed",
        "cannot start ",
        "check that the program exists",
    ]);

    let failed = "tidegate_upgrades_total{result=\"failed\"} 3";
    assert!(server.metrics().contains(failed));
    assert_eq!(remaining(&server, "u1"), 3);
    keep.write_all(b"PING\r\n").unwrap();
    keep.read_exact(&mut [0; 7]).unwrap();

    program.link_real();
    let _new = upgrade(&mut server);
    assert_eq!(remaining(&server, "u1"), 2);
}

/// Lets the new process fail after it has received the connections and the state, and checks that
/// the old process continues to serve. `failure` is the kind of failure, and `said` is the expected
/// log message.
fn assert_failure_after_state(failure: &str, said: &str) {
    let (mut server, program) = start();
    let mut open = Client::connect(server.http);
    let body = r#"{"entries": {"user": "open"}}"#;
    let check = |open: &mut Client| open.ask("POST", "/v1/check", &[], body.as_bytes()).json();
    assert_eq!(check(&mut open)["remaining"], 4);
    assert_eq!(remaining(&server, "counted"), 4);
    set_override(&server, "raised", "10/h");

    program.replace_by_stand_in(failure);
    server.signal("USR2");
    server.wait_for(&["stand-in: received connections and state"]);
    server.wait_for(&["upgrade failed, so this process continues to serve", said]);
    assert_eq!(remaining(&server, "counted"), 3);
    assert_eq!(remaining(&server, "raised"), 9);
    assert_eq!(check(&mut open)["remaining"], 3);
    set_override(&server, "counted", "20/h");
    assert_eq!(remaining(&server, "counted"), 17);

    program.restore();
    let _new = upgrade(&mut server);
    assert_eq!(remaining(&server, "counted"), 16);
    assert_eq!(remaining(&server, "raised"), 8);
    assert_eq!(check(&mut open)["remaining"], 2);
}

#[test]
fn the_old_process_continues_if_the_new_one_reports_a_failure() {
    assert_failure_after_state("reports", "the new process reported: no more memory");
}

#[test]
fn the_old_process_continues_if_the_new_one_ends() {
    assert_failure_after_state("ends", "the new process ended (exit status: 7)");
}

#[test]
fn the_old_process_continues_if_the_new_one_does_not_reply() {
    assert_failure_after_state("is silent", "the other process sent nothing for 10s");
}

/// The service manager must not watch a process that never serves.
#[test]
fn the_service_manager_keeps_the_old_process_if_the_commit_fails() {
    let scratch = Scratch::new();
    let manager = ServiceManager::in_directory(&scratch);
    let program = ReplaceableProgram::in_directory(&scratch);
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let variables = [manager.variable()];
    let mut server = Server::start_program(scratch, program.path(), &config, &variables);
    assert_eq!(manager.receive(), "READY=1\n");
    program.replace_by_stand_in("receives no commit");
    server.signal("USR2");
    server.wait_for(&[
        "upgrade failed",
        "Broken pipe",
        "the new process was stopped",
    ]);
    assert_eq!(remaining(&server, "u1"), 4);
    server.signal("TERM");
    assert_eq!(manager.receive(), "STOPPING=1\n");
}

/// The old process relays the connections to itself. Relayed connections can move again.
#[test]
fn connections_with_tls_are_served_after_a_failed_upgrade() {
    let scratch = directory_with_certificates();
    let program = ReplaceableProgram::in_directory(&scratch);
    let config = tls_config(FIVE_AN_HOUR);
    let mut server = Server::start_program(scratch, program.path(), &config, &[]);
    let mut http = TlsClient::connect(&server, server.http);
    assert_admitted(&check(&mut http).0, 4);
    let mut redis = TlsClient::connect(&server, server.resp);
    redis.end_handshake();
    program.replace_by_stand_in("reports");
    server.signal("USR2");
    server.wait_for(&["upgrade failed, so this process continues to serve"]);
    let (response, closes) = check(&mut http);
    assert_admitted(&response, 3);
    assert!(closes, "{response}");
    assert_eq!(http.read_until_closed(), "");
    let check = "TIDEGATE.CHECK user u1\r\n";
    redis.send(check);
    redis.read_until("\r\n:5\r\n:2\r\n");
    program.restore();
    let _new = upgrade(&mut server);
    redis.send(check);
    redis.read_until("\r\n:5\r\n:1\r\n");
}

#[test]
fn a_second_signal_during_an_upgrade_is_ignored() {
    let (mut server, program) = start();
    program.replace_by_stand_in("is slow");
    server.signal("USR2");
    let slow: NewProcess = wait_for_new_process(&mut server);
    server.signal("USR2");
    server.wait_for(&["WARN", "SIGUSR2 ignored: an upgrade is already in progress"]);
    assert_eq!(remaining(&server, "u1"), 4);
    slow.signal("TERM");
    server.wait_for(&["upgrade failed", "the new process ended (signal: 15"]);
    assert_eq!(remaining(&server, "u1"), 3);
    let failed = "tidegate_upgrades_total{result=\"failed\"} 1";
    assert!(server.metrics().contains(failed));
}
