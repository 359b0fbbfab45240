//! Tests of exporting traces, metrics and logs over OTLP, with a collector in the test process.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Read, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread::spawn,
};

use opentelemetry_proto::tonic::{
    collector::{
        logs::v1::ExportLogsServiceRequest,
        metrics::v1::{
            ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        },
        trace::v1::ExportTraceServiceRequest,
    },
    common::v1::{KeyValue, any_value::Value as AttributeValue},
    metrics::v1::{metric::Data, number_data_point},
    trace::v1::Span,
};
use prost::Message as _;
use serde_json::json;
use tidegate::Clock;

use crate::{
    fleet::until_exact,
    servers::{RedisServer, eventually},
    support::{Ask, EVERY_LISTENER, Envoy, Scratch, Server, run, tidegate},
};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

const RULES: &str = "rules: [{name: login, when: {path: /login}, key: [ip], limits: [2/h]}]\n";

/// A key value, which must not be exported.
const SECRET: &str = "203.0.113.77";

/// The path and the body of each received request.
type Received = Mutex<Vec<(String, Vec<u8>)>>;

/// An OTLP collector.
#[derive(Debug)]
struct Collector {
    address: SocketAddr,
    received: Arc<Received>,
}

impl Collector {
    fn start() -> Self {
        Self::responding_with(Vec::new())
    }

    /// Starts a collector that answers every message with `answer`.
    fn responding_with(answer: Vec<u8>) -> Self {
        let answer: Arc<[u8]> = answer.into();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::default();
        let collected = Arc::clone(&received);
        spawn(move || {
            for stream in listener.incoming() {
                let (collected, answer) = (Arc::clone(&collected), Arc::clone(&answer));
                spawn(move || receive(&stream.unwrap(), &collected, &answer));
            }
        });
        Self { address, received }
    }

    /// Returns the environment variables for a server that exports to this collector.
    fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            (
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                format!("http://{}", self.address),
            ),
            ("OTEL_BSP_SCHEDULE_DELAY", "50".to_owned()),
            ("OTEL_BLRP_SCHEDULE_DELAY", "50".to_owned()),
        ]
    }

    fn messages(&self, path: &str) -> Vec<Vec<u8>> {
        let received = self.received.lock().unwrap();
        let messages = received.iter().filter(|(received, _)| received == path);
        messages.map(|(_, body)| body.clone()).collect()
    }

    /// Returns the received spans, each with its service name.
    fn spans(&self) -> Vec<(String, Span)> {
        let messages = self.messages("/v1/traces");
        let requests = messages
            .iter()
            .map(|body| ExportTraceServiceRequest::decode(&**body).unwrap());
        let mut spans = Vec::new();
        for resource in requests.flat_map(|request| request.resource_spans) {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = attributes
                .into_iter()
                .find(|attribute| attribute.key == "service.name");
            let service = service.and_then(|service| match service.value?.value? {
                AttributeValue::StringValue(name) => Some(name),
                _ => None,
            });
            let scopes = resource.scope_spans.into_iter();
            spans.extend(
                scopes
                    .flat_map(|scope| scope.spans)
                    .map(|span| (service.clone().unwrap_or_default(), span)),
            );
        }
        spans
    }

    /// Waits for the span `name` from `service` in the trace with the ID `trace`.
    fn span(&self, service: &str, name: &str, trace: &str) -> Span {
        eventually("the span has arrived", || {
            let mut spans = self.spans().into_iter();
            let found = spans.find(|(of, span)| {
                of == service && span.name == name && hex(&span.trace_id) == trace
            });
            found.map(|(_, span)| span)
        })
    }
}

