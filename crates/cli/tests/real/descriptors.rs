//! Tests of a server that may open only a few file descriptors, with idle clients that use all of
//! them.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    thread::spawn,
    time::Duration,
};

use crate::{
    http_client::Client,
    support::{Ask, EVERY_LISTENER, Process, Scratch, Server},
};

/// Sends `asked` and returns the beginning of the response.
fn answer(address: SocketAddr, asked: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(asked).unwrap();
    let mut read = vec![0; 1_024];
    let count = stream.read(&mut read).unwrap();
    read.truncate(count);
    read
}

#[test]
fn silent_clients_do_not_block_other_clients_or_the_admin_listener() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", &format!("{EVERY_LISTENER}rules: []\n"));
    let program = env!("CARGO_BIN_EXE_tidegate");
    let mut command = Command::new("sh");
    let script = "ulimit -n 400 && exec \"$0\" serve --config rules.yaml";
    command
        .args(["-c", script, program])
        .env("NO_COLOR", "1")
        .current_dir(scratch.path());
    let mut server = Process::start(&mut command);
    let warning = server.wait_for(&["open files", "lowered"]);
    assert!(warning.contains("allows 400"), "{warning}");
    let [http, grpc, resp, admin] = ["http", "grpc", "resp", "admin"].map(|listener| {
        let line = server.wait_for(&["listening", &format!("listener=\"{listener}\"")]);
        let line = line.replace('"', "");
        let address = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("address="));
        address.unwrap().parse::<SocketAddr>().unwrap()
    });
    // Open more connections to each listener than the number of file descriptors that the server
    // may use.
    let silent: Vec<TcpStream> = [http, resp, grpc]
        .iter()
        .flat_map(|listener| (0..120).map(move |_| TcpStream::connect(listener).unwrap()))
        .collect();
    assert_eq!(Ask::get(admin, "/healthz").send().status, 200);
    assert_eq!(answer(resp, b"PING\r\n"), b"+PONG\r\n");
    let asked = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n";
    assert!(answer(http, asked).starts_with(b"HTTP/1.1 404"));
    let metrics = Ask::get(admin, "/metrics").send().body;
    let evicted = r#"tidegate_connections_evicted_total{listener="http"} "#;
    let line = metrics.lines().find_map(|line| line.strip_prefix(evicted));
    assert!(line.unwrap().parse::<u64>().unwrap() > 50, "{metrics}");
    drop(silent);
}

/// Most systems start programs with a soft limit of 1,024 and a much higher hard limit.
#[test]
fn the_start_raises_the_soft_limit_to_the_hard_limit() {
    let scratch = Scratch::new();
    let listeners = "listen: {http: {address: '127.0.0.1:0', max_connections: 1500}, grpc: off, resp: off, admin: off}\n";
    scratch.write("rules.yaml", listeners);
    let mut command = Command::new("sh");
    let script = "ulimit -Sn 1024 && ulimit -Hn 2048 && exec \"$0\" serve --config rules.yaml";
    command
        .args(["-c", script, env!("CARGO_BIN_EXE_tidegate")])
        .env("NO_COLOR", "1")
        .current_dir(scratch.path());
    let mut server = Process::start(&mut command);
    server.wait_for(&["listening", "listener=\"http\""]);
    assert_eq!(server.soft_file_limit(), 2_048);
    // The hard limit on open files is high enough for `max_connections`, although the soft limit is
    // not.
    assert!(!server.has_logged(&["lowered"]), "{}", server.log_text());
}

/// Starts an endpoint that answers one request per connection with an empty 200.
fn endpoint() -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    spawn(move || {
        for mut stream in socket.incoming().map_while(Result::ok) {
            // A single read is sufficient for the head of a GET request.
            let _ = stream.read(&mut [0; 4_096]);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(answer);
        }
    });
    address
}

