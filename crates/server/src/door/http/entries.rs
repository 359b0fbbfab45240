//! The entries of a request's body, in order, so that a name that stands twice is noticed.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, Visitor},
};
use tidegate_core::bounds::MAX_ENTRIES;

/// `{"ip": "203.0.113.9", …}`, at most [`MAX_ENTRIES`] of them.
#[derive(Debug, Default)]
pub(super) struct Entries<'b>(pub(super) Vec<(Text<'b>, Text<'b>)>);

/// Text that is borrowed from the body unless it has escapes.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct Text<'b>(#[serde(borrow)] pub(super) Cow<'b, str>);

impl<'de: 'b, 'b> Deserialize<'de> for Entries<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("entries: an object of names and texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            if entries.len() == MAX_ENTRIES {
                return Err(A::Error::custom(format_args!(
                    "entries: over the maximum of {MAX_ENTRIES}"
                )));
            }
            entries.push(entry);
        }
        Ok(Entries(entries))
    }
}
