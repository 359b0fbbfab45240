//! Tests of the connections that are open during an upgrade.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread::spawn,
    time::Duration,
};

use super::{
    FIVE_AN_HOUR, NewProcess, PATIENT,
    http2::Http2Client,
    tls::{CHECK, TlsClient, assert_admitted, check, directory_with_certificates, tls_config},
    upgrade, wait_for_new_process, wait_for_takeover,
};
use crate::{
    http_client::Client,
    servers::eventually,
    support::{EVERY_LISTENER, Scratch, Server},
};

pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// The response of the gRPC health check: the service is serving.
const SERVING: &[u8] = &[0, 0, 0, 0, 2, 8, 1];

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

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Starts an upstream that responds to each request with `ok`. A request must have no body, or a
/// body that ends with `}`.
pub(super) fn upstream() -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    spawn(move || {
        for stream in socket.incoming().map_while(Result::ok) {
            spawn(move || respond(stream));
        }
    });
    address
}

fn respond(mut stream: TcpStream) {
    let (mut received, mut buffer) = (Vec::new(), [0; 4_096]);
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        received.extend(&buffer[..read]);
        let is_complete = received.ends_with(b"\r\n\r\n") || received.ends_with(b"}");
        if is_complete {
            received.clear();
            stream.write_all(OK).unwrap();
        }
    }
}

pub(super) fn proxy_in_front_of(upstream: SocketAddr) -> String {
    format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'http://{upstream}'}}]}}\n"
    )
}

/// Waits until the old process has ended, so that only the new process can serve.
fn wait_for_old_process(server: &mut Server) {
    eventually("the old process has ended", || {
        server.has_ended().then_some(())
    });
}

/// A client of the SPOP listener.
struct SpopClient<S>(S);

impl<S: Read + Write> SpopClient<S> {
    fn on(stream: S) -> Self {
        let mut client = Self(stream);
        // HAPROXY-HELLO, with the version 2.0, frames of up to 16,380 bytes and no capability.
        let hello =
            b"\x12supported-versions\x08\x032.0\x0emax-frame-size\x03\xfc\xf0\x06\x0ccapabilities\x08\0";
        assert_eq!(client.exchange(1, [0, 0], hello)[0], 101, "AGENT-HELLO");
        client
    }

    /// Sends a NOTIFY frame for the user `u1`, and returns whether the request was allowed.
    fn check(&mut self) -> bool {
        let ack = self.exchange(3, [7, 1], b"\x05check\x01\x04user\x08\x02u1");
        assert_eq!(ack[0], 103, "ACK");
        let name = b"\x07allowed";
        let at = ack.windows(name.len()).position(|bytes| bytes == name);
        // The value of the variable: the type boolean, and the flag for true.
        ack[at.unwrap() + name.len()] == 0x11
    }

    fn exchange(&mut self, kind: u8, ids: [u8; 2], payload: &[u8]) -> Vec<u8> {
        let frame = [&[kind, 0, 0, 0, 1], &ids[..], payload].concat();
        let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
        self.0.write_all(&[&length[..], &frame].concat()).unwrap();
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        self.0.read_exact(&mut frame).unwrap();
        frame
    }
}

#[test]
fn idle_connections_of_the_proxy_and_of_spop_and_admin_move() {
    let listen = EVERY_LISTENER.replace("admin:", "spop: '127.0.0.1:0', admin:");
    let proxy = proxy_in_front_of(upstream());
    let config = format!("{listen}{proxy}{FIVE_AN_HOUR}");
    let mut server = Server::start_in(Scratch::new(), &config);
    let mut proxy = Client::connect(server.proxy());
    let mut silent = Client::connect(server.proxy());
    let spop = TcpStream::connect(server.spop()).unwrap();
    spop.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut spop = SpopClient::on(spop);
    let mut admin = Client::connect(server.admin);
    let get = |client: &mut Client, path: &str| client.ask("GET", path, &[], b"");
    assert_eq!(get(&mut proxy, "/").body, "ok");
    assert!(spop.check());
    assert_eq!(get(&mut admin, "/readyz").status, 200);
    let _new = upgrade(&mut server);
    wait_for_old_process(&mut server);
    assert_eq!(get(&mut proxy, "/").body, "ok");
    assert_eq!(get(&mut silent, "/").body, "ok");
    for _ in 0..4 {
        assert!(spop.check());
    }
    assert!(!spop.check(), "the new process has the counts");
    let metrics = get(&mut admin, "/metrics").body;
    assert!(metrics.contains("tidegate_upgrades_total{result=\"ok\"} 1"));
}

