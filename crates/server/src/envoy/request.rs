//! What a proxy asks of a rate limit service: a domain, and descriptors in it.
//!
//! These are no wire types: the gRPC door and `POST /json` both fill them in.

use super::{RateLimitError, Unit};

/// The most descriptors of one request.
pub const MAX_DESCRIPTORS: usize = 512;

/// The most entries of one descriptor.
pub const MAX_ENTRIES: usize = 64;

/// The most bytes of a descriptor's keys and values together.
pub const MAX_DESCRIPTOR_BYTES: usize = 64 << 10;

/// The longest domain, in bytes.
pub const MAX_DOMAIN_BYTES: usize = 1 << 10;

/// A request: may this pass?
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateLimitRequest {
    /// The domain whose rules apply; empty is an error.
    pub domain: String,
    /// What the request is, in one or more ways; an empty list is an error.
    pub descriptors: Vec<Descriptor>,
    /// How many hits each descriptor is worth that does not say so itself; 0 counts as 1.
    pub hits_addend: u32,
}

impl RateLimitRequest {
    /// Refuses what cannot be decided, before anything is charged.
    pub(super) fn check(&self) -> Result<(), RateLimitError> {
        if self.domain.is_empty() {
            return Err(RateLimitError::EmptyDomain);
        }
        if self.descriptors.is_empty() {
            return Err(RateLimitError::EmptyDescriptors);
        }
        at_most(self.domain.len(), MAX_DOMAIN_BYTES, "bytes", || {
            "domain".into()
        })?;
        let (count, what) = (self.descriptors.len(), "descriptors");
        at_most(count, MAX_DESCRIPTORS, what, || what.into())?;
        for (at, Descriptor { entries, .. }) in self.descriptors.iter().enumerate() {
            let field = || format!("descriptors[{at}].entries");
            at_most(entries.len(), MAX_ENTRIES, "entries", field)?;
            let bytes = entries.iter().map(|(key, value)| key.len() + value.len());
            let what = "bytes of keys and values";
            at_most(bytes.sum(), MAX_DESCRIPTOR_BYTES, what, field)?;
        }
        Ok(())
    }
}

/// One way to describe the request: a path of entries from the general to the particular.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Keys and values, in the order in which rules nest.
    pub entries: Vec<(String, String)>,
    /// A limit that takes the place of whatever the rules say.
    pub limit: Option<LimitOverride>,
    /// How many hits this descriptor is worth; 0 asks how things stand and counts nothing.
    pub hits_addend: Option<u64>,
    /// Whether the hits are given back instead of taken.
    pub is_negative_hits: bool,
}

/// A limit that comes with a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LimitOverride {
    /// How many hits pass in each unit of time.
    pub requests_per_unit: u32,
    /// The unit; [`Unit::Unknown`] is an error.
    pub unit: Unit,
}

fn at_most(
    count: usize,
    most: usize,
    what: &str,
    field: impl FnOnce() -> String,
) -> Result<(), RateLimitError> {
    if count <= most {
        return Ok(());
    }
    let problem = format!("{count} {what} are over the maximum of {most}");
    Err(RateLimitError::invalid(field(), problem))
}
