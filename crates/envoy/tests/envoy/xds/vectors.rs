//! Runs the test cases with a control plane that sends their files as resources.

use std::sync::Arc;

use tidegate_config::envoy::DomainFiles;
use tidegate_envoy::{RateLimitAnswer, RateLimitRequest, RateLimitService};
use tokio::sync::Mutex;

use super::{
    control_plane::{AdsStream, ControlPlane, RunningClient, packed},
    convert,
};
use crate::{
    cases::{assert_all_ran, folder},
    format::ConfigFile,
    runner::{self, Report},
    subject::{Started, Subject},
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

/// A service configured by a control plane.
struct OverXds {
    service: Arc<RateLimitService>,
    merging: DomainFiles,
    plane: Mutex<Option<Plane>>,
}

struct Plane {
    stream: AdsStream,
    /// The number of responses, and the active version.
    sent: u32,
    version: String,
    _client: RunningClient,
    _plane: ControlPlane,
}

impl Subject for OverXds {
    fn new(started: &Started) -> Self {
        Self {
            service: Arc::clone(&started.service),
            merging: started.merging(),
            plane: Mutex::new(None),
        }
    }

    async fn load(&self, _: &Started, files: &[ConfigFile]) -> Result<(), String> {
        let resources = files
            .iter()
            .map(|file| convert::resource(file).map(|config| packed(&config)));
        let resources = resources.collect::<Option<Vec<_>>>();
        let resources = resources.ok_or("the resource type cannot express this file")?;
        let mut plane = self.plane.lock().await;
        if plane.is_none() {
            let mut control_plane = ControlPlane::start().await;
            let mut config = control_plane.config();
            config.merging = self.merging;
            let client = RunningClient::start(config, &self.service);
            let mut stream = control_plane.accept().await;
            stream.subscription("").await;
            *plane = Some(Plane {
                stream,
                sent: 0,
                version: String::new(),
                _client: client,
                _plane: control_plane,
            });
        }
        let plane = plane.as_mut().unwrap();
        plane.sent += 1;
        let version = format!("v{}", plane.sent);
        let nonce = format!("n{}", plane.sent);
        let sent = (version.as_str(), nonce.as_str(), plane.version.as_str());
        plane.stream.send(sent, resources).await?;
        plane.version = version;
        Ok(())
    }

    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String> {
        let answer = self.service.should_rate_limit(request).await;
        answer.map_err(|error| error.to_string())
    }
}

#[tokio::test]
async fn envoy_cases_hold_over_xds() {
    let mut report = Report::default();
    let mut inexpressible = Vec::new();
    for (_, mut cases) in runner::files(&folder()) {
        cases.cases.retain(|case| {
            let reloads = case.steps.iter().filter_map(|step| step.reload.as_ref());
            let mut files = reloads.flatten().chain(&case.config);
            let is_expressible = files.all(|file| convert::resource(file).is_some());
            if !is_expressible {
                inexpressible.push(case.id.clone());
            }
            is_expressible
        });
        crate::cases::add(&mut report, runner::run::<OverXds>(&cases, None).await);
    }
    assert_all_ran(&report);
    if folder().ends_with("vectors") {
        assert_eq!(inexpressible, INEXPRESSIBLE);
    }
}

#[tokio::test]
async fn load_errors_are_the_same_over_xds() {
    let (mut failures, mut ran) = (Vec::new(), 0);
    for (_, cases) in runner::files(&folder()) {
        for case in &cases.load_error_cases {
            let expressible = case.config.iter().map(convert::resource);
            if expressible.collect::<Option<Vec<_>>>().is_none() {
                continue;
            }
            ran += 1;
            let started = Started::new(&runner::variables(&case.settings), 0).unwrap();
            let loaded = OverXds::new(&started).load(&started, &case.config).await;
            match loaded {
                // protobuf writes unit names in upper case.
                Err(error)
                    if error
                        .to_lowercase()
                        .contains(&case.error_contains.to_lowercase()) => {}
                loaded => failures.push(format!(
                    "{}: expected {:?}, got {loaded:?}",
                    case.id, case.error_contains
                )),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(ran > 0, "no case can be expressed as resources");
}
