//! Parses RateLimit headers, which are lists or dictionaries of items with parameters. The crate
//! `sfv` parses structured fields (RFC 9651), and this module bounds their size.
//!
//! A field that does not parse completely is ignored, as the RFC requires. A field with an inner
//! list is ignored too, because no RateLimit header has inner lists.

use sfv::{
    KeyRef, Parser,
    visitor::{
        DictionaryVisitor, EntryVisitor, InnerListVisitor, ItemVisitor, ListVisitor, Never,
        ParameterVisitor,
    },
};

pub(super) use sfv::BareItemFromInput as BareItem;

/// The maximum total size of all lines of a field, in bytes.
pub(super) const MAX_BYTES: usize = 8 * 1024;
/// The maximum number of members of a list or dictionary.
const MAX_MEMBERS: usize = 64;
/// The maximum number of parameters of one member.
const MAX_PARAMETERS: usize = 32;

/// A member of a list or a dictionary. In a dictionary, `key` is the member's key. In a list, `key`
/// is empty.
#[derive(Debug)]
pub(super) struct Member<'a> {
    pub(super) key: &'a str,
    pub(super) value: BareItem<'a>,
    parameters: Vec<(&'a str, BareItem<'a>)>,
}

impl<'a> Member<'a> {
    /// Returns the parameter with this name. If the parameter occurs several times, returns the
    /// last one.
    pub(super) fn parameter(&self, name: &str) -> Option<&BareItem<'a>> {
        let mut parameters = self.parameters.iter().rev();
        parameters.find_map(|(key, value)| (*key == name).then_some(value))
    }

    /// Returns the value of a parameter, if it is a non-negative integer.
    pub(super) fn count(&self, name: &str) -> Option<u64> {
        self.parameter(name).and_then(count)
    }
}

/// Returns the value of an item, if it is a non-negative integer.
pub(super) fn count(item: &BareItem<'_>) -> Option<u64> {
    u64::try_from(i64::from(item.as_integer()?)).ok()
}

/// Returns the value of an item, if it is a string or a token.
pub(super) fn text<'i>(item: &'i BareItem<'_>) -> Option<&'i str> {
    let string = item.as_string().map(|string| string.as_str());
    string.or_else(|| item.as_token().map(|token| token.as_str()))
}

/// Returns whether two items are equal. A string and a token with the same characters are
/// considered equal, because some servers write a name as a string in one header and as a token in
/// the other.
pub(super) fn is_same(one: &BareItem<'_>, other: &BareItem<'_>) -> bool {
    match (text(one), text(other)) {
        (Some(one), Some(other)) => one == other,
        (Some(_) | None, _) => one == other,
    }
}

/// Parses `field` as a list with at least one member. The keys of the members are empty.
pub(super) fn list(field: &str) -> Option<Vec<Member<'_>>> {
    let members = parser(field)?.parse_list_with_visitor(MemberCollector::default());
    members.ok().filter(|members| !members.is_empty())
}

/// Parses `field` as a dictionary with at least one member. A key may occur several times.
pub(super) fn dictionary(field: &str) -> Option<Vec<Member<'_>>> {
    let members = parser(field)?.parse_dictionary_with_visitor(MemberCollector::default());
    members.ok().filter(|members| !members.is_empty())
}

fn parser(field: &str) -> Option<Parser<'_>> {
    (field.len() <= MAX_BYTES).then(|| Parser::new(field))
}

/// Collects the members of a field.
#[derive(Default)]
struct MemberCollector<'a>(Vec<Member<'a>>);

/// Collects the value and the parameters of the last member in `members`.
struct LastMember<'m, 'a> {
    key: &'a str,
    members: &'m mut Vec<Member<'a>>,
}

/// The error for a valid field that this module does not support.
#[derive(Debug, thiserror::Error)]
#[error("the field has an inner list, or too many members or parameters")]
pub(super) struct UnsupportedField;

impl<'a> MemberCollector<'a> {
    fn add(&mut self, key: &'a str) -> Result<LastMember<'_, 'a>, UnsupportedField> {
        let members = &mut self.0;
        let fits = members.len() < MAX_MEMBERS;
        fits.then_some(LastMember { key, members })
            .ok_or(UnsupportedField)
    }
}

impl<'a> ListVisitor<'a> for MemberCollector<'a> {
    type Out = Vec<Member<'a>>;
    type Error = UnsupportedField;

    fn entry(&mut self) -> Result<impl EntryVisitor<'a>, UnsupportedField> {
        self.add("")
    }

    fn finish(self) -> Result<Self::Out, UnsupportedField> {
        Ok(self.0)
    }
}

impl<'a> DictionaryVisitor<'a> for MemberCollector<'a> {
    type Out = Vec<Member<'a>>;
    type Error = UnsupportedField;

    fn entry(&mut self, key: &'a KeyRef) -> Result<impl EntryVisitor<'a>, UnsupportedField> {
        self.add(key.as_str())
    }

    fn finish(self) -> Result<Self::Out, UnsupportedField> {
        Ok(self.0)
    }
}

