//! Tests of `tidegate serve`: startup until the first response, and graceful shutdown.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixDatagram,
    path::Path,
    process::Command,
    time::Duration,
};

use serde_json::json;

use crate::{
    servers::reserve_port,
    support::{Answer, Ask, EVERY_LISTENER, Process, Scratch, Server, run, tidegate},
};

const FIVE_AN_HOUR: &str =
    "rules: [{name: api, key: [user], limits: [5/h], algorithm: fixed_window}]\n";

#[test]
fn every_listener_answers() {
    let server = Server::start(FIVE_AN_HOUR);
    let answer = server.check(&json!({"user": "u1"}));
    assert_eq!(
        (answer.status, &answer.json()["remaining"]),
        (200, &json!(4))
    );
    assert_eq!(Ask::get(server.admin, "/healthz").send().status, 200);
    assert_eq!(Ask::get(server.admin, "/readyz").send().status, 200);
    assert_eq!(inline(server.resp, "PING"), "+PONG\r\n");
}

#[test]
fn the_start_logs_the_active_rules() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let line = server.wait_for(&["rules are active"]);
    assert!(
        line.contains("rules=1") && line.contains("file=rules.yaml"),
        "{line}"
    );
}

/// Returns a socket that receives the server's notifications, like systemd's socket.
fn notify_socket(path: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    socket
}

fn notification(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4_096];
    let length = socket.recv(&mut buffer).unwrap();
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

#[test]
fn the_service_manager_is_notified() {
    let scratch = Scratch::new();
    let path = scratch.join("notify");
    let socket = notify_socket(&path);
    let received = || notification(&socket);
    let variable = ("NOTIFY_SOCKET", path.display().to_string());
    // The watchdog interval is so long that no watchdog notification arrives between the other
    // notifications.
    let watchdog = ("WATCHDOG_USEC", (600 * 1_000_000).to_string());
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let server = Server::start_with(scratch, &config, &[variable, watchdog]);
    assert_eq!(received(), "READY=1\n");
    server.signal("HUP");
    let reloading = received();
    assert!(
        reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="),
        "{reloading}"
    );
    assert_eq!(received(), "READY=1\n");
    server.signal("TERM");
    assert_eq!(received(), "STOPPING=1\n");
    server.stop();
}

#[test]
fn the_watchdog_is_notified_twice_as_often_as_it_expects() {
    let scratch = Scratch::new();
    let path = scratch.join("notify");
    let socket = notify_socket(&path);
    let variables = [
        ("NOTIFY_SOCKET", path.display().to_string()),
        ("WATCHDOG_USEC", "40000".to_owned()),
    ];
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}");
    let server = Server::start_with(scratch, &config, &variables);
    let received: Vec<String> = (0..4).map(|_| notification(&socket)).collect();
    assert_eq!(received[0], "READY=1\n");
    assert!(
        received[1..].iter().all(|one| one == "WATCHDOG=1\n"),
        "{received:?}"
    );
    server.stop();
}

/// Opens a socket for each name and passes it to the program, as systemd does.
const PASS_SOCKETS: &str = "
import os, socket, sys
names = sys.argv[1].split(':')
for descriptor, name in enumerate(names, 3):
    opened = socket.socket(socket.AF_INET if name != 'unix' else socket.AF_UNIX)
    opened.bind(('127.0.0.1', 0) if name != 'unix' else '')
    if name != 'metrics':
        opened.listen()
    os.dup2(opened.fileno(), 20 + descriptor)
for descriptor in range(3, 3 + len(names)):
    os.dup2(20 + descriptor, descriptor)
