//! Runs the test cases with control planes that send their files as resources.

use std::sync::Arc;

use tidegate_config::envoy::DomainFiles;
use tidegate_envoy::{RateLimitAnswer, RateLimitRequest, RateLimitService};
use tidegate_redis::Redis;
use tokio::sync::Mutex;

use super::{
    control_plane::{ControlPlane, RunningClient},
    convert::Resource,
    plane::{Plane, Sent, Stream as _},
    python::PythonPlane,
};
use crate::{
    cases::{add, assert_all_ran, connected, folder},
    format::{Cases, ConfigFile},
    runner::{self, Report},
    subject::{Started, Subject},
    support::RedisServer,
};

/// The cases whose files contain keys that do not exist in the resource type: Tidegate's extensions
/// to the file format, `share_threshold` and `value_to_metric`.
const INEXPRESSIBLE: &[&str] = &[
    "window-of-any-length",
    "calendar-window",
    "other-algorithms",
    "several-limits-on-one-descriptor",
    "all-or-nothing",
    "share-threshold",
    "metric-keys",
];

/// The load error cases whose files are not valid YAML, or whose fields or units do not exist in
/// the resource type.
const INEXPRESSIBLE_ERRORS: &[&str] = &[
    "bad-unit",
    "unknown-key",
    "non-string-key",
    "list-of-scalars",
    "share-without-wildcard",
    "yaml-syntax",
];

/// A service configured by a control plane, which several services use one after the other.
struct OverXds<'p, P: Plane> {
    service: Arc<RateLimitService>,
    merging: DomainFiles,
    plane: &'p Mutex<P>,
    session: Mutex<Option<Session<P>>>,
}

struct Session<P: Plane> {
    stream: P::Stream,
    /// The number of responses, and the active version.
    sent: u32,
    version: String,
    _client: RunningClient,
}

impl<'p, P: Plane> OverXds<'p, P> {
    fn new(plane: &'p Mutex<P>, started: &Started) -> Self {
        Self {
            service: Arc::clone(&started.service),
            merging: started.merging(),
            plane,
            session: Mutex::default(),
        }
    }

    async fn connect(&self) -> Session<P> {
        let mut plane = self.plane.lock().await;
        let mut config = plane.config();
        config.merging = self.merging;
        let client = RunningClient::start(config, &self.service);
        let mut stream = plane.accept().await;
        stream.subscribe("").await;
        Session {
            stream,
            sent: 0,
            version: String::new(),
            _client: client,
        }
    }
}

impl<P: Plane> Subject for OverXds<'_, P> {
    async fn load(&self, _: &Started, files: &[ConfigFile]) -> Result<(), String> {
        let resources: Option<Vec<_>> = files.iter().map(Resource::of).collect();
        let resources = resources.ok_or("the resource type cannot express this file")?;
        let mut session = self.session.lock().await;
        if session.is_none() {
            *session = Some(self.connect().await);
        }
        let session = session.as_mut().unwrap();
        session.sent += 1;
        let version = format!("v{}", session.sent);
        let sent = Sent {
            version: &version,
            nonce: &format!("n{}", session.sent),
            before: &session.version,
        };
        session.stream.publish(&sent, &resources).await?;
        session.version = version;
        Ok(())
    }

    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String> {
        let answer = self.service.should_rate_limit(request).await;
        answer.map_err(|error| error.to_string())
    }
}

/// Removes the cases that resources cannot express, and returns their names.
fn take_inexpressible(cases: &mut Cases) -> Vec<String> {
    let mut inexpressible = Vec::new();
    cases.cases.retain(|case| {
        let reloads = case.steps.iter().filter_map(|step| step.reload.as_ref());
        let mut files = reloads.flatten().chain(&case.config);
        let is_expressible = files.all(|file| Resource::of(file).is_some());
        if !is_expressible {
            inexpressible.push(case.id.clone());
        }
        is_expressible
    });
    inexpressible
}

async fn hold_over_xds<P: Plane>(redis: Option<&Arc<Redis>>) {
    let plane = Mutex::new(P::start().await);
    let mut report = Report::default();
    let mut inexpressible = Vec::new();
    for (_, mut cases) in runner::files(&folder()) {
        inexpressible.extend(take_inexpressible(&mut cases));
        let connect = |started: &Started| OverXds::new(&plane, started);
        add(&mut report, runner::run(&cases, redis, connect).await);
    }
    assert_all_ran(&report);
    assert_inexpressible(&inexpressible, INEXPRESSIBLE);
}

/// Asserts that exactly the `expected` cases of Tidegate's own case files did not run.
fn assert_inexpressible(found: &[String], expected: &[&str]) {
    if folder().ends_with("vectors") {
        assert_eq!(found, expected);
    }
}

async fn load_errors_over_xds<P: Plane>() {
    let plane = Mutex::new(P::start().await);
    let mut report = Report::default();
    let mut inexpressible = Vec::new();
    for (_, cases) in runner::files(&folder()) {
        for case in &cases.load_error_cases {
            if case.config.iter().any(|file| Resource::of(file).is_none()) {
                inexpressible.push(case.id.clone());
                continue;
            }
            report.ran += 1;
            let started = Started::new(&runner::variables(&case.settings), 0).unwrap();
            let subject = OverXds::new(&plane, &started);
            match subject.load(&started, &case.config).await {
                // protobuf writes unit names in upper case.
                Err(error)
                    if error
                        .to_lowercase()
                        .contains(&case.error_contains.to_lowercase()) => {}
                loaded => report.failures.push(format!(
                    "{}: expected {:?}, got {loaded:?}",
                    case.id, case.error_contains
                )),
            }
        }
    }
    assert_all_ran(&report);
    assert_inexpressible(&inexpressible, INEXPRESSIBLE_ERRORS);
}

#[tokio::test]
async fn envoy_cases_hold_over_xds_from_rust() {
    hold_over_xds::<ControlPlane>(None).await;
}

#[tokio::test]
async fn envoy_cases_hold_over_xds_from_python() {
    hold_over_xds::<PythonPlane>(None).await;
}

#[tokio::test]
async fn envoy_cases_hold_over_xds_from_rust_in_redis() {
    let server = RedisServer::start();
    hold_over_xds::<ControlPlane>(Some(&connected(&server).await)).await;
}

#[tokio::test]
async fn envoy_cases_hold_over_xds_from_python_in_redis() {
    let server = RedisServer::start();
    hold_over_xds::<PythonPlane>(Some(&connected(&server).await)).await;
}

#[tokio::test]
async fn load_errors_are_the_same_over_xds_from_rust() {
    load_errors_over_xds::<ControlPlane>().await;
}

#[tokio::test]
async fn load_errors_are_the_same_over_xds_from_python() {
    load_errors_over_xds::<PythonPlane>().await;
}