impl<'a> EntryVisitor<'a> for LastMember<'_, 'a> {
    type Error = UnsupportedField;

    fn item(self) -> Result<impl ItemVisitor<'a>, UnsupportedField> {
        Ok(self)
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'a>, UnsupportedField> {
        Err::<Never, _>(UnsupportedField)
    }
}

impl<'a> ItemVisitor<'a> for LastMember<'_, 'a> {
    type Out = ();
    type Error = UnsupportedField;

    fn bare_item(
        self,
        value: BareItem<'a>,
    ) -> Result<impl ParameterVisitor<'a, Out = ()>, UnsupportedField> {
        let member = Member {
            key: self.key,
            value,
            parameters: Vec::new(),
        };
        Ok(self.members.push_mut(member))
    }
}

impl<'a> ParameterVisitor<'a> for &mut Member<'a> {
    type Out = ();
    type Error = UnsupportedField;

    fn parameter(&mut self, key: &'a KeyRef, value: BareItem<'a>) -> Result<(), UnsupportedField> {
        if self.parameters.len() == MAX_PARAMETERS {
            return Err(UnsupportedField);
        }
        self.parameters.push((key.as_str(), value));
        Ok(())
    }

    fn finish(self) -> Result<(), UnsupportedField> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_items_with_parameters() {
        let read =
            list("\"per \\\"s\\\"\";q=20;w=1 ,\tburst; x=1.5;ok;pk=:aGk=:;b=?1;d=@12").unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(text(&read[0].value), Some("per \"s\""));
        assert_eq!(
            (read[0].count("q"), read[0].count("w")),
            (Some(20), Some(1))
        );
        assert_eq!(text(&read[1].value), Some("burst"));
        let decimal = read[1].parameter("x").unwrap().as_decimal();
        assert_eq!(decimal, Some(sfv::Decimal::try_from(1.5).unwrap()));
        let parameter = |name| read[1].parameter(name).unwrap();
        assert_eq!(parameter("ok").as_boolean(), Some(true));
        assert_eq!(parameter("pk").as_byte_sequence(), Some(&b"hi"[..]));
        assert_eq!(parameter("b").as_boolean(), Some(true));
        assert!(parameter("d").as_date().is_some());
        for other in ["x", "ok", "pk", "b", "d"] {
            assert_eq!(read[1].count(other), None, "{other}");
            assert_eq!(text(parameter(other)), None, "{other}");
        }
    }

    #[test]
    fn the_last_of_repeated_parameters_counts() {
        let read = list("a;r=1;t=5;r=2").unwrap();
        assert_eq!((read[0].count("r"), read[0].count("t")), (Some(2), Some(5)));
    }

    #[test]
    fn dictionaries() {
        let read = dictionary("limit=100, remaining=50;x=1, reset=5").unwrap();
        let keys: Vec<(&str, Option<u64>)> =
            read.iter().map(|m| (m.key, count(&m.value))).collect();
        assert_eq!(
            keys,
            [
                ("limit", Some(100)),
                ("remaining", Some(50)),
                ("reset", Some(5))
            ]
        );
    }

    #[test]
    fn an_invalid_field_is_ignored() {
        for text in [
            "",
            " ",
            "\"a",
            "\"a\\n\"",
            "\"a\";",
            "\"a\";R=1",
            "\"a\";r=",
            "\"a\" \"b\"",
            "\"a\",",
            "1234567890123456",
            "1.",
            "1.2345",
            "--1",
            "(\"a\")",
            "a, (b);r=1",
            ":a",
            ":a!:",
            "?2",
            "@1.5",
            "\u{e9}",
            "\"\u{7f}\"",
        ] {
            assert!(list(text).is_none(), "{text:?}");
        }
        for text in ["=1", "A=1", "a=(1 2)"] {
            assert!(dictionary(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn bounds_hold() {
        let many = |count: usize| vec!["1"; count].join(",");
        assert_eq!(list(&many(MAX_MEMBERS)).unwrap().len(), MAX_MEMBERS);
        assert!(list(&many(MAX_MEMBERS + 1)).is_none());
        let parameters = |count: usize| format!("1{}", ";a".repeat(count));
        assert!(list(&parameters(MAX_PARAMETERS)).is_some());
        assert!(list(&parameters(MAX_PARAMETERS + 1)).is_none());
        assert!(list(&format!("\"{}\"", "a".repeat(MAX_BYTES))).is_none());
        let keys = |count: usize| vec!["a"; count].join(",");
        assert!(dictionary(&keys(MAX_MEMBERS)).is_some());
        assert!(dictionary(&keys(MAX_MEMBERS + 1)).is_none());
    }
}
