//! `denials`: the settings for keeping recent denials in memory and logging denials.

use super::{
    limits::percent,
    report::Report,
    store::size,
    value::{Fields, Shape, Value},
};

/// The minimum of `max_bytes`. It is enough for two 8 KiB segments in each of the 16 thread groups.
const MIN_BYTES: usize = 256 << 10;
/// The maximum of `max_bytes`.
const MAX_BYTES: usize = 1 << 30;

/// The settings for keeping recent denials in memory and logging denials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenialsConfig {
    /// `denials.max_bytes`: the memory for recent denials, 256 KiB to 1 GiB; default 4 MiB. With 0
    /// (`denials: off`), no denials are kept.
    pub max_bytes: usize,
    /// `denials.log`: the percentage of denials to log; default 0 (`off`).
    pub log_percent: u32,
}

impl Default for DenialsConfig {
    fn default() -> Self {
        Self {
            max_bytes: 4 << 20,
            log_percent: 0,
        }
    }
}

pub(super) fn denials(file: &Fields<'_>, report: &mut Report) -> DenialsConfig {
    let mut denials = DenialsConfig::default();
    let Some(value) = file.get("denials") else {
        return denials;
    };
    let what = "off, or a map such as {max_bytes: 4MiB, log: 1%}";
    if let Shape::Scalar = value.shape() {
        match value.scalar() {
            Some("off") => denials.max_bytes = 0,
            _ => value.expected(report, what),
        }
        return denials;
    }
    let Some(fields) = value.fields(report, what, &["max_bytes", "log"]) else {
        return denials;
    };
    if let Some(value) = fields.get("max_bytes")
        && let Some(bytes) = size(value, report)
    {
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
            value.wrong(
                report,
                "must be 256KiB to 1GiB; to keep no denials, write `denials: off`",
            );
        }
        denials.max_bytes = bytes;
    }
    if let Some(value) = fields.get("log") {
        denials.log_percent = log_percent(value, report).unwrap_or_default();
    }
    denials
}

/// Reads the percentage of denials to log, or `off`.
fn log_percent(value: &Value<'_>, report: &mut Report) -> Option<u32> {
    if value.scalar() == Some("off") {
        return None;
    }
    let percent = percent(value, report)?;
    if !(1..=100).contains(&percent) {
        value.wrong(report, "must be 1% to 100%, or off");
        return None;
    }
    Some(percent)
}
