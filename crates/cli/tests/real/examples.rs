//! Tests of nginx and Caddy with the example configurations and a real Tidegate server.

use std::{fs, net::SocketAddr, process::Command, thread, time::Duration};

use serde_json::json;

use crate::{
    servers::reserve_port,
    support::{
        Answer, Ask, EVERY_LISTENER, Process, Scratch, Server, count_admitted, repository, tool,
    },
};

/// A proxy from an example, and the Tidegate server that it uses.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) server: Server,
    pub(crate) front: SocketAddr,
    _process: Process,
    scratch: Scratch,
}

impl Proxy {
    pub(crate) fn nginx() -> Self {
        Self::start_nginx(Server::quickstart(), "examples/nginx/nginx.conf")
    }

    /// Starts nginx with timeouts that are longer than those of the example, because requests pass
    /// after a timeout.
    fn patient_nginx() -> Self {
        let config = fs::read_to_string(repository().join("examples/nginx/nginx.conf")).unwrap();
        let patient = config
            .replace("proxy_connect_timeout 100ms;", "proxy_connect_timeout 10s;")
            .replace("proxy_read_timeout 1s;", "proxy_read_timeout 10s;");
        assert_eq!(patient.matches("_timeout 10s;").count(), 2);
        Self::start_changed_nginx(Server::quickstart(), &patient)
    }

    /// Starts nginx in front of a login service. Only failed logins are charged.
    pub(crate) fn nginx_login() -> Self {
        let rules = fs::read_to_string(repository().join("examples/nginx-login/rules.yaml"));
        let rules = rules.unwrap().replace("listen: {grpc: off, resp: off}", "");
        Self::start_nginx(Server::start(&rules), "examples/nginx-login/nginx.conf")
    }

    /// Starts nginx with a Lua script that calls Tidegate over the Redis protocol.
    pub(crate) fn nginx_lua() -> Self {
        Self::start_nginx(Server::quickstart(), "examples/nginx-lua/nginx.conf")
    }

    fn start_nginx(server: Server, config: &str) -> Self {
        let config = fs::read_to_string(repository().join(config)).unwrap();
        Self::start_changed_nginx(server, &config)
    }

    /// Starts nginx with the configuration `text`.
    fn start_changed_nginx(server: Server, text: &str) -> Self {
        Self::start_with(server, text, "start worker process", |scratch| {
            let mut nginx = Command::new(tool("nginx"));
            nginx
                .arg("-p")
                .arg(scratch.path())
                .arg("-c")
                .arg(scratch.join("config"));
            nginx
        })
    }

    /// Starts nginx with njs. The timeouts of nginx are longer than those of the example, because
    /// requests pass after a timeout.
    pub(crate) fn nginx_njs() -> Self {
        let config = repository().join("examples/nginx-njs/nginx.conf");
        let config = fs::read_to_string(config).unwrap();
        let patient = config.replace("0ms;", "0s;");
        assert_ne!(patient, config);
        Self::start_changed_nginx(Server::quickstart(), &patient)
    }

    pub(crate) fn caddy() -> Self {
        Self::start_caddy(Server::quickstart(), "examples/caddy/Caddyfile")
    }

    /// Starts Caddy in front of a login service where only failed logins are limited.
    pub(crate) fn caddy_login() -> Self {
        Self::changed_caddy_login(|config| config)
    }

    /// Starts Caddy in front of a login service, with a changed configuration.
    fn changed_caddy_login(change: impl Fn(String) -> String) -> Self {
        let rules = fs::read_to_string(repository().join("examples/caddy-login/rules.yaml"));
        let rules = rules.unwrap().replace("listen: {grpc: off, resp: off}", "");
        let server = Server::start(&rules);
        Self::start_changed_caddy(server, "examples/caddy-login/Caddyfile", change)
    }

    fn start_caddy(server: Server, config: &str) -> Self {
        Self::start_changed_caddy(server, config, |config| config)
    }

    fn start_changed_caddy(
        server: Server,
        config: &str,
        change: impl Fn(String) -> String,
    ) -> Self {
        let text = change(fs::read_to_string(repository().join(config)).unwrap());
        Self::start_with(server, &text, "serving initial configuration", |scratch| {
            let mut caddy = Command::new(tool("caddy"));
            caddy
                .args(["run", "--adapter", "caddyfile", "--config"])
                .arg(scratch.join("config"));
            // Caddy's data directories, where it would store certificates.
            caddy
                .env("HOME", scratch.path())
                .env("XDG_DATA_HOME", scratch.path())
                .env("XDG_CONFIG_HOME", scratch.path());
            caddy
        })
    }

