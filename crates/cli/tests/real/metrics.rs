//! Tests of the metrics page with the parsers in Prometheus's Python client.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use serde::Deserialize;
use serde_json::json;

use crate::{
    fleet::until_exact,
    servers::RedisServer,
    support::{Ask, EVERY_LISTENER, Scratch, Server, authority, repository, run, signed},
};

/// A configuration that enables every component with its own metrics.
const EVERYTHING: &str = r#"grpc: {tls: {certificate: server.pem, key: server.key}}
geoip: {country: country.mmdb}
envoy: {config: envoy.yaml}
events: {webhooks: [{url: 'http://127.0.0.1:9', secret: any}]}
proxy:
  listen: '127.0.0.1:0'
  access_log: access.log
  upstreams:
    - name: shop
      urls: ['http://127.0.0.1:9']
      adaptive: {classes: [{name: usual, when: {path: /**}}]}
rules: [{name: "a \"quoted\\\" name", key: [user], limits: [5/h]}]
"#;
const RULE: &str = r#"a "quoted\" name"#;

const ENVOY: &str = "domain: shop
descriptors: [{key: api_key, rate_limit: {unit: hour, requests_per_unit: 2}}]
";

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The `Accept` header that Prometheus 2.42 sends.
const ACCEPT: &str = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";

/// A Python program that prints the metrics on a page as JSON.
const PARSE: &str = "
import json, sys
if sys.argv[1] == 'openmetrics':
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
else:
    from prometheus_client.parser import text_string_to_metric_families as parse
print(json.dumps([
    {'name': metric.name, 'kind': metric.type, 'help': metric.documentation, 'unit': metric.unit,
     'samples': [{'name': sample.name, 'labels': sample.labels} for sample in metric.samples]}
    for metric in parse(open(sys.argv[2], newline='').read())
]))
";

/// A metric as the Prometheus client library parses it. The `name` of a counter does not include
/// the suffix `_total`.
#[derive(Debug, Deserialize)]
struct Metric {
    name: String,
    kind: String,
    help: String,
    unit: String,
    samples: Vec<Sample>,
}

#[derive(Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
}

impl Metric {
    /// Returns the name with the suffix `_total` for counters, as in the text format, in queries
    /// and in the documentation.
    fn full_name(&self) -> String {
        let suffix = if self.kind == "counter" { "_total" } else { "" };
        format!("{}{suffix}", self.name)
    }
}

/// A server with every component that has metrics, and the server's Redis.
struct Everything {
    server: Server,
    _redis: RedisServer,
}

impl Everything {
    fn start() -> Self {
        let redis = RedisServer::start();
        let scratch = Scratch::new();
        authority(scratch.path(), "ca");
        signed(scratch.path(), "ca", "server");
        scratch.write("envoy.yaml", ENVOY);
        let database = "crates/identity/tests/maxmind/GeoLite2-Country-Test.mmdb";
        fs::copy(repository().join(database), scratch.join("country.mmdb")).unwrap();
        let store = format!("store: {{redis: \"{}\", timeout: 2s}}\n", redis.url());
        let candidate = scratch.write("candidate.yaml", "rules: [{name: next, limits: [1/d]}]\n");
        let watched = format!(
            "candidate: {{rules: {}}}\nrecord: {{to: {}}}\n",
            candidate.display(),
            scratch.join("requests.jsonl").display()
        );
        let config = format!("{EVERY_LISTENER}{store}{watched}{EVERYTHING}");
        let server = Server::start_in(scratch, &config);
        until_exact(&server);
        assert_eq!(server.check(&json!({"user": "u1"})).status, 200);
        for domain in ["shop", "unknown"] {
            let descriptor = json!({"entries": [{"key": "api_key", "value": "a"}]});
            let body = json!({"domain": domain, "descriptors": [descriptor]});
            let answer = Ask::new("POST", server.http, "/json").body(&body).send();
            assert_eq!(answer.status, 200, "{}", answer.body);
        }
        Self {
            server,
            _redis: redis,
        }
    }

    /// Requests the metrics page in the format that `accept` selects, and parses it.
    fn metrics(&self, accept: &str, content_type: &str) -> Vec<Metric> {
        let ask = Ask::get(self.server.admin, "/metrics").header("accept", accept);
        let answer = ask.send();
        assert_eq!(answer.header("content-type"), content_type);
        assert_eq!(answer.header("vary"), "accept");
        let page = self.server.directory().join("page");
        fs::write(&page, &answer.body).unwrap();
        let python = repository().join("target/test-python/bin/python3");
        let format = content_type.split_once("text").unwrap().0;
        let format = if format.is_empty() {
            "text"
        } else {
            "openmetrics"
        };
        let mut parser = Command::new(python);
        let parsed = run(parser.args(["-c", PARSE, format]).arg(page));
        assert!(
            parsed.status.success(),
            "{parsed:?}\nin {}\nif prometheus_client is missing, run scripts/setup",
            answer.body
        );
        serde_json::from_slice(&parsed.stdout).unwrap()
    }
}

#[test]
fn prometheus_reads_the_same_metrics_in_both_formats() {
    let everything = Everything::start();
    let text = everything.metrics("*/*", TEXT);
    let open_metrics = everything.metrics(ACCEPT, OPEN_METRICS);
    assert!(text.len() > 70, "{} metrics", text.len());
    let samples = |metric: &Metric| metric.samples.iter().cloned().collect::<BTreeSet<Sample>>();
    for (text, open_metrics) in text.iter().zip(&open_metrics) {
        assert_eq!(text.name, open_metrics.name);
        assert_eq!(text.kind, open_metrics.kind, "{}", text.name);
        assert_eq!(text.help, open_metrics.help, "{}", text.name);
        assert!(text.help.ends_with('.'), "{}: {}", text.name, text.help);
        assert_eq!(samples(text), samples(open_metrics));
        let unit = ["seconds", "bytes"]
            .into_iter()
            .find(|unit| text.name.ends_with(unit));
        assert_eq!(open_metrics.unit, unit.unwrap_or_default(), "{}", text.name);
    }
    assert_eq!(text.len(), open_metrics.len());
    let of_rules = |metric: &&Metric| metric.name == "tidegate_rule_shadow_denials";
    let samples = &text.iter().find(of_rules).unwrap().samples;
    assert_eq!(samples[0].labels["rule"], RULE);
}

/// The tables in the documentation and the metrics page must contain the same metrics with the same
/// labels.
#[test]
fn the_page_has_exactly_the_documented_metrics() {
    let everything = Everything::start();
    let mut documented = documented();
    for metric in everything.metrics("*/*", TEXT) {
        let name = metric.full_name();
        let documented = documented.remove(&name);
        let documented = documented.unwrap_or_else(|| panic!("{name} is not documented"));
        assert!(!metric.samples.is_empty(), "{name} has no sample");
        for Sample { labels, .. } in &metric.samples {
            // Every histogram bucket has the label `le`, which the documentation does not list.
            let labels = labels.keys().filter(|label| *label != "le");
            let labels: BTreeSet<String> = labels.cloned().collect();
            match &documented {
                Column::Labels(documented) => assert_eq!(labels, *documented, "{name}"),
                Column::Type(kind) => assert_eq!(metric.kind, *kind, "{name}"),
            }
        }
    }
    // Only a server with a control plane has these metrics. The xDS tests check these metrics.
    documented.retain(|name, _| !name.starts_with("tidegate_envoy_xds_"));
    assert!(documented.is_empty(), "not on the page: {documented:?}");
}

/// The second column of a metrics table.
#[derive(Debug)]
pub(crate) enum Column {
    Labels(BTreeSet<String>),
    Type(String),
}

/// Returns the metrics in the tables of the documentation.
pub(crate) fn documented() -> BTreeMap<String, Column> {
    let mut metrics = BTreeMap::new();
    for document in fs::read_dir(repository().join("docs")).unwrap() {
        let path = document.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let mut second_column = "";
        let text = fs::read_to_string(path).unwrap();
        for line in text.lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            match cells[..] {
                ["", "metric", column, ..] => second_column = column,
                ["", names, second, ..] => {
                    // A name with a label selector describes some series of a metric. The metric
                    // itself is in another table.
                    for name in quoted(names).filter(|name| !name.contains('{')) {
                        let column = match second_column {
                            "labels" => Column::Labels(labels(second)),
                            "type" => Column::Type(second.to_owned()),
                            _ => continue,
                        };
                        metrics.insert(name.to_owned(), column);
                    }
                }
                _ => second_column = "",
            }
        }
    }
    metrics
}

/// Returns the labels in a cell. The strings in parentheses are label values.
fn labels(cell: &str) -> BTreeSet<String> {
    let labels = cell.split('(').next().unwrap();
    quoted(labels).map(str::to_owned).collect()
}

/// Returns the strings in backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}
