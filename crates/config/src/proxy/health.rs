//! `proxy.upstreams[].eject` and `.health`: outlier detection and active health checks.

use std::{ops::RangeInclusive, time::Duration};

use super::{time, within};
use crate::{
    report::Report,
    value::{Fields, Value},
};

/// The range of the settings for numbers of consecutive failures or checks.
const IN_A_ROW: RangeInclusive<u32> = 1..=1_000;

/// The settings of outlier detection, which ejects an endpoint after consecutive failed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ejection {
    /// `failures`: the number of consecutive failures after which an endpoint is ejected, 1 to
    /// 1,000; default 5.
    pub failures: u32,
    /// `for`: the duration of an ejection; default 10 s.
    pub time: Duration,
}

impl Default for Ejection {
    fn default() -> Self {
        Self {
            failures: 5,
            time: Duration::from_secs(10),
        }
    }
}

/// The settings of the active health checks of an upstream's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// `path`: the path that a check requests. A check succeeds if the status of the response is
    /// 200 to 399.
    pub path: Box<str>,
    /// `interval`: the time between two checks; default 5 s.
    pub interval: Duration,
    /// `timeout`: the timeout of a check, from connecting until the response head is received;
    /// default 1 s.
    pub timeout: Duration,
    /// `healthy_after`: the number of consecutive successful checks after which an endpoint is
    /// marked up, 1 to 1,000; default 2.
    pub healthy_after: u32,
    /// `unhealthy_after`: the number of consecutive failed checks after which an endpoint is marked
    /// down, 1 to 1,000; default 3.
    pub unhealthy_after: u32,
}

/// Reads the outlier detection of an upstream from `eject`. Returns `None` if outlier detection is
/// off.
pub(super) fn eject(upstream: &Fields<'_>, report: &mut Report) -> Option<Ejection> {
    let mut ejection = Ejection::default();
    let Some(value) = upstream.get("eject") else {
        return Some(ejection);
    };
    if value.scalar() == Some("off") {
        return None;
    }
    let what = "off, or a map such as {failures: 5, duration: 10s}";
    let fields = value.fields(report, what, &["failures", "duration"])?;
    if let Some(failures) = count(&fields, "failures", report) {
        ejection.failures = failures;
    }
    if let Some(time) = fields.get("duration").and_then(|value| time(value, report)) {
        ejection.time = time;
    }
    Some(ejection)
}

pub(super) fn health(value: &Value<'_>, report: &mut Report) -> Option<HealthCheck> {
    let known = &[
        "path",
        "interval",
        "timeout",
        "healthy_after",
        "unhealthy_after",
    ];
    let what = "a map such as {path: /healthz, interval: 5s}";
    let fields = value.fields(report, what, known)?;
    let mut duration = |name| fields.get(name).and_then(|value| time(value, report));
    let (interval, timeout) = (duration("interval"), duration("timeout"));
    let healthy_after = count(&fields, "healthy_after", report);
    let unhealthy_after = count(&fields, "unhealthy_after", report);
    Some(HealthCheck {
        path: path(&fields, report)?,
        interval: interval.unwrap_or(Duration::from_secs(5)),
        timeout: timeout.unwrap_or(Duration::from_secs(1)),
        healthy_after: healthy_after.unwrap_or(2),
        unhealthy_after: unhealthy_after.unwrap_or(3),
    })
}

fn path(fields: &Fields<'_>, report: &mut Report) -> Option<Box<str>> {
    let what = "a path such as /healthz";
    let Some(value) = fields.get("path") else {
        if !fields.tries("path") {
            fields.wrong(report, "path", format!("is missing; name {what}"));
        }
        return None;
    };
    let path = value.text(report, what)?;
    let is_path = path.starts_with('/') && path.parse::<http::uri::PathAndQuery>().is_ok();
    if !is_path {
        value.expected(report, what);
    }
    is_path.then(|| path.into())
}

fn count(fields: &Fields<'_>, name: &str, report: &mut Report) -> Option<u32> {
    let value = fields.get(name)?;
    within(value.small_number(report)?, IN_A_ROW, value, report)
}
