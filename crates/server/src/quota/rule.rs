//! What the rules file says of quotas.

use std::collections::BTreeMap;

use tidegate_core::{Pattern, Rate, Span};

/// The longest period of a quota: 366 days.
pub const MAX_PERIOD: Span = Span::from_secs(366 * 86_400);

/// What identifies a bucket: names and values, such as `service: shop, api_key: alice`, in the order of
/// their names.
pub type BucketId = BTreeMap<String, String>;

/// So many requests a period, over all streams together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaLimit {
    /// How many.
    pub requests: u32,
    /// In what time: whole seconds, at least one.
    pub period: Span,
}

impl QuotaLimit {
    /// `rate` as a quota.
    ///
    /// # Errors
    ///
    /// A rate of more than `u32::MAX` requests, which no Envoy can be assigned; a period that is no whole number of
    /// seconds, which Envoy cuts off; a longer one than [`MAX_PERIOD`].
    pub fn new(rate: Rate) -> Result<Self, &'static str> {
        let requests = u32::try_from(rate.count)
            .map_err(|_| "a quota is 4294967295 requests a period at most")?;
        if rate.period.as_micros() == 0 || !rate.period.as_micros().is_multiple_of(1_000_000) {
            return Err("the period of a quota is whole seconds");
        }
        if rate.period > MAX_PERIOD {
            return Err("the period of a quota is 366 days at most");
        }
        Ok(Self {
            requests,
            period: rate.period,
        })
    }
}

/// A quota: which buckets it is about, and how much each of them may use.
#[derive(Clone, Debug, PartialEq)]
pub struct QuotaRule {
    /// Its name, for logs.
    pub name: Box<str>,
    /// The domain that the stream must name.
    pub domain: Box<str>,
    /// What the values of the bucket must be; other values of it are as they are.
    pub bucket: Vec<(Box<str>, Pattern)>,
    /// What each bucket that matches may use.
    pub limit: QuotaLimit,
}

impl QuotaRule {
    /// Whether this quota is about this bucket.
    #[must_use]
    pub fn applies(&self, domain: &str, id: &BucketId) -> bool {
        *self.domain == *domain
            && self
                .bucket
                .iter()
                .all(|(name, pattern)| pattern.matches(id.get(&**name).map(String::as_str)))
    }
}
