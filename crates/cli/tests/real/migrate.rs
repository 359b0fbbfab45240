//! Checks the tables in `docs/migrate`. Each row contains a limit in another program's notation and
//! the equivalent Tidegate limit. The row also contains a number of concurrent requests, and how
//! many of these requests each of the two limits admits. The tests send the requests to both
//! programs.

#![expect(
    clippy::disallowed_methods,
    reason = "the other programs have real clocks, so the elapsed time bounds what they admit"
)]

use std::{
    fs,
    net::SocketAddr,
    num::NonZeroU32,
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime},
};

use governor::{Quota, RateLimiter};
use serde_json::json;
use tidegate::{Limit, Limiter};

use crate::{
    servers::reserve_port,
    support::{Ask, Process, Scratch, Server, repository, run, tool},
};

/// A table row from a documentation page.
#[derive(Debug)]
struct Row {
    /// The strings in backticks in each cell.
    cells: Vec<Vec<String>>,
    /// The number of concurrent requests.
    sent: usize,
    admitted: usize,
}

impl Row {
    /// Returns the Tidegate limit. The limit is the first string in backticks in the last element
    /// of `cells`.
    fn limit(&self) -> &str {
        &self.cells.last().unwrap()[0]
    }

    /// Returns the cost of a request. The cost is 1 unless the cell with the Tidegate limit
    /// specifies another cost.
    fn cost(&self) -> u64 {
        let parts = self.cells.last().unwrap().iter();
        let mut costs = parts.filter_map(|part| part.strip_prefix("cost: "));
        costs.next().map_or(1, |cost| cost.parse().unwrap())
    }

    /// Asserts that `admitted` is the documented number. Sending the requests took `elapsed`. For
    /// each second of that time, a limit in the tables may admit one additional request.
    fn assert_admitted(&self, by: &str, admitted: usize, elapsed: Duration) {
        let late = usize::try_from(elapsed.as_secs()).unwrap();
        let expected = self.admitted..=self.admitted + late;
        assert!(
            expected.contains(&admitted),
            "{by} admitted {admitted} of {} in {elapsed:?}: {self:?}",
            self.sent
        );
    }
}

/// Returns the rows of the tables on the page, but only of tables whose last column is headed "of N
/// at once".
fn rows(page: &str) -> Vec<Row> {
    let path = repository().join("docs/migrate").join(page);
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text
        .lines()
        .skip_while(|line| !line.ends_with(" at once |"));
    let heading = lines
        .next()
        .unwrap_or_else(|| panic!("{page} has no table"));
    let words: Vec<&str> = heading.split_whitespace().collect();
    let sent = words[words.len() - 4].parse().unwrap();
    let rows: Vec<Row> = lines
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let mut cells: Vec<&str> = line.trim_matches('|').split(" | ").collect();
            let admitted = cells.pop().unwrap().trim().parse().unwrap();
            let quoted = |cell: &&str| {
                cell.split('`')
                    .skip(1)
                    .step_by(2)
                    .map(str::to_owned)
                    .collect()
            };
            let cells = cells.iter().map(quoted).collect();
            Row {
                cells,
                sent,
                admitted,
            }
        })
        .collect();
    assert!(rows.len() >= 3, "{page} has {} rows", rows.len());
    rows
}

/// Sends all requests of a row at the same time. Returns the number of admitted requests, and the
/// time that sending took.
fn at_once(count: usize, send: impl Fn() -> u16 + Sync) -> (usize, Duration) {
    /// The number of client threads. The number is high enough for concurrent requests, and does
    /// not exceed any server's connection limit.
    const THREADS: usize = 32;
    let start = Instant::now();
    let send = &send;
    let statuses: Vec<u16> = thread::scope(|scope| {
        let spawn = |thread: usize| {
            let share = (thread..count).step_by(THREADS).count();
            scope.spawn(move || (0..share).map(|_| send()).collect::<Vec<u16>>())
        };
        let threads: Vec<_> = (0..THREADS).map(spawn).collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.flatten().collect()
    });
    let elapsed = start.elapsed();
    assert_eq!(statuses.len(), count);
    assert!(
        statuses.iter().all(|status| [200, 429].contains(status)),
        "{statuses:?}"
    );
    (
        statuses.iter().filter(|status| **status == 200).count(),
        elapsed,
    )
}

