//! `proxy.max_requests_per_client`, `.min_rate` and `.response_buffer`: resource limits for one
//! client and for slow clients.

use tidegate_net::MinRate;

use super::{MAX_CONNECTIONS, time, within};
use crate::{
    report::Report,
    store::size,
    value::{Fields, Value},
};

/// The range of `min_rate.bytes_per_second`.
const RATES: std::ops::RangeInclusive<u64> = 1..=1 << 30;

/// The maximum of `response_buffer`, in bytes.
const MAX_RESPONSE_BUFFER: usize = 16 << 20;

/// Limits on the proxy and upstream resources that one client can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slow {
    /// `max_requests_per_client`: the maximum number of requests in flight per client address
    /// (IPv6: per /64), 1 to 1,000,000; default 256.
    pub max_requests: usize,
    /// `min_rate`: the minimum transfer rate for bodies; `None` (`off`) means no minimum.
    pub min_rate: Option<MinRate>,
    /// `response_buffer`: the maximum number of response bytes that the proxy buffers for a slow
    /// client, up to 16 MiB; default 64 KiB.
    pub response_buffer: usize,
}

impl Default for Slow {
    fn default() -> Self {
        Self {
            max_requests: 256,
            min_rate: Some(MinRate::default()),
            response_buffer: 64 << 10,
        }
    }
}

pub(super) const FIELDS: [&str; 3] = ["max_requests_per_client", "min_rate", "response_buffer"];

pub(super) fn slow(proxy: &Fields<'_>, report: &mut Report) -> Slow {
    let mut slow = Slow::default();
    let most = proxy.get("max_requests_per_client").and_then(|value| {
        within(
            value.small_number(report)?,
            1..=MAX_CONNECTIONS,
            value,
            report,
        )
    });
    slow.max_requests = most.unwrap_or(slow.max_requests);
    if let Some(value) = proxy.get("min_rate") {
        slow.min_rate = min_rate(value, report);
    }
    let buffer = proxy
        .get("response_buffer")
        .and_then(|value| within(size(value, report)?, 0..=MAX_RESPONSE_BUFFER, value, report));
    slow.response_buffer = buffer.unwrap_or(slow.response_buffer);
    slow
}

/// Reads `min_rate`. Returns `None` if the value is `off`.
fn min_rate(value: &Value<'_>, report: &mut Report) -> Option<MinRate> {
    if value.scalar() == Some("off") {
        return None;
    }
    let what = "off, or a map such as {bytes_per_second: 240, grace: 5s}";
    let fields = value.fields(report, what, &["bytes_per_second", "grace"])?;
    let mut rate = MinRate::default();
    if let Some(value) = fields.get("bytes_per_second") {
        let read = value.small_number(report);
        let read = read.and_then(|bytes| within(bytes, RATES, value, report));
        rate.bytes_per_second = read.unwrap_or(rate.bytes_per_second);
    }
    if let Some(value) = fields.get("grace") {
        rate.grace = time(value, report).unwrap_or(rate.grace);
    }
    Some(rate)
}
