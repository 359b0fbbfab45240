//! Tests of `contrib/prometheus` and `contrib/grafana`: the syntax, the alerts' unit tests, the
//! metric names, and the documentation links. A separate script, `contrib/prometheus/verify`, tests
//! the alerts and the dashboards with real servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::{Value, json};

use crate::{
    metrics::documented,
    support::{Scratch, repository, run, tool},
};

const RULES: &str = "contrib/prometheus/tidegate.rules.yaml";
const DASHBOARDS: [&str; 2] = [
    "contrib/grafana/tidegate-operators.json",
    "contrib/grafana/tidegate-fleet.json",
];

/// The base URL of the documentation links in the rules and the dashboards.
const DOCUMENTS: &str = "https://github.com/tidegate/tidegate/blob/main/";

/// The suffixes that the names of a histogram's series have in addition to the metric's name.
const SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap()
}

/// Runs a Prometheus program or a script in `contrib/prometheus`.
fn in_contrib(program: PathBuf, args: &[&str]) -> Output {
    let folder = repository().join("contrib/prometheus");
    run(Command::new(program).args(args).current_dir(folder))
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn prometheus_and_alertmanager_accept_the_files() {
    let promtool = |args: &[&str]| assert_success(&in_contrib(tool("promtool"), args));
    promtool(&["check", "rules", "tidegate.rules.yaml"]);
    promtool(&["check", "config", "prometheus.yaml"]);
    let check = ["check-config", "alertmanager.yaml"];
    assert_success(&in_contrib(tool("amtool"), &check));
}

#[test]
fn the_alerts_pass_their_unit_tests() {
    let test = ["test", "rules", "tests.yaml", "tests-surge.yaml"];
    assert_success(&in_contrib(tool("promtool"), &test));
}

#[test]
fn the_generated_files_are_current() {
    for script in ["poisson.py", "../grafana/dashboards.py"] {
        let arguments = ["-B", script, "--check"];
        assert_success(&in_contrib("python3".into(), &arguments));
    }
}

/// The table in `docs/alerts.md` must list exactly the alerts in the rules file.
#[test]
fn the_page_lists_exactly_the_alerts() {
    let rules = read(RULES);
    let alerts: BTreeSet<&str> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    let page = read("docs/alerts.md");
    let listed: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `Tidegate"))
        .filter_map(|line| line.split('`').next())
        .collect();
    let alerts: BTreeSet<&str> = alerts
        .iter()
        .map(|alert| alert.strip_prefix("Tidegate").unwrap())
        .collect();
    assert_eq!(alerts, listed);
}

#[test]
fn the_metrics_of_rules_and_dashboards_are_documented() {
    let documented = documented();
    let queries = DASHBOARDS.into_iter().flat_map(queries);
    for text in queries.chain([read(RULES)]) {
        for name in names(&text) {
            let metric = SUFFIXES
                .into_iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .unwrap_or(name);
            assert!(
                documented.contains_key(name) || documented.contains_key(metric),
                "{name} is not documented, in {text}"
            );
        }
    }
}

/// Returns the names of Tidegate's metrics in `text`. Skips names with a colon, which belong to
/// recording rules.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|char: char| !(char.is_ascii_alphanumeric() || "_:".contains(char)))
        .filter(|word| word.starts_with("tidegate_") && !word.contains(':'))
}

/// Returns all queries in a dashboard. Each variable is replaced as if all of its values were
/// selected.
fn queries(dashboard: &str) -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read(dashboard)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array());
    let annotations = dashboard["annotations"]["list"].as_array().unwrap();
    targets
        .flatten()
        .chain(annotations)
        .map(|target| {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$__rate_interval", "1m");
            ["$job", "$instance", "$rule"]
                .iter()
                .fold(query, |query, variable| query.replace(variable, ".*"))
        })
        .collect()
}

#[test]
fn prometheus_accepts_every_query_of_the_dashboards() {
    let recorded: BTreeSet<String> = read(RULES)
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- record: "))
        .map(str::to_owned)
        .collect();
    for dashboard in DASHBOARDS {
        let queries = queries(dashboard);
        assert!(queries.len() > 30, "{dashboard}: {}", queries.len());
        for query in &queries {
            let words = query.split(|char: char| "({ )".contains(char));
            for name in words.filter(|word| word.contains(":tidegate_")) {
                assert!(recorded.contains(name), "no rule records {name}");
            }
        }
        // promtool 2.42 can check queries only as part of rules, so each query becomes a rule. The
        // rules are written as JSON, which is also valid YAML.
        let rules: Vec<Value> = queries
            .iter()
            .enumerate()
            .map(|(number, query)| json!({"record": format!("query_{number}"), "expr": query}))
            .collect();
        let group = json!({"groups": [{"name": dashboard, "rules": rules}]});
        let scratch = Scratch::new();
        let file = scratch.write("queries.yaml", &group.to_string());
        let check = ["check", "rules", file.to_str().unwrap()];
        assert_success(&in_contrib(tool("promtool"), &check));
    }
}

#[test]
fn every_panel_has_a_title_a_unit_and_a_description() {
    for dashboard in DASHBOARDS {
        let dashboard: Value = serde_json::from_str(&read(dashboard)).unwrap();
        let mut titles = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            assert!(titles.insert(title), "two panels are named {title}");
            if panel["type"] == "row" {
                continue;
            }
            let description = panel["description"].as_str().unwrap();
            assert!(description.ends_with('.'), "{title}: {description}");
            let unit = &panel["fieldConfig"]["defaults"]["unit"];
            assert!(unit.is_string(), "{title} has no unit");
            // The user selects the data source with a dashboard variable.
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        }
    }
}

#[test]
fn the_rules_and_dashboards_link_to_existing_sections() {
    let mut sections: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let texts = [RULES].into_iter().chain(DASHBOARDS).map(read);
    let mut count = 0;
    for text in texts {
        for link in text.split(DOCUMENTS).skip(1) {
            let link = link.split(['"', '\n', ' ']).next().unwrap();
            let (page, section) = link.split_once('#').unwrap_or((link, ""));
            let sections = sections
                .entry(page.to_owned())
                .or_insert_with(|| anchors(&read(page)));
            assert!(
                section.is_empty() || sections.contains(section),
                "{page} has no section {section}: {sections:?}"
            );
            count += 1;
        }
    }
    assert!(count > 20, "{count} links");
}

/// Returns the anchors that GitHub generates for a page's headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = |char: &char| char.is_alphanumeric() || " -_".contains(*char);
            heading.chars().filter(kept).collect::<String>()
        })
        .map(|heading| heading.replace(' ', "-"))
        .collect()
}
