//! A strict reply parser for tests.

use std::fmt;

/// A RESP2 or RESP3 reply, which is formatted like `[1, "text", nil]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(String),
    Verbatim(String),
    Null,
    Array(Vec<Self>),
    Set(Vec<Self>),
    Map(Vec<(Self, Self)>),
}

impl Value {
    /// Returns the value for `key`. The reply must be a map, or the flat array of keys and values
    /// that replaces a map in RESP2.
    pub(crate) fn at(&self, key: &str) -> &Self {
        let named = |name: &Self| matches!(name, Self::Bulk(name) if name == key);
        match self {
            Self::Map(pairs) => pairs
                .iter()
                .find(|(name, _)| named(name))
                .map(|(_, value)| value),
            Self::Array(items) => items
                .chunks(2)
                .find(|pair| named(&pair[0]))
                .map(|pair| &pair[1]),
            _ => None,
        }
        .unwrap_or_else(|| panic!("no {key} in {self}"))
    }

    pub(crate) fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) | Self::Set(items) => items,
            _ => panic!("not an array: {self}"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &[Self]| {
            items
                .iter()
                .map(Self::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        match self {
            Self::Simple(text) => write!(f, "+{text}"),
            Self::Error(text) => write!(f, "-{text}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Bulk(text) => write!(f, "{text:?}"),
            Self::Verbatim(text) => write!(f, "={text:?}"),
            Self::Null => write!(f, "nil"),
            Self::Array(items) => write!(f, "[{}]", list(items)),
            Self::Set(items) => write!(f, "~[{}]", list(items)),
            Self::Map(pairs) => {
                let pairs: Vec<String> = pairs
                    .iter()
                    .map(|(key, value)| format!("{key}: {value}"))
                    .collect();
                write!(f, "{{{}}}", pairs.join(", "))
            }
        }
    }
}

/// Parses the value at the start of `bytes`, and returns it with its length. Returns `None` if the
/// value is incomplete.
pub(crate) fn read_value(bytes: &[u8]) -> Option<(Value, usize)> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    let line = String::from_utf8_lossy(&bytes[1..end]).into_owned();
    let length = || line.parse::<i64>().expect("a length");
    let after = end + 2;
    let whole = |value| Some((value, after));
    match bytes[0] {
        b'+' => whole(Value::Simple(line)),
        b'-' => whole(Value::Error(line)),
        b':' => whole(Value::Integer(length())),
        b'_' => whole(Value::Null),
        b'$' | b'*' if length() == -1 => whole(Value::Null),
        b'$' => read_text(bytes, after, length()).map(|(text, used)| (Value::Bulk(text), used)),
        b'=' => {
            let (text, used) = read_text(bytes, after, length())?;
            let text = text.strip_prefix("txt:").expect("plain text").to_owned();
            Some((Value::Verbatim(text), used))
        }
        b'*' => read_list(bytes, after, length()).map(|(items, used)| (Value::Array(items), used)),
        b'~' => read_list(bytes, after, length()).map(|(items, used)| (Value::Set(items), used)),
        b'%' => {
            let (items, used) = read_list(bytes, after, 2 * length())?;
            let pairs = items
                .chunks(2)
                .map(|pair| (pair[0].clone(), pair[1].clone()))
                .collect();
            Some((Value::Map(pairs), used))
        }
        other => panic!("no value begins with {:?}", char::from(other)),
    }
}

fn read_text(bytes: &[u8], start: usize, length: i64) -> Option<(String, usize)> {
    let end = start + usize::try_from(length).expect("a length that is not negative");
    let close = bytes.get(end..end + 2)?;
    assert_eq!(close, b"\r\n");
    Some((
        String::from_utf8_lossy(&bytes[start..end]).into_owned(),
        end + 2,
    ))
}

fn read_list(bytes: &[u8], start: usize, length: i64) -> Option<(Vec<Value>, usize)> {
    let (mut items, mut at) = (Vec::new(), start);
    for _ in 0..length {
        let (item, used) = read_value(&bytes[at..])?;
        items.push(item);
        at += used;
    }
    Some((items, at))
}