fn receive(stream: &TcpStream, received: &Received, answer: &[u8]) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let (mut line, mut length, mut is_chunked) = (String::new(), 0, false);
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap().to_owned();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let header = line.trim_end().to_ascii_lowercase();
            match header.split_once(": ") {
                None => break,
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(("transfer-encoding", "chunked")) => is_chunked = true,
                Some(_) => {}
            }
        }
        let body = if is_chunked {
            read_chunks(&mut reader)
        } else {
            read_bytes(&mut reader, length)
        };
        received.lock().unwrap().push((path, body));
        let mut stream = stream;
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        let sent = stream.write_all(&[head.as_bytes(), answer].concat());
        if sent.is_err() {
            return;
        }
    }
}

fn read_bytes(reader: &mut impl Read, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    reader.read_exact(&mut bytes).unwrap();
    bytes
}

fn read_chunks(reader: &mut impl BufRead) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim_end(), 16).unwrap();
        let chunk = read_bytes(reader, length + 2);
        body.extend_from_slice(&chunk[..length]);
        if length == 0 {
            return body;
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns an attribute as a string, which is empty if the attribute is absent.
fn attribute(span: &Span, name: &str) -> String {
    let mut attributes = span.attributes.iter();
    let found = attributes.find(|attribute| attribute.key == name);
    let value = found.and_then(|found| found.value.clone()?.value);
    match value {
        Some(AttributeValue::StringValue(text)) => text,
        Some(AttributeValue::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

fn traceparent() -> String {
    format!("00-{TRACE}-{PARENT}-01")
}

fn with_redis(redis: &RedisServer) -> String {
    format!("store: {{redis: \"{}\", timeout: 2s}}\n", redis.url())
}

#[test]
fn a_check_continues_the_trace_of_its_caller_to_redis() {
    let (collector, redis) = (Collector::start(), RedisServer::start());
    let config = format!("{EVERY_LISTENER}{}{RULES}", with_redis(&redis));
    let server = Server::start_with(Scratch::new(), &config, &collector.variables());
    until_exact(&server);
    let check = || {
        Ask::new("POST", server.http, "/v1/check")
            .header("traceparent", &traceparent())
            .body(&json!({"entries": {"path": "/login", "ip": SECRET}}))
            .send()
    };
    assert_eq!(check().status, 200);
    let decided = collector.span("tidegate", "check", TRACE);
    assert_eq!(hex(&decided.parent_span_id), PARENT);
    for (name, value) in [
        ("tidegate.listener", "http"),
        ("tidegate.rule", "login"),
        ("tidegate.outcome", "allowed"),
        ("tidegate.exactness", "exact"),
        ("tidegate.source", "redis"),
        ("tidegate.limits", "1"),
    ] {
        assert_eq!(attribute(&decided, name), value, "{name}");
    }
    let call = collector.span("tidegate", "redis", TRACE);
    assert_eq!(call.parent_span_id, decided.span_id);
    assert_eq!(attribute(&call, "db.system.name"), "redis");
    check();
    assert_eq!(check().status, 429);
    eventually("the denial has arrived", || {
        let spans = collector.spans();
        spans
            .iter()
            .any(|(_, span)| attribute(span, "tidegate.outcome") == "limit")
            .then_some(())
    });
    // No exported record contains a key value.
    let messages = collector.messages("/v1/traces");
    let has_key = |body: &Vec<u8>| {
        body.windows(SECRET.len())
            .any(|part| part == SECRET.as_bytes())
    };
    assert!(!messages.iter().any(has_key));
    let metrics = server.metrics();
    assert!(
        metrics.contains("tidegate_otlp_records_total{signal=\"traces\",state=\"failed\"} 0"),
        "{metrics}"
    );
}

/// A Redis protocol command has no parent span. The wait for Redis is a child of the command's
/// span.
#[test]
fn a_command_that_waits_for_redis_is_one_trace() {
    let (collector, redis) = (Collector::start(), RedisServer::start());
    let config = format!("{EVERY_LISTENER}{}{RULES}", with_redis(&redis));
    let server = Server::start_with(Scratch::new(), &config, &collector.variables());
    until_exact(&server);
    let mut client = TcpStream::connect(server.resp).unwrap();
    let command = format!("TIDEGATE.CHECK path /login ip {SECRET}\r\n");
    client.write_all(command.as_bytes()).unwrap();
    let mut reply = [0; 4];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"*6\r\n");
    let spans = eventually("both spans have arrived", || {
        let spans: Vec<Span> = collector
            .spans()
            .into_iter()
            .map(|(_, span)| span)
            .collect();
        let of = |name: &str| spans.iter().find(|span| span.name == name).cloned();
        Some((of("decide")?, of("redis")?))
    });
    let (decided, call) = spans;
    assert_eq!(attribute(&decided, "tidegate.listener"), "resp");
    assert_eq!(attribute(&decided, "tidegate.outcome"), "allowed");
    assert_eq!(attribute(&decided, "tidegate.rule"), "login");
    assert!(decided.parent_span_id.is_empty());
    assert_eq!(call.parent_span_id, decided.span_id);
    assert_eq!(call.trace_id, decided.trace_id);
}

#[test]
fn a_request_of_envoy_over_http_has_an_outcome() {
    let collector = Collector::start();
    let scratch = Scratch::new();
    scratch.write("shop.yaml", LIMITS);
    let config = format!("{EVERY_LISTENER}envoy: {{config: shop.yaml}}\n");
    let server = Server::start_with(scratch, &config, &collector.variables());
    let answer = Ask::new("POST", server.http, "/json")
        .header("traceparent", &traceparent())
        .body(&json!({"domain": "shop", "descriptors": [
            {"entries": [{"key": "remote_address", "value": SECRET}]},
        ]}))
        .send();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let decided = collector.span("tidegate", "ShouldRateLimit", TRACE);
    for (name, value) in [
        ("tidegate.listener", "http"),
        ("tidegate.outcome", "allowed"),
        ("tidegate.limits", "1"),
    ] {
        assert_eq!(attribute(&decided, name), value, "{name}");
    }
}

/// A collector can accept an export but reject some of its records.
#[test]
fn records_that_the_collector_rejects_count_as_failed() {
    let answer = ExportMetricsServiceResponse {
        partial_success: Some(ExportMetricsPartialSuccess {
            rejected_data_points: 2,
            error_message: "too old".to_owned(),
        }),
    };
    let collector = Collector::responding_with(answer.encode_to_vec());
    let mut variables = collector.variables();
    variables.push(("OTEL_METRIC_EXPORT_INTERVAL", "50".to_owned()));
    // All spans are exported together, because each export rejects two of its spans.
    variables.push(("OTEL_BSP_SCHEDULE_DELAY", "2000".to_owned()));
    let config = format!("{EVERY_LISTENER}{RULES}");
    let mut server = Server::start_with(Scratch::new(), &config, &variables);
    for _ in 0..5 {
        server.check(&json!({"path": "/login", "ip": SECRET}));
    }
    for signal in ["traces", "metrics"] {
        let count = |page: &str, state: &str| {
            let name =
                format!("tidegate_otlp_records_total{{signal=\"{signal}\",state=\"{state}\"}} ");
            let found = page.lines().find_map(|line| line.strip_prefix(&name));
            found.unwrap().parse::<u64>().unwrap()
        };
        eventually("an export was counted", || {
            let page = server.metrics();
            let (failed, sent) = (count(&page, "failed"), count(&page, "sent"));
            (failed >= 2 && failed % 2 == 0 && sent > 0).then_some(())
        });
    }
    server.wait_for(&["cannot export", "the collector rejected 2 of", "too old"]);
}

/// The exporters wait for the collector concurrently, so that the total wait is at most 5 seconds.
#[test]
fn a_collector_that_hangs_delays_the_shutdown_by_5_seconds_at_most() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_BSP_SCHEDULE_DELAY", "50".to_owned()),
        ("OTEL_BLRP_SCHEDULE_DELAY", "50".to_owned()),
        ("OTEL_METRIC_EXPORT_INTERVAL", "50".to_owned()),
    ];
    let config = format!("{EVERY_LISTENER}{RULES}");
    let server = Server::start_with(Scratch::new(), &config, &variables);
    server.check(&json!({"path": "/login", "ip": SECRET}));
    // Each exporter has connected, and waits for the response.
    for _ in 0..3 {
        std::mem::forget(listener.accept().unwrap());
    }
    let clock = Clock::real();
    let began = clock.now();
    server.signal("TERM");
    let (status, log, _scratch) = server.wait();
    assert!(status.success(), "{log:?}");
    let took = clock.now().since(began);
    assert!(took < tidegate_core::Span::from_secs(9), "{took:?}");
    let says = |line: &String| line.contains("shutdown: not all telemetry could be exported");
    assert!(log.iter().any(says), "{log:?}");
}

#[test]
fn a_sampler_that_is_not_supported_is_reported() {
    let collector = Collector::start();
    let mut variables = collector.variables();
    variables.push(("OTEL_TRACES_SAMPLER", "jaeger_remote".to_owned()));
    let config = format!("{EVERY_LISTENER}{RULES}");
    let server = Server::start_with(Scratch::new(), &config, &variables);
    assert!(
        server.has_logged(&["WARN", "OTEL_TRACES_SAMPLER: the sampler `jaeger_remote`"]),
        "{}",
        server.log_text()
    );
}

#[test]
fn the_latency_has_the_traces_of_its_slowest_decisions() {
    let collector = Collector::start();
    let config = format!("{EVERY_LISTENER}{RULES}");
    let server = Server::start_with(Scratch::new(), &config, &collector.variables());
    // Only one in 64 decisions is measured, so send enough requests for several measurements.
    for _ in 0..300 {
        let answer = Ask::new("POST", server.http, "/v1/check")
            .header("traceparent", &traceparent())
            .body(&json!({"entries": {"path": "/login", "ip": SECRET}}))
            .send();
        assert!([200, 429].contains(&answer.status));
    }
    let page = Ask::get(server.admin, "/metrics")
        .header("accept", "application/openmetrics-text")
        .send()
        .body;
    let exemplar = format!("# {{trace_id=\"{TRACE}\"}} ");
    let mut lines = page.lines();
    let found = lines.any(|line| {
        line.starts_with("tidegate_decision_duration_seconds_bucket") && line.contains(&exemplar)
    });
    assert!(found, "{page}");
    assert!(!server.metrics().contains("trace_id"));
}

#[test]
fn log_records_are_exported() {
    let collector = Collector::start();
    let config = format!("{EVERY_LISTENER}{RULES}");
    let server = Server::start_with(Scratch::new(), &config, &collector.variables());
    eventually("the log has arrived", || {
        let messages = collector.messages("/v1/logs");
        let requests = messages
            .iter()
            .map(|body| ExportLogsServiceRequest::decode(&**body).unwrap());
        let resources = requests.flat_map(|request| request.resource_logs);
        let scopes = resources.flat_map(|resource| resource.scope_logs);
        let mut bodies = scopes
            .flat_map(|scope| scope.log_records)
            .filter_map(|record| record.body?.value);
        bodies
            .any(|body| body == AttributeValue::StringValue("rules are active".to_owned()))
            .then_some(())
    });
    drop(server);
}

/// An upstream that returns the `traceparent` of each request.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut line, mut parent) = (String::new(), String::new());
            while reader.read_line(&mut line).unwrap_or(0) > 2 {
                if let Some(value) = line.strip_prefix("traceparent: ") {
                    value.trim_end().clone_into(&mut parent);
                }
                line.clear();
            }
            let head = format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                parent.len()
            );
            let _ = stream.write_all(format!("{head}{parent}").as_bytes());
        }
    });
    address
}

