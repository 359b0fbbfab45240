//! Runs the cases in a folder against a [`Subject`], which is the system under test.

use std::{fs, path::Path, sync::Arc};

use serde_json::Value;
use tidegate_envoy::{
    Descriptor, HitCounterKind, LimitOverride, RateLimitRequest, RateLimitService, Unit, Variables,
};
use tidegate_redis::Redis;

use crate::{
    compare::compare,
    corrected,
    format::{self, Case, Cases, DescriptorFields, LoadErrorCase, Step},
    subject::{Started, StoreKind, Subject},
};

/// The result of running the cases.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) ran: usize,
    pub(crate) failures: Vec<String>,
}

/// Returns every case file in `folder`, sorted by name.
pub(crate) fn files(folder: &Path) -> Vec<(String, Cases)> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = entries
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("envoy") && name.ends_with(".yaml")
        })
        .collect();
    paths.sort();
    let read = |path: &Path| {
        let name = path.display().to_string();
        let cases = format::parse(&fs::read_to_string(path).unwrap());
        (
            name.clone(),
            cases.unwrap_or_else(|error| panic!("{name}: {error}")),
        )
    };
    paths.iter().map(|path| read(path)).collect()
}

/// Runs every decision in `cases`, with counters in memory or in `redis`. For each case, `connect`
/// creates the system under test for a started service.
pub(crate) async fn run<S: Subject>(
    cases: &Cases,
    redis: Option<&Arc<Redis>>,
    connect: impl Fn(&Started) -> S,
) -> Report {
    let mut report = Report::default();
    for case in &cases.cases {
        report.ran += 1;
        let store_kind = redis.map_or(StoreKind::Memory, |redis| StoreKind::Redis(redis, &case.id));
        let failures = run_case(case, store_kind, &connect).await;
        report.failures.extend(
            failures
                .into_iter()
                .map(|failure| format!("{}: {failure}", case.id)),
        );
    }
    report
}

async fn run_case<S: Subject>(
    case: &Case,
    store_kind: StoreKind<'_>,
    connect: impl Fn(&Started) -> S,
) -> Vec<String> {
    let started = match Started::on(store_kind, &variables(&case.settings), case.t0) {
        Ok(started) => started,
        Err(error) => return vec![format!("settings: {error}")],
    };
    let subject = connect(&started);
    if let Err(error) = subject.load(&started, &case.config).await {
        return vec![format!("config: {error}")];
    }
    let mut failures = Vec::new();
    if case.steps.is_empty() {
        failures.push("has no steps".into());
    }
    for (at, step) in case.steps.iter().enumerate() {
        let differences = run_step(case, at, step, (&started, &subject)).await;
        failures.extend(
            differences
                .into_iter()
                .map(|difference| format!("step {at}: {difference}")),
        );
    }
    if let Some(redis_store) = started.limiter.redis_store() {
        let [_, _, (_, local), (_, policy)] = redis_store.stats().decisions;
        if local + policy > 0 {
            failures.push(format!(
                "{local} local decisions and {policy} by policy, expected none"
            ));
        }
    }
    for (name, expected) in &case.expect_stats {
        let got = stat(&started.service, name);
        if got != Some(*expected) {
            failures.push(format!("{name}: expected {expected}, got {got:?}"));
        }
    }
    failures
}

async fn run_step<S: Subject>(
    case: &Case,
    at: usize,
    step: &Step,
    (started, subject): (&Started, &S),
) -> Vec<String> {
    started.set(case.t0 + step.at.unwrap_or(0));
    let expected = corrected::expectation(case, at);
    if let Some(files) = &step.reload {
        let loaded = subject.load(started, files).await;
        return match (expected.reload.as_deref(), loaded) {
            (Some("ok"), Ok(())) => Vec::new(),
            (Some(part), Err(error)) if error.contains(part) => Vec::new(),
            (expected, loaded) => vec![format!("reload: expected {expected:?}, got {loaded:?}")],
        };
    }
    let request = request(step);
    for _ in 1..step.repeat.unwrap_or(1) {
        let _ = subject.ask(&request).await;
    }
    compare(&expected, &subject.ask(&request).await)
}

fn request(step: &Step) -> RateLimitRequest {
    RateLimitRequest {
        domain: step.domain.clone(),
        descriptors: step.descriptors.iter().map(descriptor).collect(),
        hits_addend: step.hits_addend.unwrap_or(0),
    }
}

fn descriptor(fields: &DescriptorFields) -> Descriptor {
    let limit = fields.limit.as_ref().map(|limit| LimitOverride {
        requests_per_unit: limit.requests_per_unit,
        unit: Unit::parse(&limit.unit).unwrap_or_else(|| panic!("no unit: {}", limit.unit)),
    });
    Descriptor {
        entries: fields.entries.clone(),
        limit,
        hits_addend: fields.hits_addend,
        is_negative_hits: fields.is_negative_hits,
    }
}

/// Returns the value of the counter that has this name in envoyproxy/ratelimit. The value is 0 if
/// the counter has never been used.
fn stat(service: &RateLimitService, name: &str) -> Option<u64> {
    if name == "global_shadow_mode" {
        return Some(service.global_shadow_mode());
    }
    let (path, counter) = name.rsplit_once('.')?;
    if counter == "domain_not_found" {
        return Some(service.domain_not_found(path));
    }
    let (_, wanted) = HitCounterKind::ALL
        .into_iter()
        .find(|(known, _)| *known == counter)?;
    let mut found = 0;
    service.for_each_counter(|domain, rule, counter, hits| {
        if counter == wanted && format!("{domain}.{rule}") == path {
            found = hits;
        }
    });
    Some(found)
}

/// Converts settings to environment variables.
pub(crate) fn variables(settings: &std::collections::BTreeMap<String, Value>) -> Variables {
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    settings
        .iter()
        .map(|(name, value)| (name.clone(), text(value)))
        .collect()
}

/// Runs every load error case in `cases`.
pub(crate) fn run_load_errors(cases: &Cases) -> Report {
    let mut report = Report::default();
    for case in &cases.load_error_cases {
        report.ran += 1;
        report
            .failures
            .extend(load_error(case).map(|failure| format!("{}: {failure}", case.id)));
    }
    report
}

fn load_error(case: &LoadErrorCase) -> Option<String> {
    let started = match Started::new(&variables(&case.settings), 0) {
        Ok(started) => started,
        Err(error) => return Some(format!("settings: {error}")),
    };
    match started.load(&case.config) {
        Ok(()) => Some("expected an error, but it loads".into()),
        Err(error) if error.contains(&case.error_contains) => None,
        Err(error) => Some(format!("expected {:?}, got {error}", case.error_contains)),
    }
}
