//! Free-form metadata of rules and responses.

use std::sync::Arc;

/// A value that YAML, JSON and protobuf's `Struct` can represent. Cloning is cheap.
#[derive(Clone, Debug, PartialEq)]
pub enum Metadata {
    /// The null value.
    Null,
    /// A boolean.
    Truth(bool),
    /// A number.
    Number(f64),
    /// A string.
    Text(Arc<str>),
    /// A list.
    List(Arc<[Self]>),
    /// A map without duplicate keys.
    Map(Arc<[(Arc<str>, Self)]>),
}

impl Metadata {
    /// Creates a map.
    #[must_use]
    pub fn map(members: impl IntoIterator<Item = (Arc<str>, Self)>) -> Self {
        Self::Map(members.into_iter().collect())
    }

    /// Creates a string value.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Text(text.into())
    }

    /// Returns the value with the key `name`, if this value is a map that contains the key.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Map(members) = self else {
            return None;
        };
        members
            .iter()
            .find(|(known, _)| &**known == name)
            .map(|(_, value)| value)
    }

    /// Merges `other` into this value. Maps are merged recursively. If both maps have a value for a
    /// key, the value in `self` wins.
    #[must_use]
    pub(super) fn or(&self, other: &Self) -> Self {
        let (Self::Map(first), Self::Map(second)) = (self, other) else {
            return self.clone();
        };
        let both = first.iter().map(|(name, value)| {
            let merged = other
                .get(name)
                .map_or_else(|| value.clone(), |other| value.or(other));
            (Arc::clone(name), merged)
        });
        let added = second
            .iter()
            .filter(|(name, _)| self.get(name).is_none())
            .cloned();
        Self::map(both.chain(added))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(members: &[(&str, Metadata)]) -> Metadata {
        Metadata::map(
            members
                .iter()
                .map(|(name, value)| (Arc::from(*name), value.clone())),
        )
    }

    #[test]
    fn maps_are_merged_recursively_and_the_first_value_wins() {
        let first = map(&[
            ("svc", map(&[("name", Metadata::text("s1"))])),
            ("tier", Metadata::text("gold")),
        ]);
        let second = map(&[
            (
                "svc",
                map(&[
                    ("name", Metadata::text("s2")),
                    ("zone", Metadata::text("z2")),
                ]),
            ),
            ("tier", map(&[])),
            ("new", Metadata::Null),
        ]);
        let merged = map(&[
            (
                "svc",
                map(&[
                    ("name", Metadata::text("s1")),
                    ("zone", Metadata::text("z2")),
                ]),
            ),
            ("tier", Metadata::text("gold")),
            ("new", Metadata::Null),
        ]);
        assert_eq!(first.or(&second), merged);
    }
}