os.environ['LISTEN_FDNAMES'] = sys.argv[1]
os.environ['LISTEN_FDS'] = str(len(names))
os.environ.setdefault('LISTEN_PID', str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
";

/// Returns a command for a server in `scratch`, to which a socket is passed for each of `names`.
fn with_sockets(scratch: &Scratch, names: &str) -> Command {
    let server = tidegate(&["serve", "--config", "rules.yaml"]);
    let mut command = Command::new("python3");
    command.args(["-c", PASS_SOCKETS, names]);
    command.arg(server.get_program()).args(server.get_args());
    command.current_dir(scratch.path());
    command
}

/// The address in the rules file does not belong to any network interface, so the listener works
/// only with the passed socket.
#[test]
fn a_listener_uses_the_socket_of_the_service_manager() {
    let scratch = Scratch::new();
    let config =
        format!("{EVERY_LISTENER}{FIVE_AN_HOUR}").replacen("127.0.0.1:0", "192.0.2.1:80", 1);
    scratch.write("rules.yaml", &config);
    let mut server = Process::start(&mut with_sockets(&scratch, "resp:http"));
    let line = server.wait_for(&["listening", "\"http\""]);
    let (_, address) = line.rsplit_once("address=").unwrap();
    let address = address.split_whitespace().next().unwrap().parse().unwrap();
    let body = json!({"entries": {"user": "u1"}});
    let checked = Ask::new("POST", address, "/v1/check").body(&body).send();
    assert_eq!(checked.status, 200, "{}", checked.body);
    server.signal("TERM");
    assert!(server.wait().0.success());
}

#[test]
fn a_socket_that_cannot_be_used_prevents_the_start() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", EVERY_LISTENER);
    for (names, expected) in [
        (
            "unknown",
            "socket \"unknown\": no listener has this name; set FileDescriptorName=",
        ),
        ("http:http", "socket \"http\": passed twice"),
        ("metrics", "socket \"metrics\": this listener is off"),
        ("proxy", "socket \"proxy\": this listener is off"),
    ] {
        let output = run(&mut with_sockets(&scratch, names));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    scratch.write(
        "rules.yaml",
        "listen: {metrics: 127.0.0.1:0, http: off, grpc: off, resp: off, admin: off}\n",
    );
    let output = run(&mut with_sockets(&scratch, "metrics"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.contains("does not listen; set ListenStream="),
        "{error}"
    );
}

/// A process may inherit systemd's variables although they were set for another process
/// (`LISTEN_PID`). A process must not use sockets that were meant for another process.
#[test]
fn sockets_for_another_process_are_not_used() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", EVERY_LISTENER);
    let mut command = with_sockets(&scratch, "unknown");
    let mut server = Process::start(command.env("LISTEN_PID", "1"));
    server.wait_for(&["listening", "\"admin\""]);
    server.signal("TERM");
    assert!(server.wait().0.success());
}

/// The delay is an hour, but the test ends it early with a second signal.
#[test]
fn the_server_reports_not_ready_and_serves_during_the_pre_stop_delay() {
    let rules = "shutdown: {pre_stop_delay: 1h}\nenvoy: {config: shop.yaml}\n";
    let scratch = Scratch::new();
    scratch.write("shop.yaml", "domain: shop\ndescriptors: []\n");
    let config = format!("{EVERY_LISTENER}{FIVE_AN_HOUR}{rules}");
    let mut server = Server::start_in(scratch, &config);
    let health = |server: &Server| {
        let ready = Ask::get(server.admin, "/readyz").send();
        let envoys = Ask::get(server.http, "/healthcheck").send();
        (ready.status, ready.json()["ready"].clone(), envoys.status)
    };
    assert_eq!(health(&server), (200, json!(true), 200));
    let probe = server.operate(&["health"]);
    assert_eq!(
        (probe.status.code(), &*probe.stdout),
        (Some(0), &b"ready\n"[..])
    );
    server.signal("TERM");
    server.wait_for(&["reporting not-ready", "pre_stop_delay=3600s"]);
    assert_eq!(health(&server), (503, json!(false), 500));
    let probe = server.operate(&["health"]);
    assert_eq!(
        (probe.status.code(), &*probe.stdout),
        (Some(1), &b"shutting down\n"[..])
    );
    assert_eq!(server.check(&json!({"user": "u1"})).status, 200);
    assert_eq!(inline(server.resp, "PING"), "+PONG\r\n");
    server.stop();
}

#[test]
fn all_listeners_share_their_counters() {
    let server = Server::start(FIVE_AN_HOUR);
    server.check(&json!({"user": "u1"}));
    let answer = inline(server.resp, "TIDEGATE.CHECK user u1");
    assert!(
        answer.starts_with("*6\r\n:1\r\n$3\r\napi\r\n:5\r\n:3\r\n"),
        "{answer}"
    );
    let output = server.operate(&["inspect", "api", "u1", "--json"]);
    let seen: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(seen["limits"][0]["remaining"], 3, "{seen}");
}

#[test]
fn limits_in_requests_need_no_rules_file() {
    // Without a file, the server would use the default ports, which are fixed. Therefore the test
    // uses a file that changes only the ports.
    let server = Server::start("");
    let body = json!({"key": "user:1", "algorithm": "gcra", "rate": "1/h", "burst": 1});
    let throttle = || {
        Ask::new("POST", server.http, "/v1/throttle")
            .body(&body)
            .send()
    };
    let answers: Vec<u16> = (0..3).map(|_| throttle().status).collect();
    assert_eq!(answers, [200, 200, 429]);
    assert_eq!(
        inline(server.resp, "CL.THROTTLE user:2 15 30 60"),
        "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n"
    );
}

#[test]
fn an_address_in_use_exits_with_2_and_names_the_listener() {
    let server = Server::start("");
    let scratch = Scratch::new();
    let config = format!(
        "listen: {{http: '{}', grpc: off, resp: off, admin: off}}\n",
        server.http
    );
    let file = scratch.write("rules.yaml", &config);
    let output = run(&mut tidegate(&[
        "serve",
        "--config",
        file.to_str().unwrap(),
    ]));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        message.contains(&format!("cannot listen for http on {}", server.http)),
        "{message}"
    );
}