    /// Starts a proxy with the configuration `text`.
    fn start_with(
        server: Server,
        text: &str,
        ready: &str,
        command: impl Fn(&Scratch) -> Command,
    ) -> Self {
        let examples = format!("{}/examples/", repository().display());
        let resp = format!("\"127.0.0.1\", {}", server.resp.port());
        let text = text
            .replace("127.0.0.1:8080", &server.http.to_string())
            .replace("\"127.0.0.1\", 6380", &resp)
            .replace("examples/", &examples);
        let scratch = Scratch::new();
        let [front, application, settlement] = [(); 3].map(|()| reserve_port());
        let text = text
            .replace(":8000", &format!(":{front}"))
            .replace(":8001", &format!(":{application}"))
            .replace(":8002", &format!(":{settlement}"));
        scratch.write("config", &text);
        let mut process = Process::start(&mut command(&scratch));
        process.wait_for(&[ready]);
        Self {
            server,
            front: SocketAddr::from(([127, 0, 0, 1], front)),
            _process: process,
            scratch,
        }
    }

    fn ask(&self, path: &str) -> Ask {
        Ask::get(self.front, path)
    }

    fn api(&self, key: &str) -> Answer {
        self.ask("/api/orders").header("x-api-key", key).send()
    }
}

#[test]
fn nginx_denies_with_429_and_retry_after() {
    assert_limits(&Proxy::nginx());
}

#[test]
fn nginx_logs_the_rule_and_the_key() {
    let proxy = Proxy::nginx();
    for _ in 0..2 {
        proxy.api("acme-key");
    }
    proxy.ask("/about").send();
    let log = proxy.scratch.join("access.log");
    let expected = [
        "\"GET /api/orders HTTP/1.1\" 200 rule=\"api-per-customer\" key=\"acme\"",
        "\"GET /api/orders HTTP/1.1\" 429 rule=\"api-per-customer\" key=\"acme\"",
        "\"GET /about HTTP/1.1\" 200 rule=\"\" key=\"\"",
    ];
    // nginx writes a log line only after it has sent the response, so the last line may be delayed.
    let lines = || fs::read_to_string(&log).unwrap_or_default();
    for _ in 0..3_000 {
        if lines().lines().count() == expected.len() {
            break;
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    let lines = lines();
    assert_eq!(lines.lines().count(), expected.len(), "{lines}");
    for (line, expected) in lines.lines().zip(expected) {
        assert!(line.ends_with(expected), "{lines}");
    }
}

#[test]
fn caddy_denies_with_429_and_retry_after() {
    assert_limits(&Proxy::caddy());
}

/// Sends ten logins from one client, each with the same forged `X-Forwarded-For` address. The
/// logins must be counted for the client's real address.
fn assert_limits(proxy: &Proxy) {
    let login = || Ask::new("POST", proxy.front, "/login").header("x-forwarded-for", "6.6.6.6");
    for number in 1..=10 {
        let answer = login().send();
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (200, "Here you are\n"),
            "{number}"
        );
        assert_eq!(
            answer.header("ratelimit-policy"),
            "\"1/h capacity 10\";q=10;w=36000"
        );
        assert!(
            answer
                .header("ratelimit")
                .contains(&format!(";r={}", 10 - number)),
            "{answer:?}"
        );
        assert_eq!(answer.header("retry-after"), "");
    }
    let denied = login().header("x-real-ip", "6.6.6.6").send();
    assert_eq!(denied.status, 429);
    let wait = denied.header("retry-after").parse::<u64>().unwrap();
    assert!((3_500..=3_600).contains(&wait), "{wait}");
    assert!(
        denied
            .header("ratelimit")
            .starts_with("\"1/h capacity 10\";r=0;t="),
        "{denied:?}"
    );

    assert_eq!(
        proxy.ask("/login").send().status,
        200,
        "the rule applies to POST"
    );
    assert_eq!(
        proxy.ask("/about").send().status,
        200,
        "no rule applies to this path"
    );
    let spent = proxy
        .server
        .operate(&["inspect", "login-brute-force", "127.0.0.1"]);
    assert!(
        spent.status.success(),
        "counted under the client's own address: {spent:?}"
    );
}

/// Without `proxy_set_header Host`, nginx would send the name of its upstream, and no rule for a
/// host would apply.
#[test]
fn a_rule_for_a_host_applies_behind_nginx() {
    let rules = "rules: [{name: host, when: {host: 127.0.0.1}, limits: [2/h]}]";
    let proxy = Proxy::start_nginx(Server::start(rules), "examples/nginx/nginx.conf");
    let statuses = [(); 3].map(|()| proxy.ask("/").send().status);
    assert_eq!(statuses, [200, 200, 429]);
}

#[test]
fn nginx_reuses_its_connection_after_an_allowed_request() {
    let proxy = Proxy::nginx();
    let accepted = || {
        let metrics = proxy.server.metrics();
        let sample = "tidegate_connections_accepted_total{listener=\"http\"} ";
        let (_, rest) = metrics.split_once(sample).unwrap();
        rest.lines().next().unwrap().parse::<u32>().unwrap()
    };
    let before = accepted();
    for _ in 0..5 {
        assert_eq!(proxy.ask("/about").send().status, 200);
    }
    assert_eq!(accepted() - before, 1);
}

/// Sixty parallel guesses with the limit 5: exactly five reach the application, and the guesses and
/// the accepted logins have bodies.
#[test]
fn caddy_admits_exactly_as_many_failed_logins_as_the_limit_allows() {
    let proxy = Proxy::caddy_login();
    let front = proxy.front;
    let login = |password: &str| {
        let login = Ask::new("POST", front, "/login").body(&json!({"user": "alice"}));
        login.header("password", password).send()
    };
    for _ in 0..8 {
        let accepted = login("open sesame");
        assert_eq!((accepted.status, &*accepted.body), (303, ""));
        assert_eq!(accepted.header("location"), "/welcome");
        assert_eq!(accepted.header("set-cookie"), "session=1; HttpOnly");
    }
    let statuses: Vec<u16> = thread::scope(|scope| {
        let guesses: Vec<_> = (0..60)
            .map(|_| scope.spawn(|| login("guess").status))
            .collect();
        let statuses = guesses.into_iter().map(|guess| guess.join().unwrap());
        statuses.collect()
    });
    let count = |wanted| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(401), count(429)), (5, 55), "{statuses:?}");
    // Caddy's `path` matcher ignores case, so the rule must also ignore case.
    let uppercase = Ask::new("POST", front, "/LOGIN").body(&json!({"user": "alice"}));
    assert_eq!(uppercase.header("password", "guess").send().status, 429);
    let denied = login("open sesame");
    assert_eq!(denied.status, 429, "the limit is used up");
    assert_ne!(denied.header("retry-after"), "");
}

