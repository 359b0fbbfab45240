//! Quota rules in the rules file, for Envoy's rate limit quota service (RLQS).

use std::collections::BTreeMap;

use tidegate_core::{Pattern, Rate, Span};

/// The maximum period of a quota: 366 days.
pub const MAX_QUOTA_PERIOD: Span = Span::from_secs(366 * 86_400);

/// The ID of a quota bucket: a map such as `service: shop, api_key: alice`.
pub type BucketId = BTreeMap<String, String>;

/// The limit of a quota bucket: the maximum number of requests per period. All RLQS streams share
/// this limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaLimit {
    /// The number of requests.
    pub requests: u32,
    /// The period: an integer number of seconds, at least 1.
    pub period: Span,
}

impl QuotaLimit {
    /// Converts `rate` to a quota limit.
    ///
    /// # Errors
    ///
    /// Returns a message in each of these cases:
    ///
    /// - The rate has more than `u32::MAX` requests, which do not fit in a quota assignment to
    ///   Envoy.
    /// - The period is not an integer number of seconds. Envoy would truncate the fraction.
    /// - The period is longer than [`MAX_QUOTA_PERIOD`].
    pub fn new(rate: Rate) -> Result<Self, &'static str> {
        let requests = u32::try_from(rate.count)
            .map_err(|_| "a quota must be at most 4294967295 requests per period")?;
        if rate.period.as_micros() == 0 || !rate.period.as_micros().is_multiple_of(1_000_000) {
            return Err("the period of a quota must be a whole number of seconds");
        }
        if rate.period > MAX_QUOTA_PERIOD {
            return Err("the period of a quota must be at most 366 days");
        }
        Ok(Self {
            requests,
            period: rate.period,
        })
    }
}

/// A quota: patterns for bucket IDs, and the limit of each matching bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct QuotaRule {
    /// The name of the quota, for messages.
    pub name: Box<str>,
    /// The domain that the RLQS stream must send.
    pub domain: Box<str>,
    /// The patterns for values in the bucket ID, with their keys. A key without a pattern can have
    /// any value.
    pub bucket: Vec<(Box<str>, Pattern)>,
    /// The limit of each bucket that the quota matches.
    pub limit: QuotaLimit,
}

impl QuotaRule {
    /// Returns whether this quota matches the bucket `id` in `domain`.
    #[must_use]
    pub fn applies(&self, domain: &str, id: &BucketId) -> bool {
        *self.domain == *domain
            && self
                .bucket
                .iter()
                .all(|(name, pattern)| pattern.matches(id.get(&**name).map(String::as_str)))
    }
}