fn proxy_config() -> String {
    format!(
        "{EVERY_LISTENER}{RULES}proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: ['http://{}']}}]}}\n",
        upstream()
    )
}

#[test]
fn the_proxy_passes_its_own_span_on() {
    let collector = Collector::start();
    let server = Server::start_with(Scratch::new(), &proxy_config(), &collector.variables());
    let answer = Ask::get(server.proxy(), "/login")
        .header("traceparent", &traceparent())
        .send();
    assert_eq!(answer.status, 200);
    let span = collector.span("tidegate", "proxy", TRACE);
    assert_eq!(hex(&span.parent_span_id), PARENT);
    assert_eq!(attribute(&span, "tidegate.rule"), "login");
    assert_eq!(answer.body, format!("00-{TRACE}-{}-01", hex(&span.span_id)));
    // An invalid header starts a new trace, and is not passed on.
    let answer = Ask::get(server.proxy(), "/login")
        .header("traceparent", "00-zz-!-01")
        .send();
    assert_eq!(answer.status, 200);
    assert!(
        !answer.body.contains("zz") && answer.body.len() == 55,
        "{}",
        answer.body
    );
}

#[test]
fn without_tracing_the_trace_context_is_passed_on_unchanged() {
    let server = Server::start_in(Scratch::new(), &proxy_config());
    let answer = Ask::get(server.proxy(), "/")
        .header("traceparent", &traceparent())
        .send();
    assert_eq!(answer.body, traceparent());
    assert!(!server.metrics().contains("tidegate_otlp_records_total"));
}