/// For each row, sends the requests to a server with the row's limit.
fn assert_tidegate_admits(rows: &[Row]) {
    let rule = |(number, row): (usize, &Row)| {
        format!(
            "  - {{name: r{number}, when: {{row: '{number}'}}, key: [user], limits: [{}]}}\n",
            quoted(row.limit())
        )
    };
    let rules: String = rows.iter().enumerate().map(rule).collect();
    let server = Server::start(&format!("rules:\n{rules}"));
    for (number, row) in rows.iter().enumerate() {
        let body =
            json!({"entries": {"user": "u1", "row": number.to_string()}, "cost": row.cost()});
        let (admitted, elapsed) = at_once(row.sent, || {
            Ask::new("POST", server.http, "/v1/check")
                .body(&body)
                .send()
                .status
        });
        row.assert_admitted("Tidegate", admitted, elapsed);
    }
}

/// Quotes a limit in short form, for use in a YAML list. A limit in full form is a map and needs no
/// quotes.
fn quoted(limit: &str) -> String {
    if limit.starts_with('{') {
        limit.to_owned()
    } else {
        format!("'{limit}'")
    }
}

/// Starts a program after replacing `PORT` in its configuration with a free port. Waits until the
/// program responds with a status other than 404.
fn start(
    configuration: &str,
    command: impl Fn(&Scratch) -> Command,
) -> (Process, Scratch, SocketAddr) {
    let scratch = Scratch::new();
    let port = reserve_port();
    scratch.write("ok.txt", "ok\n");
    scratch.write(
        "config.yaml",
        &configuration.replace("PORT", &port.to_string()),
    );
    let process = Process::start(command(&scratch).current_dir(scratch.path()));
    let front = SocketAddr::from(([127, 0, 0, 1], port));
    for _ in 0..1_000 {
        if std::net::TcpStream::connect(front).is_ok()
            && Ask::get(front, "/ready").send().status != 404
        {
            return (process, scratch, front);
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    panic!("the program did not start with:\n{configuration}");
}

/// Starts nginx with these `limit_req_zone` and `location` directives. The locations serve
/// `/ok.txt`.
fn start_nginx(zones: &str, locations: &str) -> (Process, Scratch, SocketAddr) {
    let configuration = format!(
        "daemon off; master_process off; pid nginx.pid; error_log stderr notice;
events {{}}
http {{
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  access_log off; root .;
{zones}
  limit_req_status 429;
  server {{ listen 127.0.0.1:PORT; location / {{ try_files /ok.txt =404; }} {locations} }}
}}
"
    );
    start(&configuration, |scratch| {
        let mut nginx = Command::new(tool("nginx"));
        nginx.arg("-p").arg(scratch.path());
        nginx.arg("-c").arg(scratch.join("config.yaml"));
        nginx
    })
}

/// For each row, sends the requests to nginx. The row's limit is configured with the parameters in
/// the cell with the index `column`.
fn assert_nginx_admits(rows: &[Row], column: usize) {
    let mut zones = String::new();
    let mut locations = String::new();
    for (number, row) in rows.iter().enumerate() {
        let (rate, burst) = row.cells[column].split_first().unwrap();
        let burst = burst.first().map_or("", String::as_str);
        zones += &format!("limit_req_zone $binary_remote_addr zone=z{number}:1m {rate};\n");
        let limit = format!("limit_req zone=z{number} {burst};");
        locations += &format!("location /{number} {{ {limit} try_files /ok.txt =404; }}\n");
    }
    let (_process, _scratch, front) = start_nginx(&zones, &locations);
    for (number, row) in rows.iter().enumerate() {
        let path = format!("/{number}");
        let (admitted, elapsed) = at_once(row.sent, || Ask::get(front, &path).send().status);
        // Without `nodelay`, nginx delays its responses, so `elapsed` includes the delays. nginx
        // receives all requests at once, so it admits no additional requests.
        let mut bursts = row.cells[column].iter().skip(1);
        let is_delayed = bursts.any(|burst| !burst.contains("nodelay"));
        let elapsed = if is_delayed { Duration::ZERO } else { elapsed };
        row.assert_admitted("nginx", admitted, elapsed);
    }
}

#[test]
fn limits_of_nginx_admit_the_same() {
    let rows = rows("nginx.md");
    assert_tidegate_admits(&rows);
    assert_nginx_admits(&rows, 0);
}

/// If one limit denies a request, the request is not charged to the other limits.
#[test]
fn several_limits_of_nginx_are_charged_together() {
    let zones = "limit_req_zone $binary_remote_addr zone=small:1m rate=1r/m;
limit_req_zone $binary_remote_addr zone=large:1m rate=1r/m;";
    let large = "limit_req zone=large burst=40 nodelay;";
    let locations = format!(
        "location /both {{ {large} limit_req zone=small; try_files /ok.txt =404; }}
location /large {{ {large} try_files /ok.txt =404; }}"
    );
    let (_process, _scratch, front) = start_nginx(zones, &locations);
    let rules = "rules:
  - {name: small, when: {path: /both}, key: [user], limits: ['1/min burst 0']}
  - {name: large, key: [user], limits: ['1/min burst 40']}
";
    let server = Server::start(rules);
    for (path, sent, expected) in [("/both", 30, 1), ("/large", 60, 40)] {
        let (admitted, _) = at_once(sent, || Ask::get(front, path).send().status);
        assert_eq!(admitted, expected, "nginx, {path}");
        let body = json!({"entries": {"user": "u1", "path": path}});
        let (admitted, _) = at_once(sent, || {
            let ask = Ask::new("POST", server.http, "/v1/check").body(&body);
            ask.send().status
        });
        assert_eq!(admitted, expected, "Tidegate, {path}");
    }
}

/// ingress-nginx generates `nodelay`, and a burst that equals the limit's count times the burst
/// multiplier.
#[test]
fn annotations_of_ingress_nginx_admit_the_same() {
    let rows = rows("ingress-nginx.md");
    for row in &rows {
        let number = |text: &str| text.trim_matches('"').parse::<u32>().unwrap();
        // The annotation is, for example, `limit-rps: "1"` or `limit-rpm: "30"`.
        let limit = row.cells[0][0].strip_prefix("limit-rp").unwrap();
        let (unit, count) = limit.split_once(": ").unwrap();
        let multiplier = row.cells[1]
            .first()
            .map_or(5, |multiplier| number(multiplier));
        let burst = number(count) * multiplier;
        let rate = format!("rate={}r/{unit}", number(count));
        assert_eq!(row.cells[2], [rate, format!("burst={burst} nodelay")]);
    }
    assert_tidegate_admits(&rows);
    assert_nginx_admits(&rows, 2);
}

#[test]
fn limits_of_traefik_admit_the_same() {
    let rows = rows("traefik.md");
    assert_tidegate_admits(&rows);
    let program = repository().join("target/test-traefik/traefik");
    assert!(
        program.exists(),
        "{} is missing; scripts/setup installs it",
        program.display()
    );
    let (_application, _files, service) = start_nginx("", "");
    let mut routers = String::from("    ready: {rule: \"Path(`/ready`)\", service: app}\n");
    let mut middlewares = String::new();
    for (number, row) in rows.iter().enumerate() {
        routers += &format!(
            "    r{number}: {{rule: 'Path(`/{number}`)', service: app, middlewares: [m{number}]}}\n"
        );
        middlewares += &format!(
            "    m{number}: {{rateLimit: {{{}}}}}\n",
            row.cells[0].join(", ")
        );
    }
    let routes = format!(
        "http:\n  routers:\n{routers}  middlewares:\n{middlewares}  services:\n    \
         app: {{loadBalancer: {{servers: [{{url: \"http://{service}\"}}]}}}}\n"
    );
    let configuration = "entryPoints: {web: {address: \"127.0.0.1:PORT\"}}\n\
        providers: {file: {filename: routes.yaml}}\n\
        global: {checkNewVersion: false, sendAnonymousUsage: false}\n";
    let (_process, _scratch, front) = start(configuration, |scratch| {
        scratch.write("routes.yaml", &routes);
        let mut traefik = Command::new(&program);
        traefik.arg("--configFile=config.yaml");
        traefik
    });
    for (number, row) in rows.iter().enumerate() {
        let path = format!("/{number}");
        // If two requests of a new client arrive at the same moment, Traefik can create two
        // buckets, and then admits more than its limit. So the first request is sent alone.
        assert_eq!(Ask::get(front, &path).send().status, 200);
        let (admitted, elapsed) = at_once(row.sent - 1, || Ask::get(front, &path).send().status);
        row.assert_admitted("Traefik", 1 + admitted, elapsed);
    }
}

#[test]
fn descriptors_of_envoyproxy_ratelimit_admit_the_same() {
    let rows = rows("envoy-ratelimit.md");
    assert_tidegate_admits(&rows);
    let scratch = Scratch::new();
    let descriptor = |(number, row): (usize, &Row)| {
        let [unit, requests] = [0, 1].map(|column| &row.cells[column][0]);
        let limit = format!("{{unit: {unit}, requests_per_unit: {requests}}}");
        format!("  - {{key: row, value: 'r{number}', rate_limit: {limit}}}\n")
    };
    let descriptors: String = rows.iter().enumerate().map(descriptor).collect();
    let domain = scratch.write(
        "shop.yaml",
        &format!("domain: shop\ndescriptors:\n{descriptors}"),
    );
    let server = Server::start(&format!("envoy: {{config: {}}}\n", domain.display()));
    for (number, row) in rows.iter().enumerate() {
        let entries = json!([{"key": "row", "value": format!("r{number}")}]);
        let body = json!({"domain": "shop", "descriptors": [{"entries": entries}]});
        let (admitted, elapsed) = at_once(row.sent, || {
            Ask::new("POST", server.http, "/json")
                .body(&body)
                .send()
                .status
        });
        row.assert_admitted("the descriptor", admitted, elapsed);
    }
}

#[test]
fn limits_of_limitador_admit_the_same() {
    let rows = rows("limitador.md");
    assert_tidegate_admits(&rows);
    let scratch = Scratch::new();
    let limit = |(number, row): (usize, &Row)| {
        let [max_value, seconds] = [0, 1].map(|column| &row.cells[column][0]);
        let limit = format!("max_value: {max_value}, seconds: {seconds}");
        format!("- {{namespace: n{number}, {limit}, variables: [\"descriptors[0]['row']\"]}}\n")
    };
    let limits: String = rows.iter().enumerate().map(limit).collect();
    let file = scratch.write("limits.yaml", &limits);
    let server = Server::start(&format!("envoy: {{limitador: {}}}\n", file.display()));
    for (number, row) in rows.iter().enumerate() {
        let namespace = format!("n{number}");
        let body = json!({"namespace": namespace, "values": {"row": "r"}, "delta": 1});
        let (admitted, elapsed) = at_once(row.sent, || {
            Ask::new("POST", server.http, "/check_and_report")
                .body(&body)
                .send()
                .status
        });
        row.assert_admitted("the limits file", admitted, elapsed);
    }
}

/// redis-cell admits `max_burst` requests at once in addition to one regular request.
#[test]
fn commands_of_redis_cell_admit_the_same() {
    let rows = rows("redis-cell.md");
    assert_tidegate_admits(&rows);
    let server = Server::start("rules: []\n");
    for (number, row) in rows.iter().enumerate() {
        let words: Vec<&str> = row.cells[0][0].split(' ').collect();
        let [burst, cost] =
            [words[2], words.get(5).unwrap_or(&"1")].map(|word| word.parse::<usize>().unwrap());
        assert_eq!(row.admitted, (burst + 1) / cost, "the formula: {row:?}");
        let key = format!("k{number}");
        let (admitted, elapsed) = admitted_by_command(&server, row, &key, "0");
        row.assert_admitted("CL.THROTTLE", admitted, elapsed);
    }
}

/// Sends a row's command with redis-cli, and counts the replies whose first value is `allowed`.
fn admitted_by_command(server: &Server, row: &Row, key: &str, allowed: &str) -> (usize, Duration) {
    let mut words: Vec<&str> = row.cells[0][0].split(' ').collect();
    words[1] = key;
    let start = Instant::now();
    let count = row.sent.to_string();
    let port = server.resp.port().to_string();
    let output = run(Command::new(tool("redis-cli"))
        .args(["-p", &port, "-r", &count])
        .args(&words));
    let message = String::from_utf8(output.stdout).unwrap();
    let replies: Vec<&str> = message.lines().collect();
    assert_eq!(replies.len(), 5 * row.sent, "{message}");
    let firsts = replies.chunks(5).map(|reply| reply[0]);
    (
        firsts.filter(|first| *first == allowed).count(),
        start.elapsed(),
    )
}

#[test]
fn commands_of_throttlecrab_admit_the_same() {
    let rows = rows("throttlecrab.md");
    assert_tidegate_admits(&rows);
    let server = Server::start("rules: []\n");
    for (number, row) in rows.iter().enumerate() {
        let words: Vec<&str> = row.cells[0][0].split(' ').collect();
        let [burst, count, period] = [2, 3, 4].map(|word| words[word].parse::<i64>().unwrap());
        let mut limiter = throttlecrab::RateLimiter::new(throttlecrab::PeriodicStore::new());
        let now = SystemTime::now();
        let mut decide = || {
            limiter
                .rate_limit("u1", burst, count, period, 1, now)
                .unwrap()
                .0
        };
        let admitted = (0..row.sent).filter(|_| decide()).count();
        row.assert_admitted("throttlecrab", admitted, Duration::ZERO);
        let (admitted, elapsed) = admitted_by_command(&server, row, &format!("k{number}"), "1");
        row.assert_admitted("THROTTLE", admitted, elapsed);
    }
    // Check the page's statement about a burst of 1.
    let mut limiter = throttlecrab::RateLimiter::new(throttlecrab::PeriodicStore::new());
    let mut decide = || limiter.rate_limit("u1", 1, 1, 3_600, 1, SystemTime::now());
    assert!((0..30).all(|_| decide().unwrap().0));
}

#[test]
fn quotas_of_governor_admit_the_same() {
    let rows = rows("governor.md");
    assert_tidegate_admits(&rows);
    let some = |count: u32| NonZeroU32::new(count).unwrap();
    let quotas = [
        ("Quota::per_minute(12)", Quota::per_minute(some(12))),
        (
            "Quota::per_minute(30).allow_burst(5)",
            Quota::per_minute(some(30)).allow_burst(some(5)),
        ),
        (
            "Quota::per_hour(1).allow_burst(20)",
            Quota::per_hour(some(1)).allow_burst(some(20)),
        ),
        (
            "Quota::with_period(60 s)",
            Quota::with_period(Duration::from_secs(60)).unwrap(),
        ),
    ];
    assert_eq!(rows.len(), quotas.len());
    for (row, (written, quota)) in rows.iter().zip(quotas) {
        assert_eq!(row.cells[0][0], written);
        let theirs = RateLimiter::direct(quota);
        let ours = Limiter::in_memory(row.limit().parse::<Limit>().unwrap());
        let start = Instant::now();
        let admitted = (0..row.sent).filter(|_| theirs.check().is_ok()).count();
        row.assert_admitted("governor", admitted, start.elapsed());
        let admitted = (0..row.sent).filter(|_| ours.check(()).allowed).count();
        row.assert_admitted("the crate tidegate", admitted, start.elapsed());
    }
}
