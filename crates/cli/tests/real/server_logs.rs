//! Tests `tidegate simulate` with access logs that real servers have written for known requests.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{
    servers::reserve_port,
    support::{Ask, Process, Scratch, envoy_program, repository, run, tidegate, tool},
};

const RULES: &str = "
rules:
  - {name: planted, when: {path: /api/**}, key: [ip, path], limits: [3/h]}
  - {name: short, mode: shadow, key: [ip], limits: [1000/s]}
";

/// The requested paths, each with its number of requests. The rule `planted` applies to three of
/// the paths and admits three requests for each path, so it denies 2 + 1 + 0 requests.
const LOAD: [(&str, usize); 4] = [
    ("/api/a", 5),
    ("/api/b?page=%22", 4),
    ("/api/c", 3),
    ("/x", 2),
];
const REQUESTS: usize = 14;
const ASKED: u64 = 12;
const DENIED: u64 = 3;

/// A server that writes an access log.
struct LogServer {
    /// The names and contents of the configuration files. The placeholders `PORT` and `FOLDER` are
    /// replaced.
    files: &'static [(&'static str, &'static str)],
    /// The command line.
    command: fn() -> Command,
    /// The access logs.
    logs: &'static [AccessLog],
}

/// An access log, and what the report must contain about it.
struct AccessLog {
    file: &'static str,
    /// The value of `--format`, if the format is not detected.
    format: Option<&'static str>,
    /// The beginning of the format's name that the report must contain.
    reported: &'static str,
    precision: &'static str,
}

impl LogServer {
    /// Sends the requests in [`LOAD`] to the server, and stops the server when its logs are
    /// complete.
    fn run(&self) -> Scratch {
        let scratch = Scratch::new();
        let address = SocketAddr::from(([127, 0, 0, 1], reserve_port()));
        for (name, text) in self.files {
            let text = text.replace("PORT", &address.port().to_string());
            scratch.write(
                name,
                &text.replace("FOLDER", scratch.path().to_str().unwrap()),
            );
        }
        let mut process = Process::start((self.command)().current_dir(scratch.path()));
        wait_until_ready(address);
        for (path, count) in LOAD {
            for _ in 0..count {
                get(address, path);
            }
        }
        for log in self.logs {
            wait_until_complete(&scratch.join(log.file));
        }
        process.signal("TERM");
        process.wait();
        scratch
    }

    fn check(&self) {
        let scratch = self.run();
        scratch.write("rules.yaml", RULES);
        for log in self.logs {
            let mut command = tidegate(&["simulate", "rules.yaml", "--json", "--log", log.file]);
            if let Some(format) = log.format {
                command.args(["--format", format]);
            }
            let output = run(command.current_dir(scratch.path()));
            let written = fs::read_to_string(scratch.join(log.file)).unwrap();
            let context = format!("{}:\n{written}\n{output:?}", log.file);
            let report: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{error}: {context}"));
            let lines = &report["lines"];
            let waiting = written.lines().filter(|line| line.contains("/ready"));
            let requests = REQUESTS + waiting.count();
            assert_eq!(
                (&lines["read"], &lines["damaged"], &lines["without_client"]),
                (&requests.into(), &0.into(), &0.into()),
                "{context}"
            );
            let format = lines["formats"][0].as_str().unwrap();
            assert!(format.starts_with(log.reported), "{format}: {context}");
            assert_eq!(lines["precision"], log.precision, "{context}");
            let planted = &report["rules"][0];
            assert_eq!(
                (&planted["requests"], &planted["denied"]),
                (&ASKED.into(), &DENIED.into()),
                "{context}"
            );
            assert_eq!(
                (&planted["keys"], &planted["keys_denied"]),
                (&3.into(), &2.into()),
                "{context}"
            );
            assert_eq!(planted["worst"][0]["key"][1], "/api/a", "{context}");
            // If the log's timestamps are too imprecise for a limit, the notes on the rule say so.
            let notes = report["rules"][1]["notes"].to_string();
            assert_eq!(
                notes.contains("imprecise"),
                log.precision == "second",
                "{notes}"
            );
            assert!(planted["notes"].as_array().unwrap().is_empty(), "{context}");
        }
    }
}

fn command(program: PathBuf, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Returns a command that runs the shell script `script`, where `$0` is the program.
fn shell(program: PathBuf, script: &str) -> Command {
    let mut shell = command("sh".into(), &["-c", script]);
    shell.arg(program);
    shell
}

/// Sends a request with a header that must be escaped in a log. Returns the response status.
fn get(address: SocketAddr, path: &str) -> u16 {
    let ask = Ask::get(address, path).header("user-agent", "te\"st\\");
    ask.send().status
}

/// Waits until a server has loaded its routes. Before that, Traefik responds with 404.
fn wait_until_ready(address: SocketAddr) {
    for _ in 0..3_000 {
        if is_listening(address.port()) && get(address, "/ready") != 404 {
            return;
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    panic!("no server is ready on {address}");
}

/// Waits until a log contains all requests in [`LOAD`]. A server writes a log line after the
/// response, so the last line may be missing when the client has received the last response.
fn wait_until_complete(log: &Path) {
    for _ in 0..3_000 {
        let written = fs::read_to_string(log).unwrap_or_default();
        let lines = written.split_inclusive('\n');
        let lines = lines.filter(|line| line.ends_with('\n') && !line.contains("/ready"));
        if lines.count() >= REQUESTS {
            return;
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    panic!("{} does not contain the whole load", log.display());
}

/// Returns whether a socket is listening on this port, on any IPv4 address. This function does not
/// try to connect, because HAProxy would log the connection.
fn is_listening(port: u16) -> bool {
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The socket state 0A is `LISTEN`.
        fields
            .get(1)
            .is_some_and(|address| address.ends_with(&local))
            && fields.get(3) == Some(&"0A")
    })
}

/// Returns a program that `scripts/setup` installs in the target directory.
fn installed(path: &str) -> PathBuf {
    let program = repository().join(path);
    assert!(
        Path::exists(&program),
        "{path} is missing; run scripts/setup"
    );
    program
}

#[test]
fn apache_logs_are_decided_exactly() {
    LogServer {
        files: &[(
            "apache.conf",
            r#"
ServerRoot FOLDER
ServerName localhost
PidFile apache.pid
Listen 127.0.0.1:PORT
User www-data
Group www-data
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule alias_module /usr/lib/apache2/modules/mod_alias.so
ErrorLog /dev/stderr
LogFormat "%h %l %u %t \"%r\" %>s %O \"%{Referer}i\" \"%{User-Agent}i\"" combined
LogFormat "%h %l %u %t \"%r\" %>s %O" common
CustomLog combined.log combined
CustomLog common.log common
CustomLog usec.log "%h %{usec}t \"%r\" %>s %D \"%{User-Agent}i\""
RedirectMatch 410 ^/
"#,
        )],
        command: || {
            // Use an absolute path, because Apache would resolve a relative path in the system's
            // configuration directory.
            shell(
                tool("apache2"),
                "exec \"$0\" -f \"$PWD/apache.conf\" -DFOREGROUND",
            )
        },
        logs: &[
            AccessLog {
                file: "combined.log",
                format: None,
                reported: "combined",
                precision: "second",
            },
            AccessLog {
                file: "common.log",
                format: None,
                reported: "common",
                precision: "second",
            },
            AccessLog {
                file: "usec.log",
                format: Some(r#"%h %{usec}t "%r" %>s %D "%{User-Agent}i""#),
                reported: "",
                precision: "microsecond",
            },
        ],
    }
    .check();
}

#[test]
fn haproxy_logs_are_decided_exactly() {
    LogServer {
        files: &[(
            "haproxy.cfg",
            "global
  log stdout format raw local0 info
defaults
  mode http
  log global
  option httplog
  timeout client 30s
  timeout connect 30s
  timeout server 30s
frontend front
  bind 127.0.0.1:PORT
  http-request return status 200 content-type text/plain string ok
",
        )],
        command: || {
            shell(
                tool("haproxy"),
                "exec \"$0\" -db -f haproxy.cfg > haproxy.log",
            )
        },
        logs: &[AccessLog {
            file: "haproxy.log",
            format: None,
            reported: "haproxy",
            precision: "millisecond",
        }],
    }
    .check();
}

/// Traefik's dynamic configuration. The service has no servers, because the test does not depend on
/// the responses.
const TRAEFIK_ROUTES: &str = "
http:
  routers: {all: {rule: \"PathPrefix(`/`)\", service: app}}
  services: {app: {loadBalancer: {servers: [{url: \"http://127.0.0.1:1\"}]}}}
";

#[test]
fn traefik_logs_are_decided_exactly() {
    LogServer {
        files: &[
            (
                "traefik.yaml",
                "
entryPoints: {web: {address: \"127.0.0.1:PORT\"}}
accessLog: {filePath: traefik.log}
providers: {file: {filename: routes.yaml}}
global: {checkNewVersion: false, sendAnonymousUsage: false}
",
            ),
            ("routes.yaml", TRAEFIK_ROUTES),
        ],
        command: || {
            let program = installed("target/test-traefik/traefik");
            command(program, &["--configFile=traefik.yaml"])
        },
        logs: &[AccessLog {
            file: "traefik.log",
            format: None,
            reported: "traefik",
            precision: "second",
        }],
    }
    .check();
}

#[test]
fn traefik_json_logs_are_decided_exactly() {
    LogServer {
        files: &[
            (
                "traefik.yaml",
                "
entryPoints: {web: {address: \"127.0.0.1:PORT\"}}
accessLog: {filePath: traefik.json, format: json, fields: {headers: {defaultMode: keep}}}
providers: {file: {filename: routes.yaml}}
global: {checkNewVersion: false, sendAnonymousUsage: false}
",
            ),
            ("routes.yaml", TRAEFIK_ROUTES),
        ],
        command: || {
            let program = installed("target/test-traefik/traefik");
            command(program, &["--configFile=traefik.yaml"])
        },
        logs: &[AccessLog {
            file: "traefik.json",
            format: None,
            reported: "traefik",
            precision: "microsecond",
        }],
    }
    .check();
}

#[test]
fn envoy_logs_are_decided_exactly() {
    LogServer {
        files: &[(
            "envoy.yaml",
            r#"
static_resources:
  listeners:
  - name: front
    address: {socket_address: {address: 127.0.0.1, port_value: PORT}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          use_remote_address: true
          access_log:
          - name: envoy.access_loggers.file
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
              path: envoy.log
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 200}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
"#,
        )],
        command: || {
            let arguments = ["-c", "envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "--file-flush-interval-msec", "50"];
            command(envoy_program(), &arguments)
        },
        logs: &[AccessLog {
            file: "envoy.log",
            format: None,
            reported: "envoy",
            precision: "millisecond",
        }],
    }
    .check();
}