#[test]
fn caddy_settles_only_the_reservation_that_it_has_made() {
    let proxy = Proxy::caddy_login();
    let login = Ask::new("POST", proxy.front, "/login").header("password", "open sesame");
    let accepted = login.header("tidegate-reservation", "forged").send();
    assert_eq!(accepted.status, 303);
    assert_eq!(left(&proxy), 5, "nothing is charged");
}

#[test]
fn caddy_keeps_an_accepted_login_if_it_cannot_settle() {
    let gone = format!("127.0.0.1:{} {{\n\t\tmethod POST", reserve_port());
    let proxy = Proxy::changed_caddy_login(|config| {
        let changed = config.replace("127.0.0.1:8080 {\n\t\tmethod POST", &gone);
        assert_ne!(changed, config);
        changed
    });
    let login = Ask::new("POST", proxy.front, "/login").header("password", "open sesame");
    let accepted = login.send();
    assert_eq!(
        (accepted.status, accepted.header("location")),
        (303, "/welcome")
    );
    assert_eq!(left(&proxy), 4, "the login stays charged");
}

/// Returns how many failed logins are left for 127.0.0.1.
fn left(proxy: &Proxy) -> u64 {
    let path = "/v1/keys/failed-logins/127.0.0.1";
    let key = Ask::get(proxy.server.admin, path).send().json();
    key["limits"][0]["remaining"].as_u64().unwrap()
}

#[test]
fn nginx_with_lua_uses_pooled_connections() {
    let proxy = Proxy::nginx_lua();
    let login = || Ask::new("POST", proxy.front, "//login?x").send();
    for left in (0..10).rev() {
        let answer = login();
        assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
        assert_eq!(answer.header("x-ratelimit-limit"), "10");
        assert_eq!(answer.header("x-ratelimit-remaining"), left.to_string());
    }
    let denied = login();
    assert_scripted(&proxy, &denied, "resp");
    assert_eq!(proxy.ask("/about").send().header("x-ratelimit-limit"), "");
}

/// Checks a proxy whose script calls `listener` over one connection. `denied` is the response to a
/// login after the limit was used up.
fn assert_scripted(proxy: &Proxy, denied: &Answer, listener: &str) {
    assert_eq!(denied.status, 429);
    let wait = denied.header("retry-after").parse::<u64>().unwrap();
    assert!((3_500..=3_600).contains(&wait), "{wait}");
    assert_eq!(proxy.ask("/x/../login").send().status, 400);
    let one_key = || proxy.ask("/about").header("x-api-key", "acme-key");
    assert_eq!(one_key().send().status, 200);
    let two_keys = one_key().header("x-api-key", "other").send();
    assert_eq!(two_keys.status, 400, "several keys");
    assert_customers(proxy);
    let metrics = proxy.server.metrics();
    let accepted = format!("tidegate_connections_accepted_total{{listener=\"{listener}\"}} 1\n");
    assert!(metrics.contains(&accepted), "{metrics}");
    // Otherwise, the server logs a warning about the example.
    let unused = format!("tidegate_unknown_entries_total{{listener=\"{listener}\"}} 0\n");
    assert!(metrics.contains(&unused), "{metrics}");
}

