//! Tests of routing to upstreams, and of load balancing between their endpoints.

use crate::{
    listener::TestListener,
    upstream::{ServerConnection, Upstream},
};

fn named(name: &'static str) -> Upstream {
    Upstream::start(move |connection: &mut ServerConnection| {
        while connection.head().is_some() {
            connection.send(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{name}",
                name.len()
            ));
        }
    })
}

#[test]
fn the_first_upstream_whose_conditions_match_is_used() {
    let (api, admin, posts) = (named("api"), named("admin"), named("posts"));
    let listener = TestListener::open(&format!(
        "proxy:
  listen: 127.0.0.1:0
  upstreams:
    - {{name: api, urls: [\"{}\"], when: {{path: /api/**}}}}
    - {{name: admin, urls: [\"{}\"], when: {{host: [admin.example, admin.internal]}}}}
    - {{name: posts, urls: [\"{}\"], when: {{method: POST, path: {{not: /api/**}}}}}}
",
        api.url(),
        admin.url(),
        posts.url()
    ));
    let mut client = listener.connect();
    for (method, path, host, expected) in [
        ("GET", "/api/x?y", "h", "api"),
        ("GET", "/%61pi/x", "h", "api"),
        ("GET", "//api///x", "h", "api"),
        ("GET", "/api/x", "admin.example", "api"),
        ("GET", "/x", "ADMIN.example:8080", "admin"),
        ("POST", "/x", "h", "posts"),
    ] {
        let answer = client.ask(method, path, &[("host", host)], b"");
        assert_eq!(answer.body, expected, "{method} {path} at {host}");
    }
    let answer = client.ask("GET", "/x", &[], b"");
    assert_eq!(answer.status, 404);
    assert_eq!(answer.problem(), "no upstream matches this host and path");
    // Upstreams receive paths unchanged, and may resolve these segments.
    for path in ["/x/../api/x", "/api/%2e%2e/x", "/api/..;/x"] {
        let answer = client.ask("GET", path, &[("host", "admin.example")], b"");
        assert_eq!(answer.status, 400, "{path}");
        let problem = "the path has segments `.` or `..`; send the resolved path";
        assert_eq!(answer.problem(), problem);
    }
}

#[test]
fn endpoints_share_the_load() {
    let (one, two) = (named("one"), named("two"));
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: [\"{}\", \"{}\"]}}]}}\n",
        one.url(),
        two.url()
    ));
    for _ in 0..10 {
        assert_eq!(listener.get("/").status, 200);
    }
    assert_eq!((one.heads().len(), two.heads().len()), (5, 5));
}

#[test]
fn the_endpoint_with_the_fewest_requests_is_used() {
    let busy = Upstream::silent();
    let free = named("free");
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: [\"{}\", \"{}\"]}}]}}\n",
        busy.url(),
        free.url()
    ));
    let mut waiting = Vec::new();
    while busy.heads().is_empty() {
        let mut client = listener.connect();
        client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
        waiting.push(client);
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
    for _ in 0..10 {
        assert_eq!(listener.get("/").body, "free");
    }
}

#[test]
fn an_unreachable_endpoint_fails_no_request() {
    let there = named("there");
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: [\"http://{}\", \"{}\"]}}]}}\n",
        Upstream::closed_address(),
        there.url()
    ));
    for _ in 0..10 {
        let answer = listener.connect().ask("POST", "/", &[], b"");
        assert_eq!(answer.body, "there");
    }
}
