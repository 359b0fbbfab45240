//! Runs every `console` block in the README, in `docs/` and in the examples, in order, against a
//! server with the quickstart file. Compares the output with the documented output.
//!
//! Documented ports are replaced by the server's ports. A line `...` matches any number of lines.
//! Because slow machines cause delays, a time in milliseconds may differ from the documented time
//! by up to [`SLOWNESS_MS`]. Dates, and durations in tables, may have any value.

use std::{
    collections::BTreeSet,
    fs,
    iter::Peekable,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    str::Lines,
};

use crate::{
    envoy::Authorized,
    examples::Proxy,
    fleet::until_exact,
    haproxy::Haproxy,
    proxy::Fronted,
    servers::RedisServer,
    support::{EVERY_LISTENER, Envoy, Scratch, Server, repository, run, tidegate},
    traefik::Traefik,
};

/// The tolerance for times in milliseconds.
const SLOWNESS_MS: u64 = 60_000;

/// The strings before absolute times. Absolute times differ in every run, so they are not compared.
const INSTANTS: [&str; 2] = ["until_ms\":", "at_ms\":"];

#[test]
fn the_readme_matches_the_output() {
    assert_true("README.md");
}

#[test]
fn the_http_page_matches_the_output() {
    assert_true("docs/http.md");
}

#[test]
fn the_overrides_page_matches_the_output() {
    assert_true("docs/overrides.md");
}

#[test]
fn the_reservations_page_matches_the_output() {
    assert_true("docs/reservations.md");
}

#[test]
fn the_redis_protocol_page_matches_the_output() {
    assert_true("docs/redis-protocol.md");
}

#[test]
fn the_operating_page_matches_the_output() {
    assert_true("docs/operating.md");
}

#[test]
fn the_simulation_page_matches_the_output() {
    assert_true("docs/simulate.md");
}

#[test]
fn the_events_page_matches_the_output() {
    assert_true("docs/events.md");
}

#[test]
fn the_watching_page_matches_the_output() {
    assert_true("docs/watching.md");
}

#[test]
fn the_runbook_for_denials_matches_the_output() {
    assert_true("docs/runbook-denials.md");
}

#[test]
fn the_rules_file_page_matches_the_output() {
    assert_true("docs/rules-file.md");
}

#[test]
fn the_redis_cli_example_matches_the_output() {
    assert_true("examples/redis-cli/README.md");
}

#[test]
fn the_redis_py_example_matches_the_output() {
    assert_true("examples/redis-py/README.md");
}

/// Readers may run the commands on several pages against the same server, so each page must use its
/// own keys.
#[test]
fn pages_do_not_use_up_the_limits_of_other_pages() {
    let server = Server::quickstart();
    for page in [
        "README.md",
        "docs/http.md",
        "docs/overrides.md",
        "docs/reservations.md",
        "docs/redis-protocol.md",
        "docs/operating.md",
        "docs/watching.md",
        "docs/runbook-denials.md",
        "examples/redis-cli/README.md",
        "examples/redis-py/README.md",
    ] {
        assert_true_with(page, &server, &[]);
    }
}

#[test]
fn the_nginx_login_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::nginx_login();
    assert_true_with(
        "examples/nginx-login/README.md",
        server,
        &[("8000", *front)],
    );
}

