//! Tests of the connections that are open during an upgrade.

use super::{FIVE_AN_HOUR, upgrade};
use crate::{http_client::Client, support::Server};

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
