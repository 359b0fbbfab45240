//! Reads numbers from a JSON document without building the document in memory.
//!
//! Memory: one field name or string of the document at a time, one byte for each level of nesting,
//! and the targets. Time: the document is read once. A field name or array index on the path to a
//! target is looked up in the sorted next tokens of the targets. All other values are only skipped,
//! however many elements an array has.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tidegate_core::JsonPointer;

/// The reason why a pointer does not refer to a usable number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberError {
    /// The value is not an integer from 0 to 2^64 - 1.
    NotANumber,
    /// The value, or a JSON field on the path to it, occurs twice. JSON parsers differ in which
    /// occurrence they use.
    Duplicate,
}

/// The numbers in one document to which a set of JSON pointers refers.
#[derive(Debug, Default)]
pub(crate) struct JsonNumbers(BTreeMap<Box<str>, Result<u64, NumberError>>);

impl JsonNumbers {
    /// Reads from `document` the numbers to which `pointers` refer. A pointer to a missing value or
    /// to `null` has no number.
    ///
    /// # Errors
    ///
    /// Returns an error if `document` is not exactly one JSON document.
    pub(crate) fn read<'p>(
        document: &[u8],
        pointers: impl Iterator<Item = &'p JsonPointer>,
    ) -> serde_json::Result<Self> {
        let mut targets: Vec<PointerTarget<'p>> = Vec::new();
        for pointer in pointers {
            if targets.iter().all(|target| target.pointer != pointer) {
                targets.push(PointerTarget {
                    pointer,
                    tokens: pointer.tokens().collect(),
                    found: None,
                });
            }
        }
        let mut deserializer = serde_json::Deserializer::from_slice(document);
        let active = (0..targets.len()).collect();
        ValueReader {
            targets: &mut targets,
            active,
            depth: 0,
        }
        .deserialize(&mut deserializer)?;
        deserializer.end()?;
        let found = targets
            .into_iter()
            .filter_map(|target| Some((target.pointer.as_str().into(), target.found?)));
        Ok(Self(found.collect()))
    }

    /// Returns the number to which `pointer` refers.
    ///
    /// # Errors
    ///
    /// Returns an error if `pointer` does not refer to a number, or if the number is ambiguous.
    pub(crate) fn get(&self, pointer: &str) -> Result<Option<u64>, NumberError> {
        self.0.get(pointer).copied().transpose()
    }
}

/// A JSON pointer, and the number or error found at its location.
struct PointerTarget<'p> {
    pointer: &'p JsonPointer,
    tokens: Vec<&'p str>,
    found: Option<Result<u64, NumberError>>,
}

/// The active targets with the same next token.
#[derive(Debug, Default)]
struct NextTargets {
    targets: Vec<usize>,
    /// Whether the document contained the token before.
    is_taken: bool,
}

/// Reads one value. For each `active` target, the first `depth` tokens of its pointer lead to this
/// value.
struct ValueReader<'a, 'p> {
    targets: &'a mut [PointerTarget<'p>],
    active: Vec<usize>,
    depth: usize,
}

impl<'p> ValueReader<'_, 'p> {
    /// Stores `found` in the targets whose pointer refers to this value.
    fn record(&mut self, found: Result<u64, NumberError>) {
        for at in &self.active {
            let Some(target) = self.targets.get_mut(*at) else {
                continue;
            };
            if target.tokens.len() == self.depth && target.found.is_none() {
                target.found = Some(found);
            }
        }
    }

    /// Groups the active targets by their next token.
    fn by_next_token(&self) -> BTreeMap<&'p str, NextTargets> {
        let mut groups = BTreeMap::<&str, NextTargets>::new();
        for at in &self.active {
            let tokens = self.targets.get(*at).map(|target| &target.tokens);
            if let Some(token) = tokens.and_then(|tokens| tokens.get(self.depth)) {
                groups.entry(token).or_default().targets.push(*at);
            }
        }
        groups
    }

    /// Returns the targets in `next`. Returns no targets if they were returned before, and marks
    /// them as duplicates.
    fn take(&mut self, next: &mut NextTargets) -> Vec<usize> {
        if !next.is_taken {
            next.is_taken = true;
            return next.targets.clone();
        }
        for at in &next.targets {
            if let Some(target) = self.targets.get_mut(*at) {
                target.found = Some(Err(NumberError::Duplicate));
            }
        }
        Vec::new()
    }

    fn child(&mut self, active: Vec<usize>) -> ValueReader<'_, 'p> {
        ValueReader {
            targets: self.targets,
            active,
            depth: self.depth + 1,
        }
    }
}