#[test]
fn an_http2_connection_ends_after_its_request() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let mut busy = Http2Client::connect(server.grpc);
    let idle = Http2Client::connect(server.grpc);
    busy.begin_health_check();
    server.signal("USR2");
    busy.wait_for_goaway();
    assert_eq!(busy.end_health_check(), SERVING);
    let _new = wait_for_takeover(&mut server);
    assert!(busy.read_until_closed());
    assert!(idle.read_until_closed());
    wait_for_old_process(&mut server);
    let mut new = Http2Client::connect(server.grpc);
    new.begin_health_check();
    assert_eq!(new.end_health_check(), SERVING);
}

fn start_with_tls(rules: &str) -> Server {
    Server::start_in(directory_with_certificates(), &tls_config(rules))
}

/// The new process decides the next request of each connection, and ends the connection with its
/// response.
#[test]
fn a_connection_with_tls_ends_with_its_next_response() {
    let mut server = start_with_tls(FIVE_AN_HOUR);
    let mut idle = TlsClient::connect(&server, server.http);
    let mut silent = TlsClient::connect(&server, server.http);
    let handshaking = TlsClient::connect(&server, server.http);
    let mut busy = TlsClient::connect(&server, server.http);
    let (response, closes) = check(&mut idle);
    assert_admitted(&response, 4);
    assert!(!closes, "{response}");
    silent.end_handshake();
    let (begun, rest) = CHECK.split_at(CHECK.len() - 1);
    busy.send(begun);
    let new = begin_handover(&mut server);
    busy.send(rest);
    assert_admitted(&busy.read_until("}]}"), 3);
    wait_for_end_of_handover(&mut server);
    for (remaining, mut client) in [(2, idle), (1, silent), (0, handshaking)] {
        let (response, closes) = check(&mut client);
        assert_admitted(&response, remaining);
        assert!(closes, "{response}");
        assert_eq!(client.read_until_closed(), "");
    }
    drop(busy);
    wait_for_old_process(&mut server);
    new.signal("TERM");
}

/// The client's certificate is known to the new process.
#[test]
fn a_connection_of_the_proxy_with_tls_keeps_its_client() {
    let one_a_client =
        "rules: [{name: api, key: [tls.client], limits: [1/h], algorithm: fixed_window}]\n";
    let mut server = start_with_tls(one_a_client);
    let get = |client: &mut TlsClient| {
        client.send("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n");
        client.read_until("\r\n\r\n")
    };
    let mut idle = TlsClient::connect(&server, server.proxy());
    let response = get(&mut idle);
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    idle.read_until("ok");
    let handshaking = TlsClient::connect(&server, server.proxy());
    let _new = upgrade(&mut server);
    for mut client in [idle, handshaking] {
        let response = get(&mut client);
        assert!(response.starts_with("HTTP/1.1 429 "), "{response}");
        assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
    }
}

