//! A JSON document whose strings borrow from the request body.
//!
//! A body is parsed into a tree instead of an endpoint-specific struct. A tree allows all errors in
//! the body to be reported at once, each with its path. An object preserves the order of its
//! members, and keeps members with repeated names.

use std::{borrow::Cow, fmt};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::{Problem, input::shown};

/// A JSON value. Numbers other than non-negative integers have a separate variant, for error
/// messages.
#[derive(Debug)]
pub enum Json<'b> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Truth(bool),
    /// A non-negative integer.
    Whole(u64),
    /// Any other number.
    Number(f64),
    /// A string.
    Text(Cow<'b, str>),
    /// A list.
    List(Vec<Self>),
    /// An object.
    Object(Members<'b>),
}

/// The members of an object, in the order of the document.
pub type Members<'b> = Vec<(Cow<'b, str>, Json<'b>)>;

/// The maximum number of members of an object that [`check_members`] accepts.
const MAX_MEMBERS: usize = 64;

/// Parses a body that must be an object with at most `MAX_MEMBERS` members and no repeated name.
///
/// # Errors
///
/// Returns a problem if the body is not JSON, or is not a JSON object.
pub fn object(body: &[u8]) -> Result<Members<'_>, Problem> {
    if body.is_empty() {
        return Err(Problem::bad("body", "is empty; expected an object"));
    }
    let read = match std::str::from_utf8(body) {
        // Validating the whole body as UTF-8 once is faster than validating each string.
        Ok(text) => serde_json::from_str(text),
        // For a body that is not UTF-8, `from_slice` reports the position of the invalid byte.
        Err(_) => serde_json::from_slice(body),
    };
    match read {
        Ok(Json::Object(members)) => {
            check_members("", &members)?;
            Ok(members)
        }
        Ok(other) => Err(Problem::bad(
            "body",
            format!("expected an object, got {other}"),
        )),
        Err(error) => Err(Problem::json(&error)),
    }
}

/// Rejects an object with too many members or a repeated name. `path` is the path of the object
/// with a trailing dot.
///
/// # Errors
///
/// Returns a problem that names the object or the repeated name.
pub fn check_members(path: &str, members: &Members<'_>) -> Result<(), Problem> {
    if members.len() > MAX_MEMBERS {
        let (count, location) = (members.len(), path.strip_suffix('.').unwrap_or("body"));
        let problem = format!("{count} fields exceed the maximum of {MAX_MEMBERS}");
        return Err(Problem::bad(location, problem));
    }
    for (index, (name, _)) in members.iter().enumerate() {
        if members[..index].iter().any(|(earlier, _)| earlier == name) {
            return Err(Problem::bad(
                format!("{path}{}", shown(name)),
                "is given twice; give it once",
            ));
        }
    }
    Ok(())
}

/// Formats the value for an error message.
impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Truth(truth) => write!(f, "{truth}"),
            Self::Whole(number) => write!(f, "{number}"),
            // Without an exponent, the largest number has 309 digits.
            Self::Number(number) if number.abs() >= 1e16 => write!(f, "{number:e}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "\"{}\"", shown(text)),
            Self::List(_) => f.write_str("a list"),
            Self::Object(_) => f.write_str("an object"),
        }
    }
}

impl<'de: 'b, 'b> Deserialize<'de> for Json<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Self::Value, E> {
        Ok(Json::Truth(truth))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Json::Whole(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
        #[expect(
            clippy::cast_precision_loss,
            reason = "negative numbers are used only in error messages"
        )]
        Ok(u64::try_from(number).map_or(Json::Number(number as f64), Json::Whole))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Self::Value, E> {
        Ok(Json::Number(number))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Json::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Json::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        // Most objects have at most this number of members, so this capacity avoids reallocation.
        let mut members = Vec::with_capacity(8);
        while let Some((MemberName(name), value)) = map.next_entry()? {
            members.push((name, value));
        }
        Ok(Json::Object(members))
    }
}

/// The name of a member. The type is needed because serde always copies a bare `Cow`.
struct MemberName<'b>(Cow<'b, str>);

impl<'de: 'b, 'b> Deserialize<'de> for MemberName<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl<'de> Visitor<'de> for NameVisitor {
    type Value = MemberName<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(MemberName(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(MemberName(Cow::Owned(text.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_borrowed_unless_they_have_escapes() {
        let members = object(br#"{"key": "user:1", "e\u0078": "a\n"}"#).unwrap();
        assert!(matches!(
            &members[0],
            (Cow::Borrowed("key"), Json::Text(Cow::Borrowed("user:1")))
        ));
        assert!(
            matches!(&members[1], (Cow::Owned(name), Json::Text(Cow::Owned(_))) if name == "ex")
        );
    }

    #[test]
    fn bodies_that_are_not_valid_objects_are_rejected() {
        for (body, expected) in [
            ("[]", "body: expected an object, got a list"),
            ("-1.5", "body: expected an object, got -1.5"),
            (
                r#"{"key": 1, "key": 2}"#,
                "key: is given twice; give it once",
            ),
            (
                "{\"a\": 1,\n ]",
                "body: is not JSON: key must be a string at line 2 column 2",
            ),
        ] {
            assert_eq!(object(body.as_bytes()).unwrap_err().detail(), expected);
        }
        let many: Vec<String> = (0..65).map(|n| format!("\"{n}\": 0")).collect();
        let refused = object(format!("{{{}}}", many.join(",")).as_bytes()).unwrap_err();
        assert_eq!(refused.detail(), "body: 65 fields exceed the maximum of 64");
    }
}