#[test]
fn the_nginx_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::nginx();
    assert_true_with("examples/nginx/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_nginx_lua_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::nginx_lua();
    assert_true_with("examples/nginx-lua/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_nginx_njs_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::nginx_njs();
    assert_true_with("examples/nginx-njs/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_traefik_example_matches_the_output() {
    let Traefik { server, front, .. } = &Traefik::start();
    assert_true_with("examples/traefik/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_caddy_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::caddy();
    assert_true_with("examples/caddy/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_caddy_login_example_matches_the_output() {
    let Proxy { server, front, .. } = &Proxy::caddy_login();
    assert_true_with(
        "examples/caddy-login/README.md",
        server,
        &[("8000", *front)],
    );
}

#[test]
fn the_proxy_example_matches_the_output() {
    let Fronted {
        server,
        front,
        shop: [one, other],
        ..
    } = &Fronted::start();
    let fronts = [("8000", *front), ("8001", *one), ("8002", *other)];
    assert_true_with("examples/proxy/README.md", server, &fronts);
}

#[test]
fn the_envoy_example_matches_the_output() {
    let example = repository().join("examples/envoy");
    let read = |name| fs::read_to_string(example.join(name)).unwrap();
    let scratch = Scratch::new();
    scratch.write("shop.yaml", &read("shop.yaml"));
    let config = read("tidegate.yaml").replace("examples/envoy/", "");
    let server = Server::start_in(scratch, &format!("{EVERY_LISTENER}{config}"));
    let envoy = Envoy::start(&read("envoy.yaml"), server.grpc);
    let fronts = [
        ("8000", envoy.listener("front")),
        ("8002", envoy.listener("quotas")),
    ];
    assert_true_with("examples/envoy/README.md", &server, &fronts);
}

#[test]
fn the_example_of_envoys_authorization_matches_the_output() {
    let authorized = Authorized::start();
    let [grpc, http] = authorized.fronts;
    let fronts = [("8000", grpc), ("8002", http)];
    assert_true_with(
        "examples/envoy-ext-authz/README.md",
        &authorized.server,
        &fronts,
    );
}

#[test]
fn the_haproxy_example_matches_the_output() {
    let Haproxy { server, front, .. } = &Haproxy::start();
    assert_true_with("examples/haproxy/README.md", server, &[("8000", *front)]);
}

#[test]
fn the_fleet_example_matches_the_output() {
    let redis = RedisServer::start();
    let [first, second] = ["first.yaml", "second.yaml"].map(|name| {
        let text = fs::read_to_string(repository().join("examples/fleet").join(name)).unwrap();
        // Replace the example's listeners, and use a longer timeout than the default, because the
        // machine may be busy.
        let (_, store) = text.split_once("\nstore:\n").unwrap();
        let store = store.replace("redis://127.0.0.1:6379", &redis.url());
        let config = format!("{EVERY_LISTENER}store:\n  timeout: 2s\n{store}");
        let server = Server::start_in(Scratch::new(), &config);
        until_exact(&server);
        server
    });
    let others = [
        ("8180", second.http),
        ("6381", second.resp),
        ("8182", second.admin),
        ("6379", SocketAddr::from(([127, 0, 0, 1], redis.port()))),
    ];
    assert_true_with("examples/fleet/README.md", &first, &others);
}

/// Checks every YAML block in the documentation, and every example, with `check --strict`.
#[test]
fn every_rules_file_in_the_documentation_passes_a_strict_check() {
    let mut wrong = String::new();
    let mut checked = BTreeSet::new();
    for document in files("docs", "md")
        .into_iter()
        .chain(files("docs/migrate", "md"))
        .chain([repository().join("README.md")])
    {
        let text = fs::read_to_string(&document).unwrap();
        let docs = repository().join("docs");
        let name = document
            .strip_prefix(docs)
            .or_else(|_| document.strip_prefix(repository()))
            .unwrap();
        let name = name.to_str().unwrap();
        for lines in blocks(&text, "yaml") {
            // Settings for Prometheus, Envoy and Istio are not Tidegate rules files.
            let is_of_others = [
                "groups:",
                "scrape_configs:",
                "extensionProviders:",
                "rate_limits:",
            ]
            .contains(&lines[0])
                || ["gateway.envoyproxy.io/", "security.istio.io/"]
                    .iter()
                    .any(|group| lines[0].starts_with(&format!("apiVersion: {group}")));
            if is_of_others {
                continue;
            }
            checked.insert(name.to_owned());
            let message = strictly_checked(&lines.join("\n"));
            wrong.extend(
                message.map(|message| format!("{name}: {message}\n{}\n\n", lines.join("\n"))),
            );
        }
    }
    for folder in [
        "examples",
        "examples/envoy",
        "examples/fleet",
        "examples/haproxy",
        "examples/proxy",
        "examples/simulate",
        "packaging/config",
        "contrib/compose/tidegate",
        "contrib/kubernetes/redis",
        "contrib/kubernetes/memory",
    ] {
        for file in files(folder, "yaml") {
            // Skip the files for Envoy and Kubernetes.
            let name = file.file_name().unwrap().to_str().unwrap();
            if name == "envoy.yaml" || folder.starts_with("contrib/") && name != "rules.yaml" {
                continue;
            }
            // In a container, the server has to listen on all addresses. In this test, listening on
            // all addresses would cause a warning.
            let text = fs::read_to_string(&file).unwrap();
            let message = strictly_checked(&text.replace("0.0.0.0:", "127.0.0.1:"));
            wrong.extend(message.map(|message| format!("{}: {message}\n", file.display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let documents = [
        "README.md",
        "candidate.md",
        "console.md",
        "envoy.md",
        "events.md",
        "fleet.md",
        "grpc.md",
        "haproxy.md",
        "llm.md",
        "migrate/envoy-ratelimit.md",
        "migrate/governor.md",
        "migrate/ingress-nginx.md",
        "migrate/limitador.md",
        "migrate/nginx.md",
        "migrate/redis-cell.md",
        "migrate/throttlecrab.md",
        "migrate/traefik.md",
        "operating.md",
        "overrides.md",
        "proxy.md",
        "reservations.md",
        "rules-file.md",
        "security.md",
        "simulate.md",
        "throttling.md",
        "watching.md",
    ];
    assert!(checked.iter().eq(documents), "{checked:?}");
}

/// Returns the output of `check --strict` for a rules file or an envoyproxy/ratelimit file; `None`
/// if the file passes.
fn strictly_checked(text: &str) -> Option<String> {
    const DOMAIN: &str =
        "domain: shop\ndescriptors: [{key: a, rate_limit: {unit: hour, requests_per_unit: 1}}]\n";
    const LIMITS: &str = "- {namespace: shop, max_value: 1, seconds: 60}\n";
    let scratch = Scratch::new();
    // Replace the paths in `envoy.config` and `envoy.limitador`, because the documented files do
    // not exist on this machine.
    let domain = scratch.write("domain.yaml", DOMAIN);
    let limits = scratch.write("limits.yaml", LIMITS);
    let config = |line: &str| {
        for (key, file) in [("config: ", &domain), ("limitador: ", &limits)] {
            if let Some((before, _)) = line.split_once(key).filter(|_| !line.contains('{')) {
                return format!("{before}{key}{}", file.display());
            }
        }
        line.to_owned()
    };
    let lines: Vec<String> = text.lines().map(config).collect();
    let file = scratch.write("rules.yaml", &lines.join("\n"));
    let mut check = tidegate(&["check", "--strict"]);
    let is_of_envoy = lines.iter().any(|line| line.starts_with("domain:"));
    let check = if is_of_envoy {
        check.arg("--envoy").arg(file)
    } else {
        check.arg(file)
    };
    let output = run(check.current_dir(repository()));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(message)
}

/// Returns the files with this extension in a repository folder, sorted by name.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(repository().join(folder)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let found = paths.filter(|path| path.extension().is_some_and(|found| found == extension));
    let mut found: Vec<PathBuf> = found.collect();
    found.sort();
    found
}

#[test]
fn documented_and_exported_metrics_are_the_same() {
    let page = fs::read_to_string(repository().join("docs/operating.md")).unwrap();
    let metrics = Server::start("").metrics();
    let listed: BTreeSet<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `tidegate_"))
        .flat_map(|line| line.split(" | ").next().unwrap_or("").split('`'))
        .filter(|word| word.starts_with("tidegate_"))
        .collect();
    let there: BTreeSet<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    assert_eq!(listed, there);
}

/// A command and its documented output.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    command: String,
    printed: Vec<String>,
}

fn assert_true(document: &str) {
    assert_true_with(document, &Server::quickstart(), &[]);
}

/// Runs the console blocks in a document against `server`, and compares the output. `more` contains
/// additional documented ports, each with the address that replaces it.
fn assert_true_with(document: &str, server: &Server, more: &[(&str, SocketAddr)]) {
    let text = fs::read_to_string(repository().join(document)).unwrap();
    let steps = steps(&text);
    assert!(!steps.is_empty(), "{document} has no console block");
    let own = [
        ("8080", server.http),
        ("6380", server.resp),
        ("8082", server.admin),
    ];
    let addresses = own.iter().chain(more);
    let ports: Vec<_> = addresses
        .map(|(usual, real)| (*usual, real.port().to_string()))
        .collect();
    let mut wrong = String::new();
    for Step { command, printed } in &steps {
        let actual = output(server, &ports, command);
        if !matches(printed, &actual) {
            wrong += &format!(
                "$ {command}\ndocumented:\n{}\nactual:\n{}\n\n",
                printed.join("\n"),
                actual.join("\n")
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "{document} does not match the output:\n\n{wrong}"
    );
}

fn steps(text: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    for block in blocks(text, "console") {
        let mut lines = block.into_iter();
        while let Some(line) = lines.next() {
            if let Some(command) = line.strip_prefix("$ ") {
                let mut command = command.to_owned();
                while command.ends_with('\\') {
                    command = format!("{command}\n{}", lines.next().unwrap_or(""));
                }
                let printed = Vec::new();
                steps.push(Step { command, printed });
            } else if let Some(step) = steps.last_mut() {
                step.printed.push(line.to_owned());
            }
        }
    }
    steps
}

/// Returns the lines of every fenced block of `language`.
fn blocks<'t>(text: &'t str, language: &str) -> Vec<Vec<&'t str>> {
    let mut lines: Peekable<Lines<'t>> = text.lines().peekable();
    let mut blocks = Vec::new();
    while let Some(line) = lines.next() {
        if line.strip_prefix("```") == Some(language) {
            blocks.push(std::iter::from_fn(|| lines.next_if(|line| *line != "```")).collect());
        }
    }
    blocks
}

/// Runs a command in a shell and returns its output, with the real ports replaced by the documented
/// ports.
fn output(server: &Server, ports: &[(&str, String)], command: &str) -> Vec<String> {
    let typed = ports
        .iter()
        .fold(command.to_owned(), |command, (usual, real)| {
            let command =
                command.replace(&format!("127.0.0.1:{usual}"), &format!("127.0.0.1:{real}"));
            command.replace(&format!("-p {usual}"), &format!("-p {real}"))
        });
    let program = tidegate(&[]);
    let bin = Path::new(program.get_program()).parent().unwrap();
    let python = repository().join("target/test-python/bin");
    assert!(
        python.is_dir() || !typed.contains("python3"),
        "{} is missing; scripts/setup installs it",
        python.display()
    );
    let path = format!(
        "{}:{}:/usr/local/bin:/usr/bin:/bin",
        bin.display(),
        python.display()
    );
    let mut shell = Command::new("bash");
    shell
        .args(["-c", &format!("{{ {typed}\n}} 2>&1")])
        .current_dir(repository())
        .env("PATH", path)
        .env("TIDEGATE_ADMIN", server.admin.to_string())
        .env("NO_COLOR", "1")
        // Make redis-cli format its output as if standard output were a terminal.
        .env("FAKETTY", "1");
    let printed = String::from_utf8(run(&mut shell).stdout).unwrap();
    let usual = ports.iter().fold(printed, |text, (usual, real)| {
        text.replace(&format!("127.0.0.1:{real}"), &format!("127.0.0.1:{usual}"))
    });
    usual
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect()
}

fn matches(printed: &[String], actual: &[String]) -> bool {
    match printed.split_first() {
        None => actual.is_empty(),
        Some((line, rest)) if line.trim() == "..." => {
            (0..=actual.len()).any(|skipped| matches(rest, &actual[skipped..]))
        }
        Some((line, rest)) => actual
            .split_first()
            .is_some_and(|(first, others)| alike(line.trim_end(), first) && matches(rest, others)),
    }
}

/// Compares two lines, ignoring differences due to time.
fn alike(printed: &str, actual: &str) -> bool {
    let (dated, now) = (undated(printed), undated(actual));
    is_alike(&dated, &now) || words(&dated).eq(words(&now))
}

/// Replaces every RFC 3339 date without fractional seconds with the same placeholder.
fn undated(line: &str) -> String {
    const DATE: &str = "0000-00-00T00:00:00Z";
    let mut out = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let is_date = rest.get(..DATE.len()).is_some_and(|text| {
            let alike = |(a, b): (char, char)| a == b || a == '0' && b.is_ascii_digit();
            DATE.chars().zip(text.chars()).all(alike)
        });
        let used = if is_date {
            out.push_str(DATE);
            DATE.len()
        } else {
            let next = rest.chars().next().unwrap_or_default();
            out.push(next);
            next.len_utf8()
        };
        rest = &rest[used..];
    }
    out
}

/// Returns the words of a table row, except durations such as `1h` and `(59min`.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let is_duration = |word: &&str| {
        let word = word.trim_matches(['(', ')', ',']);
        let unit = word.trim_start_matches(|c: char| c.is_ascii_digit());
        unit.len() < word.len() && ["d", "h", "min", "s", "ms"].contains(&unit)
    };
    line.split_whitespace()
        .filter(move |word| !is_duration(word))
}

fn is_alike(printed: &str, actual: &str) -> bool {
    let (mut printed, mut actual) = (pieces(printed), pieces(actual));
    let mut before = "";
    loop {
        match (printed.next(), actual.next()) {
            (None, None) => return true,
            (Some(one), Some(other)) if one == other => before = one,
            (Some(_), Some(_)) if is_instant(before) => before = "",
            (Some(one), Some(other)) if is_time(before, one) && is_near(one, other) => before = one,
            _ => return false,
        }
    }
}

fn is_instant(before: &str) -> bool {
    let before = before.trim_end();
    INSTANTS.iter().any(|instant| before.ends_with(instant))
}

/// Splits a line into numbers and the strings between them.
fn pieces(line: &str) -> impl Iterator<Item = &str> {
    line.split_inclusive(|_: char| true)
        .map(|character| character.as_ptr() as usize - line.as_ptr() as usize)
        .filter(|&at| at == 0 || is_digit(line, at) != is_digit(line, at - 1))
        .map(move |at| {
            let end = (at + 1..line.len()).find(|&next| is_digit(line, next) != is_digit(line, at));
            &line[at..end.unwrap_or(line.len())]
        })
}

fn is_digit(line: &str, at: usize) -> bool {
    line.as_bytes()[at].is_ascii_digit()
}

/// Returns whether `number` is a time, judging by `before`, the text before the number. A number is
/// a time if the field's name ends with `_ms`, or if it is in a Redis reply and too large to be a
/// count.
fn is_time(before: &str, number: &str) -> bool {
    let named = before.ends_with("_ms\":") || before.ends_with("_ms\": ");
    let reply = before.ends_with("(integer) ") || before.ends_with(',');
    named || reply && number.len() > 3
}

fn is_near(one: &str, other: &str) -> bool {
    match (one.parse::<u64>(), other.parse::<u64>()) {
        (Ok(one), Ok(other)) => (one == 0) == (other == 0) && one.abs_diff(other) <= SLOWNESS_MS,
        _ => false,
    }
}

#[test]
fn a_line_may_differ_only_by_elapsed_time() {
    assert!(alike(
        r#"{"limit":20,"retry_after_ms":998}"#,
        r#"{"limit":20,"retry_after_ms":1003}"#
    ));
    assert!(!alike(
        r#"{"limit":20,"retry_after_ms":998}"#,
        r#"{"limit":21,"retry_after_ms":998}"#
    ));
    assert!(!alike(
        r#"{"retry_after_ms":998}"#,
        r#"{"retry_after_ms":0}"#
    ));
    assert!(alike("4) (integer) 3599000", "4) (integer) 3598000"));
    assert!(alike("1,10,0,36000000", "1,10,0,35999998"));
    assert!(!alike("4) (integer) 15", "4) (integer) 14"));
    assert!(!alike("a 1", "a 1 b"));
}

#[test]
fn a_table_may_differ_only_by_dates_and_durations() {
    assert!(alike(
        "api  acme  10min  2026-11-21T10:41:42Z  script",
        "api  acme  9min 59s  2027-01-02T03:04:05Z  script"
    ));
    assert!(alike(
        "until 2026-11-21T10:41:42Z (1h)",
        "until 2027-11-21T10:41:42Z (59min 58s)"
    ));
    assert!(!alike("api  acme  10min", "api  ajax  10min"));
    assert!(!alike("1/h capacity 10  8  10", "1/h capacity 10  7  10"));
}

#[test]
fn steps_are_read_from_console_blocks() {
    let text = "x\n```console\n$ a \\\n  b\none\ntwo\n$ c\n```\n```sh\n$ d\n```\n";
    let printed = vec!["one".to_owned(), "two".to_owned()];
    let first = Step {
        command: "a \\\n  b".to_owned(),
        printed,
    };
    let second = Step {
        command: "c".to_owned(),
        printed: Vec::new(),
    };
    assert_eq!(steps(text), [first, second]);
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(matches(&lines("a\n...\nb"), &lines("a\nx\ny\nb")));
    assert!(!matches(&lines("a\n...\nb"), &lines("a\nx\ny")));
}