#[test]
fn nginx_with_lua_admits_the_exact_number_of_concurrent_requests() {
    assert_exact_under_concurrency(&Proxy::nginx_lua());
}

#[test]
fn nginx_with_njs_sends_subrequests_over_pooled_connections() {
    let proxy = Proxy::nginx_njs();
    for left in (0..10).rev() {
        let answer = Ask::new("POST", proxy.front, "//login?x")
            .body(&json!({"user": "alice"}))
            .send();
        assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
        let remaining = format!("\"1/h capacity 10\";r={left};t=");
        let field = answer.header("ratelimit");
        assert!(field.starts_with(&remaining), "{field}");
    }
    let denied = Ask::new("POST", proxy.front, "/login").send();
    assert_scripted(&proxy, &denied, "http");
    assert_eq!(proxy.ask("/about").send().header("ratelimit"), "");
}

#[test]
fn nginx_admits_the_exact_number_of_concurrent_requests() {
    assert_exact_under_concurrency(&Proxy::patient_nginx());
}

#[test]
fn caddy_admits_the_exact_number_of_concurrent_requests() {
    assert_exact_under_concurrency(&Proxy::caddy());
}

#[test]
fn nginx_with_njs_admits_the_exact_number_of_concurrent_requests() {
    assert_exact_under_concurrency(&Proxy::nginx_njs());
}

/// 80 requests are sent at the same time, and the limit is 10.
fn assert_exact_under_concurrency(proxy: &Proxy) {
    let front = proxy.front;
    let admitted = count_admitted(80, |_| Ask::new("POST", front, "/login"));
    assert_eq!(admitted, 10);
}

#[test]
fn nginx_with_lua_fails_open_without_tidegate() {
    assert_fails_open(Proxy::nginx_lua());
}

#[test]
fn nginx_with_njs_fails_open_without_tidegate() {
    assert_fails_open(Proxy::nginx_njs());
}

fn assert_fails_open(proxy: Proxy) {
    let Proxy {
        server,
        front,
        _process,
        scratch: _scratch,
    } = proxy;
    server.stop();
    let answer = Ask::get(front, "/api/orders").send();
    assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
}

/// If Tidegate responds with an error that has nothing to do with the request, nginx must forward
/// the request.
#[test]
fn nginx_with_lua_fails_open_without_the_password() {
    let listen = EVERY_LISTENER.replace(
        "resp: '127.0.0.1:0'",
        "resp: {address: '127.0.0.1:0', password: secret}",
    );
    let server = Server::start_in(Scratch::new(), &listen);
    let proxy = Proxy::start_nginx(server, "examples/nginx-lua/nginx.conf");
    for _ in 0..2 {
        let answer = proxy.ask("/api/orders").send();
        assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
    }
}

#[test]
fn nginx_counts_by_api_key() {
    assert_customers(&Proxy::nginx());
}

#[test]
fn caddy_counts_by_api_key() {
    assert_customers(&Proxy::caddy());
}

fn assert_customers(proxy: &Proxy) {
    assert_eq!(proxy.api("acme-key").status, 200);
    assert_eq!(proxy.api("umbrella-key").status, 200);
    let blocked = proxy
        .server
        .operate(&["block", "api-per-customer", "acme", "--for", "10min"]);
    assert!(blocked.status.success(), "{blocked:?}");
    assert_eq!(proxy.api("acme-key").status, 429);
    let lie = proxy
        .ask("/api/orders")
        .header("x-api-key", "acme-key")
        .header("x-customer", "umbrella");
    assert_eq!(
        lie.send().status,
        429,
        "a client cannot choose its customer"
    );
}

#[test]
fn nginx_path_normalization_does_not_bypass_a_rule() {
    let proxy = Proxy::nginx();
    let blocked = proxy.server.operate(&["block", "api-per-customer", "acme"]);
    assert!(blocked.status.success(), "{blocked:?}");
    for path in ["/api/orders", "/%61pi/orders", "/x/../api/orders"] {
        let answer = proxy.ask(path).header("x-api-key", "acme-key").send();
        assert_eq!(answer.status, 429, "{path}");
    }
}

#[test]
fn nginx_fails_open_without_tidegate() {
    let proxy = Proxy::nginx();
    let Proxy {
        server,
        front,
        _process,
        scratch: _scratch,
    } = proxy;
    server.stop();
    let answer = Ask::get(front, "/api/orders")
        .header("x-api-key", "acme-key")
        .send();
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (200, "Here you are\n")
    );
}
