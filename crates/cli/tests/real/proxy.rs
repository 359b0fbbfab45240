//! Tests of the reverse proxy example with real programs: curl as the client and nginx as the
//! upstream.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    process::Command,
    thread::spawn,
};

use crate::{
    servers::reserve_port,
    support::{Ask, EVERY_LISTENER, Process, Scratch, Server, repository, run, tool},
};

/// The size of a body that is too large to be buffered, in bytes.
const LARGE: u64 = 1 << 30;

/// The maximum resident memory of the proxy while it forwards such a body, in bytes. The maximum
/// includes the binary and its debug symbols.
const MOST_BYTES: u64 = 64 << 20;

/// The example's proxy, and its upstream.
#[derive(Debug)]
pub(crate) struct Fronted {
    pub(crate) server: Server,
    pub(crate) front: SocketAddr,
    pub(crate) shop: [SocketAddr; 2],
    directory: Scratch,
    _nginx: Process,
}

impl Fronted {
    pub(crate) fn start() -> Self {
        let config = example("shop.conf");
        let directory = Scratch::new();
        let [one, other] = [reserve_port(), reserve_port()];
        let config = config.replace(":8001", &format!(":{one}"));
        directory.write("config", &config.replace(":8002", &format!(":{other}")));
        let mut nginx = Command::new(tool("nginx"));
        let path = directory.path();
        nginx.arg("-p").arg(path).arg("-c").arg(path.join("config"));
        let mut nginx = Process::start(&mut nginx);
        nginx.wait_for(&["start worker process"]);
        let shop = [one, other].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let (server, front) = before(shop);
        Self {
            server,
            front,
            shop,
            directory,
            _nginx: nginx,
        }
    }
}

fn example(name: &str) -> String {
    fs::read_to_string(repository().join("examples/proxy").join(name)).unwrap()
}

/// Starts the example's server in front of these upstreams. Returns the server and the proxy's
/// address.
fn before([one, other]: [SocketAddr; 2]) -> (Server, SocketAddr) {
    let config = example("tidegate.yaml");
    let (_, config) = config.split_once("\nproxy:\n").unwrap();
    let config = config
        .replace("127.0.0.1:8001", &one.to_string())
        .replace("127.0.0.1:8002", &other.to_string())
        .replace("127.0.0.1:8000", "127.0.0.1:0");
    let server = Server::start_in(Scratch::new(), &format!("{EVERY_LISTENER}proxy:\n{config}"));
    // The proxy listener is opened before the admin listener, so the proxy's log line has already
    // been read.
    let message = server.log_text().replace('"', "");
    let line = message.lines().find(|line| line.contains("listener=proxy"));
    let address = line.and_then(|line| line.split("address=").nth(1)).unwrap();
    (server, address.trim().parse().unwrap())
}