/// The protocols RESP and SPOP cannot announce the end of a connection, so the old process ends the
/// connection.
#[test]
fn connections_of_redis_and_spop_with_tls_are_served_until_the_old_process_ends() {
    let mut server = start_with_tls(FIVE_AN_HOUR);
    let mut redis = TlsClient::connect(&server, server.resp);
    redis.send("CLIENT SETNAME worker\r\nTIDEGATE.CHECK user u1\r\n");
    redis.read_until("\r\n:5\r\n:4\r\n");
    let mut handshaking = TlsClient::connect(&server, server.resp);
    let spop = TlsClient::connect(&server, server.spop());
    let _new = upgrade(&mut server);
    redis.read_until("\r\n");
    handshaking.send("TIDEGATE.CHECK user u1\r\n");
    handshaking.read_until("\r\n:5\r\n:3\r\n");
    let mut spop = SpopClient::on(spop.stream);
    assert!(spop.check() && spop.check());
    redis.send("CLIENT GETNAME\r\nTIDEGATE.CHECK user u1\r\n");
    redis.read_until("$6\r\nworker\r\n");
    redis.read_until("\r\n:5\r\n:0\r\n");
    // The first process ends its drain early.
    server.signal("TERM");
    for client in [redis, handshaking] {
        client.read_until_closed();
    }
    wait_for_old_process(&mut server);
}

/// In the first upgrade, the old process begins to relay the connection. In the second upgrade, the
/// other end of the relay moves. Before each upgrade, the last command that the server has read is
/// incomplete.
#[test]
fn a_connection_of_redis_with_tls_moves_twice_with_its_state() {
    let mut server = start_with_tls(FIVE_AN_HOUR);
    let mut redis = TlsClient::connect(&server, server.resp);
    redis.send("CLIENT SETNAME worker\r\nTIDEGATE.CHE");
    redis.read_until("+OK\r\n");
    let first = upgrade(&mut server);
    redis.send("CK user u1\r\nCLIENT GETNAME\r\nTIDEGATE.CHE");
    redis.read_until("\r\n:5\r\n:4\r\n");
    redis.read_until("$6\r\nworker\r\n");
    first.signal("USR2");
    let _second = wait_for_takeover(&mut server);
    redis.send("CK user u1\r\nCLIENT GETNAME\r\n");
    redis.read_until("\r\n:5\r\n:3\r\n");
    redis.read_until("$6\r\nworker\r\n");
}

/// The server has read the beginning of the second request together with the first request. The
/// third request is not decided, because the connection ends before it.
#[test]
fn a_connection_with_tls_moves_with_a_partly_read_request() {
    let mut server = start_with_tls(FIVE_AN_HOUR);
    let mut http = TlsClient::connect(&server, server.http);
    let (begun, rest) = CHECK.split_at(9);
    http.send(&format!("{CHECK}{begun}"));
    assert_admitted(&http.read_until("}]}"), 4);
    let _new = upgrade(&mut server);
    http.send(&format!("{rest}{CHECK}"));
    let response = http.read_until("}]}");
    assert_admitted(&response, 3);
    assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
    assert_eq!(http.read_until_closed(), "");
    let mut new = TlsClient::connect(&server, server.http);
    assert_admitted(&check(&mut new).0, 2);
}

/// The client learns that the connection ends, and its first request is served.
#[test]
fn an_http2_connection_with_tls_is_served_after_its_handshake() {
    let mut server = start_with_tls(FIVE_AN_HOUR);
    let handshaking = TlsClient::connect(&server, server.grpc);
    let _new = upgrade(&mut server);
    let mut client = Http2Client::begin(handshaking.stream);
    client.begin_health_check();
    assert_eq!(client.end_health_check(), SERVING);
    client.wait_for_goaway();
}

/// Starts an upgrade. Returns when the old process hands over its connections and the state.
fn begin_handover(server: &mut Server) -> NewProcess {
    server.signal("USR2");
    let new = wait_for_new_process(server);
    server.wait_for(&["upgrade: handing over the connections and the state"]);
    new
}

fn wait_for_end_of_handover(server: &mut Server) {
    server.wait_for(&["this process has taken over from the old process"]);
}

/// The cost of the request is in its body, so the request is not decided before its body arrives.
const COST_IN_BODY: &str = "rules: [{name: api, key: [path], limits: [5/h], algorithm: fixed_window, cost: {json: /n, default: 1}}]\n";