const LIMITS: &str = "\
domain: shop
descriptors:
  - {key: remote_address, rate_limit: {unit: year, requests_per_unit: 1000}}
";

/// Returns a bootstrap for an Envoy that exports its spans to `collector`.
fn traced_bootstrap(collector: SocketAddr) -> String {
    let bootstrap = include_str!("envoy/bootstrap.yaml");
    let tracing = format!(
        "stat_prefix: open
                tracing:
                  provider:
                    name: envoy.tracers.opentelemetry
                    typed_config:
                      \"@type\": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                      service_name: envoy
                      http_service:
                        http_uri: {{uri: 'http://{collector}/v1/traces', cluster: collector, timeout: 1s}}
"
    );
    let cluster = format!(
        "  clusters:
    - name: collector
      load_assignment:
        cluster_name: collector
        endpoints:
          - lb_endpoints:
              - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}
",
        collector.port()
    );
    bootstrap
        .replacen("stat_prefix: open\n", &tracing, 1)
        .replacen("  clusters:\n", &cluster, 1)
}

#[test]
fn one_trace_covers_envoy_tidegate_and_redis() {
    let (collector, redis) = (Collector::start(), RedisServer::start());
    let scratch = Scratch::new();
    scratch.write("shop.yaml", LIMITS);
    let config = format!(
        "{EVERY_LISTENER}{}envoy: {{config: shop.yaml}}\n",
        with_redis(&redis)
    );
    let server = Server::start_with(scratch, &config, &collector.variables());
    until_exact(&server);
    let envoy = Envoy::start(&traced_bootstrap(collector.address), server.grpc);
    let ask = Ask::get(envoy.listener("open"), "/");
    ask.header("traceparent", &traceparent()).send();
    let decided = collector.span("tidegate", "ShouldRateLimit", TRACE);
    assert_eq!(attribute(&decided, "tidegate.listener"), "grpc");
    assert_eq!(attribute(&decided, "tidegate.outcome"), "allowed");
    let call = collector.span("tidegate", "redis", TRACE);
    assert_eq!(call.parent_span_id, decided.span_id);
    // The parent of the decision span is an Envoy span.
    let parent = hex(&decided.parent_span_id);
    eventually("the span of Envoy has arrived", || {
        let spans = collector.spans();
        spans
            .iter()
            .any(|(service, span)| service == "envoy" && hex(&span.span_id) == parent)
            .then_some(())
    });
}