/// Runs curl and returns its output.
fn curl(args: &[&str]) -> String {
    let output = run(Command::new(tool("curl")).args(["-sS"]).args(args));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "curl {args:?}: {message}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a response in a form that can be compared: its header lines are sorted, and headers that
/// vary between requests or connections are removed.
fn lasting(answer: &str) -> String {
    let of_the_moment = ["date:", "connection:", "ratelimit"];
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut head: Vec<String> = head.lines().map(str::to_ascii_lowercase).collect();
    // Ignore the reason phrase, which has no meaning and differs in nginx.
    head[0].truncate("http/1.1 200".len());
    head.retain(|line| !of_the_moment.iter().any(|name| line.starts_with(name)));
    head.sort();
    format!("{}\n\n{body}", head.join("\n"))
}

#[test]
fn nginx_responses_are_the_same_through_the_proxy() {
    let fronted = Fronted::start();
    let exports = fronted.directory.join("exports");
    fs::create_dir(&exports).unwrap();
    fs::write(exports.join("orders.txt"), "one\ntwo\nthree\n").unwrap();
    for args in [
        &["/about"][..],
        &["/exports/orders.txt"],
        &["-I", "/exports/orders.txt"],
        &["-r", "4-6", "/exports/orders.txt"],
        &[
            "-H",
            "If-Modified-Since: Fri, 31 Dec 2100 00:00:00 GMT",
            "/exports/orders.txt",
        ],
        &["/exports/none.txt"],
        &["-d", "a=1", "/about"],
        &["-H", "Expect: 100-continue", "-d", "a=1", "/about"],
        &["-H", "Transfer-Encoding: chunked", "-d", "a=1", "/about"],
        &["-X", "DELETE", "/exports/orders.txt"],
    ] {
        let (path, options) = args.split_last().unwrap();
        let [through, direct] = [fronted.front, fronted.shop[0]].map(|address| {
            let url = format!("http://{address}{path}");
            let mut args = vec!["-i"];
            args.extend(options);
            args.push(&url);
            lasting(&curl(&args).replace("HTTP/1.1 100 Continue\r\n\r\n", ""))
        });
        // Apart from the added `Via`, the proxy makes no changes.
        assert_eq!(
            through.replace("via: 1.1 tidegate\n", ""),
            direct,
            "{args:?}"
        );
    }
}

#[test]
fn a_large_response_passes_in_bounded_memory() {
    let fronted = Fronted::start();
    let exports = fronted.directory.join("exports");
    fs::create_dir(&exports).unwrap();
    // The file is sparse and uses no disk space.
    let file = fs::File::create(exports.join("all")).unwrap();
    file.set_len(LARGE).unwrap();
    let url = format!("http://{}/exports/all", fronted.front);
    let args = [
        "-o",
        "/dev/null",
        "-w",
        "%{http_code} %{size_download}",
        &url,
    ];
    assert_eq!(curl(&args), format!("200 {LARGE}"));
    assert_bounded(&fronted.server);
}

#[test]
fn a_large_request_passes_in_bounded_memory() {
    let sink = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = sink.local_addr().unwrap();
    spawn(move || {
        for mut stream in sink.incoming().map_while(Result::ok) {
            spawn(move || swallow(&mut stream));
        }
    });
    let (server, front) = before([address, SocketAddr::from(([127, 0, 0, 1], reserve_port()))]);
    let directory = Scratch::new();
    let file = directory.join("large");
    fs::File::create(&file).unwrap().set_len(LARGE).unwrap();
    let url = format!("http://{front}/upload");
    let file = file.to_str().unwrap();
    let received = curl(&["--http2-prior-knowledge", "-T", file, &url]);
    assert_eq!(received, LARGE.to_string());
    assert_bounded(&server);
}

/// Reads a request with a body of [`LARGE`] bytes and responds with the received size. Responds to
/// any other request immediately.
fn swallow(stream: &mut std::net::TcpStream) {
    let (mut buffer, mut head) = (vec![0; 64 << 10], Vec::new());
    let end = loop {
        let read = stream.read(&mut buffer).unwrap_or(0);
        if read == 0 {
            return;
        }
        head.extend_from_slice(&buffer[..read]);
        if let Some(at) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
    };
    let mut received = (head.len() - end) as u64;
    if head.starts_with(b"PUT") {
        while received < LARGE {
            match stream.read(&mut buffer) {
                Ok(read) if read > 0 => received += read as u64,
                _ => return,
            }
        }
    }
    let text = received.to_string();
    let _ = write!(
        stream,
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    );
}

fn assert_bounded(server: &Server) {
    let most = server.peak_bytes();
    assert!(
        most < MOST_BYTES,
        "forwarding {LARGE} bytes used {most} bytes of memory"
    );
}

#[test]
fn an_upstream_outage_and_its_end_are_logged_once() {
    let port = reserve_port();
    let config = format!(
        "{EVERY_LISTENER}proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'http://127.0.0.1:{port}'}}]}}\n"
    );
    let mut server = Server::start_in(Scratch::new(), &config);
    let proxy = server.proxy();
    for _ in 0..5 {
        assert_eq!(Ask::get(proxy, "/").send().status, 502);
    }
    let address = format!("http://127.0.0.1:{port}");
    server.wait_for(&[
        "WARN",
        "upstream endpoint failing",
        "upstream=app",
        &address,
        "unreachable",
        "Connection refused",
    ]);
    let socket = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let responder = spawn(move || {
        let (mut stream, _) = socket.accept().unwrap();
        let mut head = [0; 1_024];
        assert!(stream.read(&mut head).unwrap() > 0);
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .unwrap();
    });
    assert_eq!(Ask::get(proxy, "/").send().status, 200);
    responder.join().unwrap();
    let next = server.wait_for(&["endpoint"]);
    assert!(
        next.contains("endpoint recovered") && next.contains("INFO"),
        "{next}"
    );
}