/// Sends the head of a request whose body has 8 bytes. When this function returns, the proxy waits
/// for the body.
fn send_head_of_undecided_request(server: &Server) -> Client {
    let mut client = Client::connect(server.proxy());
    client.send("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 8\r\n\r\n");
    client.read_until("HTTP/1.1 100 Continue\r\n\r\n");
    client
}

/// The state moves only when the request is decided.
#[test]
fn the_handover_waits_for_a_request_whose_cost_is_in_its_body() {
    let proxy = proxy_in_front_of(upstream());
    let config = format!("{EVERY_LISTENER}{PATIENT}{proxy}{COST_IN_BODY}");
    let mut server = Server::start_in(Scratch::new(), &config);
    let mut undecided = send_head_of_undecided_request(&server);
    let _new = begin_handover(&mut server);
    undecided.send("{\"n\": 2}");
    let response = undecided.read_answer(false);
    assert_eq!((response.status, &*response.body), (200, "ok"));
    wait_for_end_of_handover(&mut server);
}

/// The request needs a decision only after the new process has taken over.
#[test]
fn a_request_that_is_not_decided_within_the_handover_time_is_answered_with_503() {
    let brief = "shutdown: {drain: 1min, handover: 5ms}\n";
    let proxy = proxy_in_front_of(upstream());
    let config = format!("{EVERY_LISTENER}{brief}{proxy}{COST_IN_BODY}");
    let mut server = Server::start_in(Scratch::new(), &config);
    let mut undecided = send_head_of_undecided_request(&server);
    let _new = begin_handover(&mut server);
    server.wait_for(&["some requests in progress were not finished after 5ms"]);
    wait_for_end_of_handover(&mut server);
    undecided.send("{\"n\": 2}");
    assert_eq!(undecided.read_answer(false).status, 503);
}

/// An upstream that delays its first response until the test permits it. It answers all other
/// requests immediately.
fn upstream_with_slow_response() -> SlowUpstream {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let (receives, received) = channel();
    let (may_respond, allowed) = channel();
    spawn(move || {
        let (mut first, _) = socket.accept().unwrap();
        let read = first.read(&mut [0; 4_096]).unwrap();
        receives.send(read).unwrap();
        allowed.recv().unwrap();
        first.write_all(OK).unwrap();
        spawn(move || respond(first));
        for stream in socket.incoming().map_while(Result::ok) {
            spawn(move || respond(stream));
        }
    });
    SlowUpstream {
        address,
        received,
        may_respond,
    }
}

struct SlowUpstream {
    address: SocketAddr,
    /// The length of the first request, when it has arrived.
    received: Receiver<usize>,
    may_respond: Sender<()>,
}

const ONE_SLOT: &str =
    "rules: [{name: slots, limits: {algorithm: concurrency, limit: 1, wait: 30s}}]\n";

/// The waiting request gets the slot as soon as the request in progress has ended.
#[test]
fn the_handover_waits_for_a_request_that_waits_for_a_slot() {
    let upstream = upstream_with_slow_response();
    let proxy = proxy_in_front_of(upstream.address);
    let config = format!("{EVERY_LISTENER}{PATIENT}{proxy}{ONE_SLOT}");
    let mut server = Server::start_in(Scratch::new(), &config);
    let request = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut in_progress = Client::connect(server.proxy());
    in_progress.send(request);
    assert!(upstream.received.recv_timeout(TIMEOUT).unwrap() > 0);
    let mut waiting = Client::connect(server.proxy());
    waiting.send(request);
    eventually("the second request waits", || {
        let metrics = server.metrics();
        metrics
            .contains("\ntidegate_waiting_requests 1\n")
            .then_some(())
    });
    let _new = begin_handover(&mut server);
    upstream.may_respond.send(()).unwrap();
    for client in [&mut in_progress, &mut waiting] {
        let response = client.read_answer(false);
        assert_eq!((response.status, &*response.body), (200, "ok"));
    }
    wait_for_end_of_handover(&mut server);
}
