//! The quota rules of the rules file.

use std::collections::BTreeMap;

use tidegate_core::{Pattern, Rate, Span};

/// The maximum period of a quota: 366 days.
pub const MAX_QUOTA_PERIOD: Span = Span::from_secs(366 * 86_400);

/// The id of a bucket: keys and values such as `service: shop, api_key: alice`, sorted by key.
pub type BucketId = BTreeMap<String, String>;

/// A number of requests per period, over all streams together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaLimit {
    /// The number of requests.
    pub requests: u32,
    /// The period: whole seconds, at least one.
    pub period: Span,
}

impl QuotaLimit {
    /// Converts `rate` to a quota limit.
    ///
    /// # Errors
    ///
    /// Returns a message for a rate of more than `u32::MAX` requests, which an assignment cannot
    /// contain. Also returns a message for a period that is not a whole number of seconds, because
    /// Envoy truncates fractions, and for a period longer than [`MAX_QUOTA_PERIOD`].
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

/// A quota: the buckets that it matches, and the limit of each bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct QuotaRule {
    /// The name of the quota, for messages.
    pub name: Box<str>,
    /// The domain that the stream must send.
    pub domain: Box<str>,
    /// The patterns that values of the bucket id must match. Other keys of the id may have any
    /// value.
    pub bucket: Vec<(Box<str>, Pattern)>,
    /// The limit of each bucket that matches.
    pub limit: QuotaLimit,
}

impl QuotaRule {
    /// Returns whether this quota matches a bucket.
    #[must_use]
    pub fn applies(&self, domain: &str, id: &BucketId) -> bool {
        *self.domain == *domain
            && self
                .bucket
                .iter()
                .all(|(name, pattern)| pattern.matches(id.get(&**name).map(String::as_str)))
    }
}