#[test]
fn a_public_admin_listener_requires_a_token() {
    let scratch = Scratch::new();
    let file = scratch.write(
        "rules.yaml",
        "listen: {http: off, grpc: off, resp: off, admin: '0.0.0.0:0'}\n",
    );
    let output = run(&mut tidegate(&[
        "serve",
        "--config",
        file.to_str().unwrap(),
    ]));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(message.contains("admin.token_env"), "{message}");
}

#[test]
fn requests_in_progress_finish_before_the_exit() {
    let mut server = Server::start(FIVE_AN_HOUR);
    let body = r#"{"entries":{"user":"u1"}}"#;
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: tidegate\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let (begun, rest) = request.split_at(request.len() - 5);
    let mut stream = connect(server.http);
    stream.write_all(begun.as_bytes()).unwrap();
    // Send another request to the same listener on a new connection. When the listener responds to
    // it, it has already read from the first connection.
    server.check(&json!({"user": "u2"}));
    server.signal("TERM");
    server.wait_for(&["shutting down"]);
    stream.write_all(rest.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let address = server.http;
    let (status, log, _scratch) = server.wait();
    assert!(status.success(), "{status}:\n{}", log.join("\n"));
    assert!(TcpStream::connect(address).is_err(), "the port is closed");
}

#[test]
fn an_idle_connection_does_not_delay_the_exit() {
    let server = Server::start("");
    let mut idle = connect(server.resp);
    idle.write_all(b"PING\r\n").unwrap();
    idle.read_exact(&mut [0; 7]).unwrap();
    server.stop();
    assert_eq!(idle.read(&mut [0; 1]).unwrap_or(0), 0);
}

/// If the server waited for idle clients, it would exit only after the drain deadline of an hour,
/// or after an idle timeout.
#[test]
fn idle_clients_of_every_listener_do_not_delay_the_exit() {
    let idle = "max_connections: 100, idle_timeout: 1h";
    let config = format!(
        "listen:
  http: {{address: '127.0.0.1:0', {idle}}}
  grpc: {{address: '127.0.0.1:0', {idle}}}
  resp: {{address: '127.0.0.1:0', {idle}}}
  admin: '127.0.0.1:0'
shutdown: {{drain: 1h}}
proxy:
  listen: '127.0.0.1:0'
  timeouts: {{keep_alive: 1h, request_head: 1h}}
  upstreams: [{{name: app, urls: 'http://127.0.0.1:1'}}]
"
    );
    let server = Server::start_in(Scratch::new(), &config);
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let http1 = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut clients = Vec::new();
    for (listener, beginnings) in [
        (server.http, &[&b""[..], http1][..]),
        (server.grpc, &[b"", b"PRI * HT", http2]),
        (server.resp, &[b"", b"PING\r\n"]),
        (server.admin, &[b"", http1]),
        (server.proxy(), &[b"", b"PRI * HT", http1, http2]),
    ] {
        for beginning in beginnings {
            let mut client = connect(listener);
            client.write_all(beginning).unwrap();
            // Wait for the response or the HTTP/2 SETTINGS frame. After that, the client is idle.
            if beginning.len() > 5 && !beginning.ends_with(b"HT") {
                client.read_exact(&mut [0; 7]).unwrap();
            }
            clients.push(client);
        }
    }
    server.stop();
}

/// If a client does not read responses, the server must stop reading its requests instead of
/// buffering the responses.
#[test]
fn a_client_that_never_reads_stops_being_read() {
    const MUCH: usize = 32 << 20;
    let server = Server::start(FIVE_AN_HOUR);
    let body = r#"{"entries":{"user":"u1"}}"#;
    let head = "POST /v1/peek HTTP/1.1\r\nhost: tidegate\r\ncontent-length:";
    let requests = format!("{head} {}\r\n\r\n{body}", body.len()).repeat(1_000);
    let mut stream = connect(server.http);
    stream
        .set_write_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    let mut sent = 0;
    while sent < MUCH && stream.write_all(requests.as_bytes()).is_ok() {
        sent += requests.len();
    }
    assert!(
        sent < MUCH,
        "{sent} bytes of requests were read while the client read no response"
    );
    assert_eq!(server.check(&json!({"user": "u2"})).status, 200);
}

/// Measures several starts and uses the fastest, because concurrent tests can slow down the
/// machine.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the test measures the time of a start"
)]
fn the_first_response_takes_at_most_100_ms_after_the_start() {
    let times = (0..5).map(|_| {
        let (scratch, port) = (Scratch::new(), reserve_port());
        let config = format!(
            "listen: {{http: '127.0.0.1:{port}', grpc: off, resp: off, admin: off}}\n{FIVE_AN_HOUR}"
        );
        let file = scratch.write("rules.yaml", &config);
        let started = std::time::Instant::now();
        let mut server = Process::start(&mut tidegate(&[
            "serve",
            "--config",
            file.to_str().unwrap(),
        ]));
        server.wait_for(&["listening"]);
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let body = json!({"entries": {"user": "u1"}});
        let Answer { status, .. } = Ask::new("POST", address, "/v1/check").body(&body).send();
        assert_eq!(status, 200);
        started.elapsed()
    });
    let best = times.min().unwrap();
    assert!(best < Duration::from_millis(100), "{best:?}");
}

#[test]
fn warnings_are_logged_at_the_start() {
    let config = "{listen: {http: off, grpc: off, resp: off, admin: '127.0.0.1:0'}, \
                  quotas: [{name: all, domain: shop, limit: 1/s}]}";
    let scratch = Scratch::new();
    let file = scratch.write("rules.yaml", config);
    let mut server = Process::start(&mut tidegate(&[
        "serve",
        "--config",
        file.to_str().unwrap(),
    ]));
    let line = server.wait_for(&["WARN"]);
    assert!(line.contains("quotas"), "{line}");
}

fn connect(address: std::net::SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
}

/// Sends one inline command to the RESP listener, and returns everything that is received until the
/// connection is closed.
fn inline(address: std::net::SocketAddr, command: &str) -> String {
    let mut stream = connect(address);
    stream
        .write_all(format!("{command}\r\nQUIT\r\n").as_bytes())
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.strip_suffix("+OK\r\n").unwrap_or(&answer).to_owned()
}
