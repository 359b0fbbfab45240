//! Tests Traefik with the example configuration and a real Tidegate server.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use crate::{
    servers::reserve_port,
    support::{Ask, Process, Scratch, Server, count_admitted, repository},
};

/// The maximum number of requests that the test sends until Traefik forwards a request.
const REQUESTS: u32 = 1_000;
/// The pause after each request.
const PAUSE: Duration = Duration::from_millis(20);

/// A Traefik with the example's configuration, and the Tidegate server that it calls.
#[derive(Debug)]
pub(crate) struct Traefik {
    pub(crate) server: Server,
    pub(crate) front: SocketAddr,
    application: Application,
    _process: Process,
    _scratch: Scratch,
}

impl Traefik {
    /// Starts Traefik, and a Tidegate server with the quickstart file.
    pub(crate) fn start() -> Self {
        let server = Server::quickstart();
        let application = Application::start();
        let read = |name| {
            let file = repository().join("examples/traefik").join(name);
            let text = fs::read_to_string(file).unwrap();
            text.replace("examples/traefik/", "")
                .replace("127.0.0.1:8080", &server.http.to_string())
                .replace("127.0.0.1:8001", &application.address.to_string())
        };
        let scratch = Scratch::new();
        scratch.write("dynamic.yaml", &read("dynamic.yaml"));
        let front = SocketAddr::from(([127, 0, 0, 1], reserve_port()));
        let config = read("traefik.yaml").replace("127.0.0.1:8000", &front.to_string());
        scratch.write("traefik.yaml", &config);
        let program = repository().join("target/test-traefik/traefik");
        let mut traefik = Command::new(program);
        traefik.arg("--configFile=traefik.yaml");
        let process = Process::start(traefik.current_dir(scratch.path()));
        assert!(
            forwards(front),
            "Traefik did not start; run scripts/setup, or run examples/traefik by hand"
        );
        Self {
            server,
            front,
            application,
            _process: process,
            _scratch: scratch,
        }
    }
}

/// An application that answers each request with 200.
#[derive(Debug)]
struct Application {
    address: SocketAddr,
    /// The heads of the requests that the application has received, in lower case.
    received: Arc<Mutex<Vec<String>>>,
}

impl Application {
    /// Starts an application, which runs until the process ends.
    fn start() -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let received = Arc::<Mutex<Vec<String>>>::default();
        let heads = Arc::clone(&received);
        thread::spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                // The requests of the test have no bodies.
                let lines: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                heads.lock().unwrap().push(lines.join("\n").to_lowercase());
                let response = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 13\r\n\r\nHere you are\n";
                // A client that has disconnected needs no response.
                let _ = (&stream).write_all(response.as_bytes());
            }
        });
        Self { address, received }
    }
}

/// Waits until Traefik forwards requests at `front`.
fn forwards(front: SocketAddr) -> bool {
    (0..REQUESTS).any(|_| {
        let is_open = TcpStream::connect(front).is_ok();
        // Until Traefik has read its routes, it responds with 404.
        let is_ready = is_open && Ask::get(front, "/ready").send().status == 200;
        if !is_ready {
            thread::park_timeout(PAUSE);
        }
        is_ready
    })
}

#[test]
fn traefik_denies_with_429_and_retry_after() {
    let traefik = Traefik::start();
    let login = || {
        let login = Ask::new("POST", traefik.front, "//login?x");
        login.header("x-forwarded-for", "6.6.6.6").send()
    };
    for number in 1..=10 {
        let answer = login();
        let seen = (answer.status, &*answer.body);
        assert_eq!(seen, (200, "Here you are\n"), "{number}");
    }
    let denied = login();
    assert_eq!(denied.status, 429, "{denied:?}");
    let wait = denied.header("retry-after").parse::<u64>().unwrap();
    assert!((3_500..=3_600).contains(&wait), "{wait}");
    let policy = "\"1/h capacity 10\";q=10;w=36000";
    assert_eq!(denied.header("ratelimit-policy"), policy);
    assert_eq!(Ask::get(traefik.front, "/login").send().status, 200);
}

#[test]
fn concurrent_requests_are_admitted_exactly() {
    let traefik = Traefik::start();
    let front = traefik.front;
    let admitted = count_admitted(80, |_| Ask::new("POST", front, "/login"));
    assert_eq!(admitted, 10);
}

#[test]
fn the_application_gets_the_rate_limit_fields_of_tidegate() {
    let traefik = Traefik::start();
    let login = Ask::new("POST", traefik.front, "/login")
        .header("ratelimit", "forged")
        .header("ratelimit-policy", "forged");
    assert_eq!(login.send().status, 200);
    let heads = traefik.application.received.lock().unwrap();
    let head = heads.iter().find(|head| head.starts_with("post /login"));
    let head = head.unwrap();
    for field in [
        "\nratelimit-policy: \"1/h capacity 10\";q=10;w=36000",
        "\nratelimit: \"1/h capacity 10\";r=9;",
    ] {
        assert!(head.contains(field), "{field} is not in {head}");
    }
    assert!(!head.contains("forged"), "{head}");
}

#[test]
fn a_client_cannot_describe_another_request() {
    let traefik = Traefik::start();
    let blocked = traefik
        .server
        .operate(&["block", "api-per-customer", "acme"]);
    assert!(blocked.status.success(), "{blocked:?}");
    let api = || Ask::get(traefik.front, "/api/orders").header("x-customer", "acme");
    assert_eq!(api().send().status, 429);
    for header in ["x-original-uri", "x-forwarded-uri"] {
        assert_eq!(
            api().header(header, "/about").send().status,
            429,
            "{header}"
        );
    }
}