#[test]
fn a_collector_that_hangs_delays_no_decision_and_its_losses_are_counted() {
    // The listener accepts connections and never responds.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let variables = [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "100".to_owned()),
        ("OTEL_BSP_SCHEDULE_DELAY", "50".to_owned()),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "64".to_owned()),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32".to_owned()),
    ];
    let config = format!("{EVERY_LISTENER}{RULES}");
    let mut server = Server::start_with(Scratch::new(), &config, &variables);
    for _ in 0..300 {
        let answer = server.check(&json!({"path": "/other", "ip": SECRET}));
        assert_eq!(answer.status, 200);
    }
    let metric = |server: &Server, state: &str| {
        let metrics = server.metrics();
        let name = format!("tidegate_otlp_records_total{{signal=\"traces\",state=\"{state}\"}} ");
        let mut lines = metrics.lines();
        let line = lines.find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(metric(&server, "recorded"), 300);
    eventually("an export has failed", || {
        (metric(&server, "failed") > 0).then_some(())
    });
    assert_eq!(metric(&server, "sent"), 0);
    server.wait_for(&[
        "cannot export traces over OTLP",
        "check OTEL_EXPORTER_OTLP_ENDPOINT",
    ]);
}

#[test]
fn an_unsupported_protocol_is_refused_with_advice() {
    let mut command = tidegate(&["serve"]);
    let output = run(command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"));
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains(
            "OTEL_EXPORTER_OTLP_PROTOCOL: the protocol `grpc` is not supported; use `http/protobuf`"
        ),
        "{error}"
    );
}

