//! Settings of Envoy's rate limit service that apply to every request, regardless of the rules.

use std::{fmt, sync::Arc};

/// The settings of the service, named as in the `envoy` section of the rules file. The defaults
/// correspond to the behaviour of envoyproxy/ratelimit without any settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RlsSettings {
    /// Whether the service responds OK regardless of the descriptors' results. The descriptor
    /// statuses in the response still contain the results.
    pub shadow_mode: bool,
    /// Whether every descriptor is treated as if its rule were in quota mode, unless its rule is
    /// unlimited.
    pub quota_mode: bool,
    /// A fraction from 0 to 1. When the count exceeds this fraction of its limit, further hits are
    /// counted as near the limit in metrics.
    pub near_limit_ratio: Ratio,
    /// The names of the headers with the limit, the remaining hits and the reset time; `None` means
    /// that these headers are not sent.
    pub response_headers: Option<HeaderNames>,
    /// Whether responses contain dynamic metadata.
    pub dynamic_metadata: bool,
    /// Whether a request that exceeds only some of its limits is charged only to these limits.
    pub stop_increment: bool,
    /// Whether the service reports that it is unhealthy until its configuration contains at least
    /// one domain.
    pub healthy_with_a_domain: bool,
    /// The maximum size of the local cache of exceeded limits, in bytes; 0 disables the cache.
    pub local_cache_bytes: usize,
    /// The response while the store is unavailable.
    pub store_failure: StoreFailure,
    /// Whether metrics are also exported under the names that envoyproxy/ratelimit uses.
    pub ratelimit_metrics: bool,
    /// Whether the HTTP listener serves Limitador's API, because the rules come from Limitador's
    /// limits file.
    pub limitador_api: bool,
}

/// The response while the store is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreFailure {
    /// The service responds according to the store's failure policy.
    #[default]
    Answer,
    /// The service responds with an error, so that Envoy applies its own failure mode.
    Error,
}

/// The names of the rate limit headers in responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// The header with the limit per unit; default `RateLimit-Limit`.
    pub limit: Arc<str>,
    /// The header with the remaining hits; default `RateLimit-Remaining`.
    pub remaining: Arc<str>,
    /// The header with the number of seconds until the limit is reset; default `RateLimit-Reset`.
    pub reset: Arc<str>,
}

impl Default for HeaderNames {
    fn default() -> Self {
        Self {
            limit: "RateLimit-Limit".into(),
            remaining: "RateLimit-Remaining".into(),
            reset: "RateLimit-Reset".into(),
        }
    }
}

/// A ratio from 0 to 1, stored in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u32);

impl Ratio {
    const WHOLE: u32 = 1_000_000;

    /// The ratio 0.
    pub const ZERO: Self = Self(0);

    /// The ratio 0.5.
    pub const HALF: Self = Self(Self::WHOLE / 2);

    /// Parses a ratio such as `0.8`. Returns `None` if `text` is not a ratio or has more than six
    /// decimal places.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
        if text.is_empty() {
            return None;
        }
        let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !(are_digits(whole) && are_digits(decimals) && (1..=6).contains(&decimals.len())) {
            return None;
        }
        let millionths: u32 = format!("{decimals:0<6}").parse().ok()?;
        let whole: u32 = if whole.is_empty() {
            0
        } else {
            whole.parse().ok()?
        };
        let share = whole.checked_mul(Self::WHOLE)?.checked_add(millionths)?;
        (share <= Self::WHOLE).then_some(Self(share))
    }

    /// Returns `count` multiplied by this ratio, rounded down.
    #[must_use]
    pub fn of(self, count: u64) -> u64 {
        let share = u128::from(count) * u128::from(self.0) / u128::from(Self::WHOLE);
        // The result is at most `count`, so it fits in 64 bits.
        u64::try_from(share).unwrap_or(count)
    }
}

/// The default ratio is 0.8, as in envoyproxy/ratelimit.
impl Default for Ratio {
    fn default() -> Self {
        Self(800_000)
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = format!("{:06}", self.0 % Self::WHOLE);
        let decimals = decimals.trim_end_matches('0');
        let dot = if decimals.is_empty() { "" } else { "." };
        write!(f, "{}{dot}{decimals}", self.0 / Self::WHOLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_parsed_exactly() {
        for (text, of_15, shown) in [
            ("0.8", 12, "0.8"),
            ("1", 15, "1"),
            ("0", 0, "0"),
            (".5", 7, "0.5"),
            ("0.999999", 14, "0.999999"),
        ] {
            let ratio = Ratio::parse(text).unwrap();
            assert_eq!(
                (ratio.of(15), ratio.to_string().as_str()),
                (of_15, shown),
                "{text}"
            );
        }
        for text in [
            "",
            ".",
            "1.1",
            "-0.5",
            "0.8.1",
            "0,8",
            "1e-1",
            "0.1234567",
            "99999999999",
        ] {
            assert_eq!(Ratio::parse(text), None, "{text}");
        }
        assert_eq!(Ratio::default(), Ratio::parse("0.8").unwrap());
        assert_eq!(Ratio::parse("1").unwrap().of(u64::MAX), u64::MAX);
    }
}