impl<'de> DeserializeSeed<'de> for ValueReader<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.active.is_empty() {
            return deserializer.deserialize_ignored_any(IgnoredAny).map(drop);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueReader<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_u64<E: de::Error>(mut self, number: u64) -> Result<(), E> {
        self.record(Ok(number));
        Ok(())
    }

    fn visit_i64<E: de::Error>(mut self, number: i64) -> Result<(), E> {
        self.record(u64::try_from(number).map_err(|_| NumberError::NotANumber));
        Ok(())
    }

    fn visit_f64<E: de::Error>(mut self, _: f64) -> Result<(), E> {
        self.record(Err(NumberError::NotANumber));
        Ok(())
    }

    fn visit_bool<E: de::Error>(mut self, _: bool) -> Result<(), E> {
        self.record(Err(NumberError::NotANumber));
        Ok(())
    }

    fn visit_str<E: de::Error>(mut self, _: &str) -> Result<(), E> {
        self.record(Err(NumberError::NotANumber));
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        self.record(Err(NumberError::NotANumber));
        let mut groups = self.by_next_token();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            let next = groups.get_mut(&*name);
            let active = next.map_or_else(Vec::new, |next| self.take(next));
            map.next_value_seed(self.child(active))?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        self.record(Err(NumberError::NotANumber));
        let groups = self.by_next_token().into_iter();
        let mut by_index: BTreeMap<usize, NextTargets> = groups
            .filter_map(|(token, next)| Some((array_index(token)?, next)))
            .collect();
        let mut index = 0_usize;
        // After the last element on the path to a target, the elements are only skipped.
        while !by_index.is_empty() {
            let active = by_index.remove(&index).unwrap_or_default().targets;
            if items.next_element_seed(self.child(active))?.is_none() {
                return Ok(());
            }
            index += 1;
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

/// Returns the array index that a token of a JSON pointer denotes. An index has no leading zeros.
fn array_index(token: &str) -> Option<usize> {
    let is_canonical = token == "0" || !token.starts_with(['0', '+']);
    token.parse().ok().filter(|_| is_canonical)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(document: &str, pointer: &str) -> Result<Option<u64>, NumberError> {
        let pointer = JsonPointer::parse(pointer).unwrap();
        let numbers = JsonNumbers::read(document.as_bytes(), [&pointer].into_iter()).unwrap();
        numbers.get(pointer.as_str())
    }

    #[test]
    fn a_pointer_refers_to_a_number() {
        for (document, pointer, expected) in [
            (r#"{"max_tokens": 12}"#, "/max_tokens", Some(12)),
            (r#"{"max\u005ftokens": 0}"#, "/max_tokens", Some(0)),
            (r#"{"a": {"max_tokens": 12}}"#, "/max_tokens", None),
            (r#"{"max_tokens": null}"#, "/max_tokens", None),
            (
                r#"{"a": [{}, {"b/c": 3}], "d": [[]]}"#,
                "/a/1/b~1c",
                Some(3),
            ),
            (r#"[18446744073709551615]"#, "/0", Some(u64::MAX)),
            ("7", "/a", None),
            ("{}", "/a", None),
        ] {
            assert_eq!(read(document, pointer), Ok(expected), "{document}");
        }
    }

    #[test]
    fn anything_but_a_whole_number_is_refused() {
        for value in [
            "-1",
            "-0",
            "1.0",
            "1e3",
            "18446744073709551616",
            "\"12\"",
            "true",
            "[1]",
            "{}",
        ] {
            let document = format!("{{\"n\": {value}}}");
            assert_eq!(
                read(&document, "/n"),
                Err(NumberError::NotANumber),
                "{value}"
            );
        }
    }

    #[test]
    fn a_member_that_occurs_twice_is_refused() {
        for document in [
            r#"{"a": {"n": 1}, "a": {"n": 900}}"#,
            r#"{"a": {"n": 1}, "a": 5}"#,
            r#"{"a": {"n": 1, "n": 900}}"#,
            r#"{"a": {"n": null, "\u006e": 900}}"#,
        ] {
            assert_eq!(
                read(document, "/a/n"),
                Err(NumberError::Duplicate),
                "{document}"
            );
        }
    }

    /// A document of 1 MiB, the default maximum, with the maximum number of pointers.
    #[test]
    fn large_arrays_and_objects_are_read_once() {
        let pointers: Vec<JsonPointer> = (0..16)
            .map(|at| JsonPointer::parse(&format!("/list/{}/n", at * 10_000)).unwrap())
            .chain([
                JsonPointer::parse("/list/00/n").unwrap(),
                JsonPointer::parse("/last").unwrap(),
            ])
            .collect();
        let list: Vec<String> = (0..100_000).map(|at| format!("{{\"n\":{at}}}")).collect();
        let fields: String = (0..10_000).map(|at| format!("\"f{at}\":[[]],")).collect();
        let document = format!("{{{fields}\"list\":[{}],\"last\":7}}", list.join(","));
        assert!(document.len() > 1 << 20, "{}", document.len());
        let numbers = JsonNumbers::read(document.as_bytes(), pointers.iter()).unwrap();
        for (at, pointer) in pointers[..16].iter().enumerate() {
            let expected = u64::try_from(at * 10_000).ok().filter(|at| *at < 100_000);
            assert_eq!(numbers.get(pointer.as_str()), Ok(expected), "{at}");
        }
        assert_eq!(numbers.get("/list/00/n"), Ok(None));
        assert_eq!(numbers.get("/last"), Ok(Some(7)));
    }

    /// Values that are not on the path to a target are skipped without recursion.
    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        let pointer = JsonPointer::parse("/0").unwrap();
        let deep = 500_000;
        let document = format!("[1,{}{}]", "[".repeat(deep), "]".repeat(deep));
        let numbers = JsonNumbers::read(document.as_bytes(), [&pointer].into_iter()).unwrap();
        assert_eq!(numbers.get("/0"), Ok(Some(1)));
        let open = format!("[1,{}", "[".repeat(deep));
        assert!(JsonNumbers::read(open.as_bytes(), [&pointer].into_iter()).is_err());
    }

    #[test]
    fn the_document_must_be_complete_json() {
        let pointer = JsonPointer::parse("/n").unwrap();
        for document in [
            "",
            "{",
            r#"{"n": 1} {}"#,
            "n=1",
            "{'n': 1}",
            r#"{"n": 01}"#,
            "\u{feff}{}",
        ] {
            let read = JsonNumbers::read(document.as_bytes(), [&pointer].into_iter());
            assert!(read.is_err(), "{document}");
        }
    }

    #[test]
    fn pointers_of_a_document_do_not_affect_each_other() {
        let pointers = ["/a", "/a/b", "/a", "/c"].map(|text| JsonPointer::parse(text).unwrap());
        let numbers = JsonNumbers::read(br#"{"a": {"b": 2}, "c": 3}"#, pointers.iter()).unwrap();
        assert_eq!(numbers.get("/a"), Err(NumberError::NotANumber));
        assert_eq!(numbers.get("/a/b"), Ok(Some(2)));
        assert_eq!(numbers.get("/c"), Ok(Some(3)));
    }

    fn documents() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<u64>().prop_map(|number| json!(number)),
            any::<i64>().prop_map(|number| json!(number)),
            any::<f64>().prop_map(|number| json!(number)),
            "[ab/~\\\\\"é]{0,3}".prop_map(Value::String),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::btree_map("[ab/~]{1,2}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_number_is_what_serde_json_finds(
            document in documents(),
            tokens in prop::collection::vec("[ab/~]{1,2}|[0-3]", 1..4),
        ) {
            let escaped = tokens.iter().map(|token| token.replace('~', "~0").replace('/', "~1"));
            let pointer: String = escaped.map(|token| format!("/{token}")).collect();
            let expected = match document.pointer(&pointer) {
                None | Some(Value::Null) => Ok(None),
                Some(value) => value.as_u64().map(Some).ok_or(NumberError::NotANumber),
            };
            prop_assert_eq!(read(&document.to_string(), &pointer), expected);
        }
    }
}