/// A lack of free file descriptors in the proxy does not mean that the endpoints are unhealthy. If
/// endpoints were ejected for this reason, requests would still fail after descriptors have become
/// available again.
#[test]
fn without_descriptors_for_upstreams_the_answer_is_503_and_no_endpoint_is_ejected() {
    let (one, other, named) = (endpoint(), endpoint(), endpoint().port());
    let eject = "eject: {failures: 1, duration: 1h}";
    let config = format!(
        "{EVERY_LISTENER}proxy:
  listen: 127.0.0.1:0
  upstreams:
    - {{name: named, when: {{path: /named}}, urls: ['http://localhost:{named}'], {eject}}}
    - {{name: app, urls: ['http://{one}', 'http://{other}'], {eject}, health: {{path: /, interval: 100ms}}}}
"
    );
    let mut server = Server::start_in(Scratch::new(), &config);
    // The connection is already open, so the server needs no additional descriptor for it.
    let mut client = Client::connect(server.proxy());
    for path in ["/", "/", "/named"] {
        assert_eq!(client.ask("GET", path, &[], b"").status, 200, "{path}");
    }
    server.limit_files(3);
    for path in ["/", "/named"].into_iter().cycle().take(20) {
        let answer = client.ask("GET", path, &[], b"");
        assert_eq!(answer.status, 503, "{path}: {answer:?}");
        assert_eq!(answer.header("retry-after"), Some("1"));
        let detail = "the server cannot open another connection; try again";
        assert_eq!(answer.problem(), detail);
    }
    server.wait_for(&["health check skipped", "app"]);
    server.limit_files(1_024);
    for path in ["/", "/named"].into_iter().cycle().take(20) {
        assert_eq!(client.ask("GET", path, &[], b"").status, 200, "{path}");
    }
    let metrics = server.metrics();
    for sample in [
        r#"tidegate_proxy_failures_total{upstream="app",failure="local"} 10"#,
        r#"tidegate_proxy_failures_total{upstream="named",failure="local"} 10"#,
    ] {
        assert!(metrics.contains(sample), "no {sample} in {metrics}");
    }
    let urls = [
        ("app", one.to_string()),
        ("app", other.to_string()),
        ("named", format!("localhost:{named}")),
    ];
    for (upstream, address) in urls {
        let labels = format!("{{upstream=\"{upstream}\",endpoint=\"http://{address}\"}}");
        for sample in [
            format!("tidegate_proxy_ejections_total{labels} 0"),
            format!("tidegate_proxy_endpoint_up{labels} 1"),
        ] {
            assert!(metrics.contains(&sample), "no {sample} in {metrics}");
        }
    }
    server.stop();
}

/// Every listener limits the number of connections per client.
#[test]
fn a_client_cannot_exceed_its_connection_limit_on_any_listener() {
    let listener = "{address: '127.0.0.1:0', max_connections_per_client: 2}";
    let listeners = ["http", "grpc", "resp", "admin"].map(|name| format!("{name}: {listener}"));
    let config = format!("listen: {{{}}}\nrules: []\n", listeners.join(", "));
    let mut server = Server::start_in(Scratch::new(), &config);
    for address in [server.http, server.grpc, server.resp, server.admin] {
        let connect = || {
            let stream = TcpStream::connect(address).unwrap();
            let timeout = Some(Duration::from_secs(20));
            stream.set_read_timeout(timeout).unwrap();
            stream
        };
        let open = [connect(), connect()];
        // The kernel passes connections to the listener in order, so the last connection is the
        // third, which exceeds the limit of two.
        let refused = connect().read(&mut [0; 64]);
        let is_closed = match &refused {
            Ok(count) => *count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        };
        assert!(is_closed, "{address}: {refused:?}");
        let logged = "the client has reached `max_connections_per_client`";
        server.wait_for(&[logged, &format!("listener={address}"), "connections=2"]);
        for mut stream in open {
            stream.set_nonblocking(true).unwrap();
            let is_open = match stream.read(&mut [0; 64]) {
                Ok(count) => count > 0,
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            };
            assert!(is_open, "{address}");
        }
    }
}
