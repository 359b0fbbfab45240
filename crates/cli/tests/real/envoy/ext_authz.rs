//! Tests with Envoy's filter `ext_authz`, over gRPC and over HTTP, with the configuration of the
//! example.

use std::{fs, net::SocketAddr};

use crate::support::{Answer, Ask, Envoy, Server, count_admitted, repository};

/// An Envoy with the example's configuration, and the Tidegate server that it calls.
#[derive(Debug)]
pub(crate) struct Authorized {
    pub(crate) server: Server,
    /// The addresses of two Envoy listeners. The first calls Tidegate over gRPC, and the second
    /// over HTTP.
    pub(crate) fronts: [SocketAddr; 2],
    _envoy: Envoy,
}

impl Authorized {
    /// Starts Envoy with the rules of the example.
    pub(crate) fn start() -> Self {
        Self::in_front_of(Server::example("envoy-ext-authz/tidegate.yaml"))
    }

    fn in_front_of(server: Server) -> Self {
        let file = repository().join("examples/envoy-ext-authz/envoy.yaml");
        let http = format!("port_value: {}}}", server.http.port());
        let bootstrap = fs::read_to_string(file)
            .unwrap()
            .replace("port_value: 8080}", &http)
            // The machine may be busy. After a timeout, Envoy would admit the request.
            .replace("timeout: 0.25s", "timeout: 10s");
        let envoy = Envoy::start(&bootstrap, server.grpc);
        let fronts = ["grpc", "http"].map(|name| envoy.listener(name));
        Self {
            server,
            fronts,
            _envoy: envoy,
        }
    }
}

/// Returns the status, the `RateLimit` header and the body.
fn shown(answer: &Answer) -> (u16, &str, &str) {
    (answer.status, answer.header("ratelimit"), &answer.body)
}

#[test]
fn both_protocols_admit_the_same_number_and_set_the_same_fields() {
    let authorized = Authorized::start();
    for front in authorized.fronts {
        let login = || Ask::new("POST", front, "//login?x").header("x-forwarded-for", "6.6.6.6");
        for left in (0..10).rev() {
            let answer = login().send();
            let (status, state, body) = shown(&answer);
            assert_eq!((status, body), (200, "Here you are\n"), "{answer:?}");
            assert!(state.contains(&format!(";r={left};")), "{answer:?}");
            let policy = "\"1/h capacity 10\";q=10;w=36000";
            assert_eq!(answer.header("ratelimit-policy"), policy);
        }
        let denied = login().send();
        assert_eq!(denied.status, 429, "{denied:?}");
        assert!(denied.header("ratelimit").contains(";r=0;t="), "{denied:?}");
        let wait = denied.header("retry-after").parse::<u64>().unwrap();
        assert!((3_500..=3_600).contains(&wait), "{wait}");
        assert!(denied.header("content-type").contains("json"), "{denied:?}");
        assert!(!denied.body.contains("login-brute-force"), "{denied:?}");
        assert_eq!(Ask::get(front, "/login").send().status, 200);
    }
}

#[test]
fn concurrent_requests_are_admitted_exactly() {
    let rules = "grpc: {authorization: true}\nrules: [{name: all, limits: [{algorithm: fixed_window, limit: 40, window: 1d, anchor: first_request}]}]\n";
    let authorized = Authorized::in_front_of(Server::start(rules));
    let fronts = authorized.fronts;
    let admitted = count_admitted(160, |client| Ask::get(fronts[client % 2], "/"));
    assert_eq!(admitted, 40, "160 requests over both protocols");
}

#[test]
fn a_client_can_choose_neither_its_customer_nor_the_form_of_its_request() {
    let authorized = Authorized::start();
    let server = &authorized.server;
    for customer in ["partner", "acme"] {
        let blocked = server.operate(&["block", "api-per-customer", customer]);
        assert!(blocked.status.success(), "{blocked:?}");
    }
    let [grpc, http] = authorized.fronts;
    for front in [grpc, http] {
        let api = |name: &str, value: &str| Ask::get(front, "/api/orders").header(name, value);
        assert_eq!(api("x-customer", "acme").send().status, 429);
        let other = format!("customer-of-{}", front.port());
        assert_eq!(api("x-customer", &other).send().status, 200);
        let twice = api("x-customer", "acme").header("x-customer", "b").send();
        assert_eq!(twice.status, 400, "{twice:?}");
        assert!(twice.body.contains("has several values"), "{twice:?}");
        assert_eq!(api("x_customer", "other").send().status, 400, "an alias");
        let dots = Ask::get(front, "/x/../api/orders").send();
        assert_eq!(dots.status, 400, "{dots:?}");
        assert_eq!(Ask::get(front, "/health").send().status, 200);
    }
    let partner = |front| Ask::get(front, "/api/partner").header("x-customer", "x");
    assert_eq!(partner(grpc).send().status, 429, "an entry of the route");
    assert_eq!(partner(http).send().status, 200, "HTTP has no such entries");
    let metrics = server.metrics();
    for listener in ["grpc", "http"] {
        let counted = format!("tidegate_bad_requests_total{{listener=\"{listener}\"}} 2\n");
        assert!(metrics.contains(&counted), "{metrics}");
    }
}

#[test]
fn without_tidegate_requests_pass() {
    let authorized = Authorized::start();
    authorized.server.stop();
    for front in authorized.fronts {
        let answer = Ask::get(front, "/api/orders").send();
        assert_eq!(shown(&answer), (200, "", "Here you are\n"));
    }
}
