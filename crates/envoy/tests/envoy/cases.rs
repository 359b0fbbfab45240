//! Runs the test cases against the service, and checks that the runner detects incorrect
//! expectations.

use std::{path::PathBuf, sync::Arc};

use tidegate_redis::Redis;

use crate::{
    format,
    runner::{self, Report},
    store,
    subject::{InProcess, Started, Subject},
    support::RedisServer,
};

#[tokio::test]
async fn envoy_cases_hold_in_process() {
    hold(InProcess::new).await;
}

#[tokio::test]
async fn envoy_cases_hold_in_redis() {
    let server = RedisServer::start();
    let redis = connected(&server).await;
    hold_in(Some(&redis), InProcess::new).await;
    assert!(redis.health().batches > 0, "Redis was asked");
}

#[test]
fn envoy_load_errors_match_the_cases() {
    let mut report = Report::default();
    for (_, cases) in runner::files(&folder()) {
        add(&mut report, runner::run_load_errors(&cases));
    }
    assert_all_ran(&report);
}

/// The test runner must reject incorrect expectations. A runner that accepts them would not detect
/// defects in the service either.
#[tokio::test]
async fn wrong_envoy_cases_fail() {
    let text = "
format: 1
cases:
- id: wrong
  t0: 60
  settings: {SHADOW_MODE: true}
  config: [{name: a.yaml, yaml: \"domain: d\\ndescriptors: [{key: k, rate_limit: {unit: minute, requests_per_unit: 1}}]\"}]
  steps:
  - {domain: d, descriptors: [{entries: [[k, v]]}], expect: {overall_code: OVER_LIMIT, statuses: [{code: OK}], response_headers_to_add: [[a, b]]}}
  - {domain: d, descriptors: [{entries: [[k, v]]}], expect: {error: no}}
  - {reload: [], expect: {reload: no}}
  - {domain: '', expect: {overall_code: OK}}
  expect_stats: {d.k.total_hits: 1, d.k.unknown: 0}
- {id: empty, t0: 0, config: [], steps: []}";
    let cases = format::parse(text).unwrap();
    let report = runner::run(&cases, None, InProcess::new).await;
    let found = report.failures.join("\n");
    for expected in [
        "wrong: step 0: overall_code: expected \"OVER_LIMIT\", got \"OK\"",
        "wrong: step 0: statuses[0].current_limit: expected None, got Some(",
        "wrong: step 0: statuses[0].duration_until_reset: expected None, got Some(60)",
        "wrong: step 0: response_headers_to_add: expected [(\"a\", \"b\")], got []",
        "wrong: step 1: error: expected \"no\", got ",
        "wrong: step 2: reload: expected Some(\"no\"), got Ok(())",
        "wrong: step 3: error: expected \"none\", got \"rate limit domain must not be empty\"",
        "wrong: d.k.total_hits: expected 1, got Some(2)",
        "wrong: d.k.unknown: expected 0, got None",
        "empty: has no steps",
    ] {
        assert!(found.contains(expected), "{expected} in:\n{found}");
    }
    assert_eq!(report.failures.len(), 10, "{found}");
    for unknown in [
        "format: 1\ncasez: []",
        "format: 2",
        "format: 1\ncases: [{id: x, t0: 0, config: [], steps: [{att: 0, expect: {}}]}]",
    ] {
        assert!(format::parse(unknown).is_err(), "{unknown}");
    }
}

/// Runs all decisions in all case files with counters in memory. `connect` creates the system under
/// test for a started service.
pub(crate) async fn hold<S: Subject>(connect: impl Fn(&Started) -> S) {
    hold_in(None, connect).await;
}

async fn hold_in<S: Subject>(redis: Option<&Arc<Redis>>, connect: impl Fn(&Started) -> S) {
    let mut report = Report::default();
    for (_, cases) in runner::files(&folder()) {
        add(&mut report, runner::run(&cases, redis, &connect).await);
    }
    assert_all_ran(&report);
}

/// Returns a client that is connected to `server`.
pub(crate) async fn connected(server: &RedisServer) -> Arc<Redis> {
    let redis = Arc::new(store::at(&server.url()));
    redis.wait_for_first_attempt().await.unwrap();
    redis
}

pub(crate) fn add(report: &mut Report, other: Report) {
    report.ran += other.ran;
    report.failures.extend(other.failures);
}

#[expect(
    clippy::print_stdout,
    reason = "the number of cases shows that none was skipped"
)]
pub(crate) fn assert_all_ran(report: &Report) {
    assert!(report.ran > 0, "no case ran in {}", folder().display());
    println!("{} cases ran", report.ran);
    assert!(
        report.failures.is_empty(),
        "of {} cases:\n{}",
        report.ran,
        report.failures.join("\n")
    );
}

#[expect(
    clippy::disallowed_methods,
    reason = "an environment variable names the folder of other cases"
)]
pub(crate) fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../vectors");
    std::env::var("TIDEGATE_VECTORS").map_or_else(|_| own.into(), PathBuf::from)
}
