//! The requests of the rate limit service: a domain and its descriptors.
//!
//! The types of a request, independent of the wire format. The gRPC listener and `POST /json` both
//! convert their requests to these types.

use super::{RlsError, Unit};

/// The maximum number of descriptors in a request.
pub const MAX_DESCRIPTORS: usize = 512;

/// The maximum number of entries in a descriptor.
pub const MAX_DESCRIPTOR_ENTRIES: usize = 64;

/// The maximum total size of a descriptor's keys and values, in bytes.
pub const MAX_DESCRIPTOR_BYTES: usize = 64 << 10;

/// The maximum length of a domain, in bytes.
pub const MAX_DOMAIN_BYTES: usize = 1 << 10;

/// A request for a rate limit decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateLimitRequest {
    /// The domain whose rules apply. An empty domain is an error.
    pub domain: String,
    /// The descriptors of the request. An empty list is an error.
    pub descriptors: Vec<Descriptor>,
    /// The hits for descriptors without their own `hits_addend`. The value 0 counts as 1.
    pub hits_addend: u32,
}

impl RateLimitRequest {
    /// Returns an error if the request is invalid. The check runs before anything is charged.
    pub(super) fn check(&self) -> Result<(), RlsError> {
        if self.domain.is_empty() {
            return Err(RlsError::EmptyDomain);
        }
        if self.descriptors.is_empty() {
            return Err(RlsError::EmptyDescriptors);
        }
        self.check_bounds()
    }

    /// Returns an error if a field of the request is out of bounds.
    pub(super) fn check_bounds(&self) -> Result<(), RlsError> {
        at_most(self.domain.len(), MAX_DOMAIN_BYTES, "bytes", || {
            "domain".into()
        })?;
        let (count, what) = (self.descriptors.len(), "descriptors");
        at_most(count, MAX_DESCRIPTORS, what, || what.into())?;
        for (at, Descriptor { entries, .. }) in self.descriptors.iter().enumerate() {
            let field = || format!("descriptors[{at}].entries");
            at_most(entries.len(), MAX_DESCRIPTOR_ENTRIES, "entries", field)?;
            let bytes = entries.iter().map(|(key, value)| key.len() + value.len());
            let what = "bytes of keys and values";
            at_most(bytes.sum(), MAX_DESCRIPTOR_BYTES, what, field)?;
        }
        Ok(())
    }
}

/// A descriptor: a list of entries, from the most general to the most specific.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// The keys and values, in the order in which the rules are nested.
    pub entries: Vec<(String, String)>,
    /// A limit that takes precedence over the limits of the rules.
    pub limit: Option<LimitOverride>,
    /// The hits of this descriptor. The value 0 queries the status and charges nothing.
    pub hits_addend: Option<u64>,
    /// Whether the hits are to be refunded instead of charged.
    pub is_negative_hits: bool,
}

/// A limit in a descriptor, which takes precedence over the limits of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LimitOverride {
    /// The number of hits per unit of time.
    pub requests_per_unit: u32,
    /// The unit of time. [`Unit::Unknown`] is an error.
    pub unit: Unit,
}

fn at_most(
    count: usize,
    most: usize,
    what: &str,
    field: impl FnOnce() -> String,
) -> Result<(), RlsError> {
    if count <= most {
        return Ok(());
    }
    let problem = format!("{count} {what} exceed the maximum of {most}");
    Err(RlsError::invalid(field(), problem))
}