#[test]
fn an_endpoint_that_is_no_url_prevents_the_start() {
    let mut command = tidegate(&["serve"]);
    let output = run(command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
        .env("OTEL_TRACES_EXPORTER", "none")
        .env("OTEL_LOGS_EXPORTER", "none"));
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = "OTEL_EXPORTER_OTLP_ENDPOINT: expected a URL such as http://127.0.0.1:4318";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn metrics_are_exported_with_the_names_of_the_page() {
    let collector = Collector::start();
    let mut variables = collector.variables();
    variables.push(("OTEL_METRIC_EXPORT_INTERVAL", "50".to_owned()));
    variables.push(("OTEL_SERVICE_NAME", "edge".to_owned()));
    let config = format!("{EVERY_LISTENER}{RULES}");
    let server = Server::start_with(Scratch::new(), &config, &variables);
    for _ in 0..3 {
        server.check(&json!({"path": "/login", "ip": SECRET}));
    }
    let is_service = |attribute: &KeyValue| {
        let name = AttributeValue::StringValue("edge".to_owned());
        attribute.key == "service.name"
            && attribute
                .value
                .as_ref()
                .and_then(|value| value.value.as_ref())
                == Some(&name)
    };
    let names = eventually("the decisions have arrived", || {
        let body = collector.messages("/v1/metrics").pop()?;
        let request = ExportMetricsServiceRequest::decode(&*body).unwrap();
        let resource = request.resource_metrics.into_iter().next()?;
        let attributes = resource.resource.unwrap().attributes;
        assert!(attributes.iter().any(is_service), "{attributes:?}");
        let names_instance = |attribute: &KeyValue| attribute.key == "service.instance.id";
        assert!(attributes.iter().any(names_instance), "{attributes:?}");
        let metrics = resource.scope_metrics.into_iter().next()?.metrics;
        let decisions = metrics
            .iter()
            .find(|metric| metric.name == "tidegate_decisions_total")?;
        let Some(Data::Sum(decisions)) = &decisions.data else {
            panic!("{decisions:?}")
        };
        let counts = decisions.data_points.iter().map(|point| match point.value {
            Some(number_data_point::Value::AsInt(count)) => count,
            _ => panic!("{point:?}"),
        });
        (counts.sum::<i64>() == 3).then(|| {
            let names = metrics.into_iter().map(|metric| metric.name);
            names.collect::<BTreeSet<String>>()
        })
    });
    // The metrics page must contain the same metrics as the export.
    let page = server.metrics();
    let on_page = page.lines().filter_map(|line| {
        let (name, _) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        Some(name.to_owned())
    });
    assert_eq!(names, on_page.collect());
}
