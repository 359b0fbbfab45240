//! What holds for every request, whatever the rules say.

use std::{fmt, sync::Arc};

/// The settings of the service, under the names that the `envoy` section of the rules file has for them. The default is
/// what envoyproxy/ratelimit does without any setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Answers OK whatever the descriptors came to, whose statuses still tell.
    pub shadow_mode: bool,
    /// Treats every descriptor that has no unlimited rule as if its rule were in quota mode.
    pub quota_mode: bool,
    /// When a limit counts as nearly spent, in metrics.
    pub near_limit_ratio: Ratio,
    /// The names of the headers that tell the limit, what remains and when it is whole again; `None` sends none.
    pub response_headers: Option<HeaderNames>,
    /// Whether answers carry dynamic metadata.
    pub dynamic_metadata: bool,
    /// Whether a request that is over some limits is charged to those only, and to no other.
    pub stop_increment: bool,
    /// Whether the service is healthy only once it has a domain.
    pub healthy_with_a_domain: bool,
    /// How many bytes the cache of what is over may take; 0 is no cache.
    pub local_cache_bytes: usize,
    /// What a request comes to while the store is out of reach.
    pub store_failure: StoreFailure,
}

/// What a request comes to while the store is out of reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreFailure {
    /// An answer: that of the store's policy.
    #[default]
    Answer,
    /// An error, so that the proxy does what it is told to do without an answer.
    Error,
}

/// The names of the headers that an answer carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// How many requests pass in each unit; default `RateLimit-Limit`.
    pub limit: Arc<str>,
    /// How many are left; default `RateLimit-Remaining`.
    pub remaining: Arc<str>,
    /// In how many seconds the limit is whole again; default `RateLimit-Reset`.
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

/// A share from 0 to 1, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u32);

impl Ratio {
    const WHOLE: u32 = 1_000_000;

    /// The share that `text` is, such as `0.8`; `None` if it is none, or has more than six decimal places.
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

    /// This share of `count`, rounded down.
    pub(super) fn of(self, count: u64) -> u64 {
        let share = u128::from(count) * u128::from(self.0) / u128::from(Self::WHOLE);
        // At most the count itself.
        u64::try_from(share).unwrap_or(count)
    }
}

/// Four fifths.
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
    fn a_ratio_is_read_exactly() {
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
