//! Tests of the connections that are open during an upgrade.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::spawn,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, pem::PemObject as _},
};

use super::{FIVE_AN_HOUR, http2::Http2Client, upgrade, wait_for_takeover};
use crate::{
    http_client::Client,
    servers::eventually,
    support::{EVERY_LISTENER, Scratch, Server, authority, signed},
};

const TIMEOUT: Duration = Duration::from_secs(30);

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
fn upstream() -> SocketAddr {
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

fn proxy_in_front_of(upstream: SocketAddr) -> String {
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
struct SpopClient(TcpStream);

impl SpopClient {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
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
    let mut spop = SpopClient::connect(server.spop());
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

/// A client of a listener with TLS.
struct TlsClient {
    stream: StreamOwned<ClientConnection, TcpStream>,
}

impl TlsClient {
    /// Connects without the handshake, which takes place when the client sends or receives.
    fn connect(server: &Server, address: SocketAddr) -> Self {
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(server.directory().join("ours.pem"));
        roots.add(authority.unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "localhost".try_into().unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        let stream = StreamOwned::new(connection, socket);
        Self { stream }
    }

    fn send(&mut self, bytes: &str) {
        self.stream.write_all(bytes.as_bytes()).unwrap();
        self.stream.flush().unwrap();
    }

    /// Reads up to and including `end`.
    fn read_until(&mut self, end: &str) -> String {
        let mut received = Vec::new();
        while !received.ends_with(end.as_bytes()) {
            let mut byte = [0];
            let read = self.stream.read(&mut byte).unwrap();
            assert_eq!(read, 1, "{}", String::from_utf8_lossy(&received));
            received.extend(byte);
        }
        String::from_utf8(received).unwrap()
    }

    /// Sends the first message of the handshake.
    fn begin_handshake(&mut self) {
        let StreamOwned { conn, sock } = &mut self.stream;
        conn.write_tls(sock).unwrap();
    }

    fn read_until_closed(mut self) -> String {
        let mut rest = String::new();
        self.stream.read_to_string(&mut rest).unwrap();
        rest
    }
}

/// Starts a server whose HTTP listener and proxy have a certificate.
fn start_with_tls() -> Server {
    let scratch = Scratch::new();
    authority(scratch.path(), "ours");
    signed(scratch.path(), "ours", "server");
    let tls = "tls: {certificate: server.pem, key: server.key}";
    let http = format!("http: {{address: '127.0.0.1:0', {tls}}}");
    let listen = EVERY_LISTENER.replace("http: '127.0.0.1:0'", &http);
    let proxy = proxy_in_front_of(upstream()).replacen('{', &format!("{{{tls}, "), 1);
    Server::start_in(scratch, &format!("{listen}{proxy}{FIVE_AN_HOUR}"))
}

const CHECK: &str = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 27\r\n\r\n{\"entries\": {\"user\": \"u1\"}}";

#[test]
fn a_connection_with_tls_ends_after_its_request() {
    let mut server = start_with_tls();
    let mut busy = TlsClient::connect(&server, server.http);
    let mut idle = TlsClient::connect(&server, server.http);
    for client in [&mut busy, &mut idle] {
        client.send(CHECK);
        let response = client.read_until("}]}");
        assert!(!response.contains("connection: close"), "{response}");
    }
    let (begun, rest) = CHECK.split_at(CHECK.len() - 1);
    busy.send(begun);
    server.signal("USR2");
    // This connection is closed as soon as the handover begins.
    idle.read_until_closed();
    busy.send(rest);
    let response = busy.read_until_closed();
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
    assert!(response.contains("\"remaining\":2"), "{response}");
    let _new = wait_for_takeover(&mut server);
    let mut new = TlsClient::connect(&server, server.http);
    new.send(CHECK);
    let response = new.read_until("}]}");
    assert!(response.contains("\"remaining\":1"), "{response}");
}

/// The old process finishes a handshake that is in progress, and serves one request on the
/// connection.
#[test]
fn a_tls_handshake_in_progress_is_finished() {
    let mut server = start_with_tls();
    let clients = [server.http, server.proxy()].map(|address| {
        let mut client = TlsClient::connect(&server, address);
        client.begin_handshake();
        client
    });
    let mut closing = Http2Client::connect(server.grpc);
    server.signal("USR2");
    closing.wait_for_goaway();
    for mut client in clients {
        client.send("GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let response = client.read_until_closed();
        assert!(response.starts_with("HTTP/1.1 "), "{response}");
        assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
    }
    let _new = wait_for_takeover(&mut server);
}

/// Starts an upgrade, and returns when only connections that can be handed over are open. Fails if
/// the state has already moved.
fn begin_handover(server: &Server) {
    let closing = Http2Client::connect(server.grpc);
    server.signal("USR2");
    closing.read_until_closed();
    // The old process accepts no more connections. The new process accepts none until the state has
    // moved.
    let mut waiting = TcpStream::connect(server.http).unwrap();
    let request = b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n";
    waiting.write_all(request).unwrap();
    let brief = Duration::from_millis(200);
    waiting.set_read_timeout(Some(brief)).unwrap();
    let served = waiting.read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(served, Err(ErrorKind::WouldBlock), "the state has moved");
}

/// The cost of the request is in its body, so the request is not decided before its body arrives.
const COST_IN_BODY: &str = "rules: [{name: api, key: [path], limits: [5/h], algorithm: fixed_window, cost: {json: /n, default: 1}}]\n";

/// The state moves only when the request is decided.
#[test]
fn the_handover_waits_for_a_request_whose_cost_is_in_its_body() {
    let proxy = proxy_in_front_of(upstream());
    let config = format!("{EVERY_LISTENER}{proxy}{COST_IN_BODY}");
    let mut server = Server::start_in(Scratch::new(), &config);
    let mut undecided = Client::connect(server.proxy());
    undecided
        .send("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 8\r\n\r\n");
    undecided.read_until("HTTP/1.1 100 Continue\r\n\r\n");
    begin_handover(&server);
    undecided.send("{\"n\": 2}");
    let response = undecided.read_answer(false);
    assert_eq!((response.status, &*response.body), (200, "ok"));
    let _new = wait_for_takeover(&mut server);
}

/// An upstream that responds to its first request when it receives a message, and to all others at
/// once.
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
    let config = format!("{EVERY_LISTENER}{proxy}{ONE_SLOT}");
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
    begin_handover(&server);
    upstream.may_respond.send(()).unwrap();
    for client in [&mut in_progress, &mut waiting] {
        let response = client.read_answer(false);
        assert_eq!((response.status, &*response.body), (200, "ok"));
    }
    let _new = wait_for_takeover(&mut server);
}
