//! Counts the messages inside an encoded resource, before the resource is decoded.
//!
//! A list element takes as few as two bytes on the wire, but up to a hundred times as much memory
//! after decoding. Therefore the number of elements is checked first.

use prost::{
    DecodeError,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// The depth at which the decoder rejects nested messages.
const MAX_DEPTH: usize = 100;

/// The types of the messages in a resource.
#[derive(Clone, Copy, Debug)]
enum MessageKind {
    Config,
    Descriptor,
    Policy,
    Replace,
    Struct,
    Member,
    Value,
    List,
}

impl MessageKind {
    /// Returns the type of the messages in a field. Returns `None` if the field does not contain
    /// messages.
    const fn inside(self, field: u32) -> Option<Self> {
        Some(match (self, field) {
            (Self::Config, 3) | (Self::Descriptor, 4) => Self::Descriptor,
            (Self::Descriptor, 3) => Self::Policy,
            (Self::Descriptor, 8) | (Self::Value, 5) => Self::Struct,
            (Self::Policy, 5) => Self::Replace,
            (Self::Struct, 1) => Self::Member,
            (Self::Member, 2) | (Self::List, 1) => Self::Value,
            (Self::Value, 6) => Self::List,
            _ => return None,
        })
    }

    /// Returns whether a field is a list or a map.
    const fn is_repeated(self, field: u32) -> bool {
        matches!(
            (self, field),
            (Self::Config, 3)
                | (Self::Descriptor, 4)
                | (Self::Policy, 5)
                | (Self::Struct, 1)
                | (Self::List, 1)
        )
    }
}

/// Returns the number of descriptors, replaced limits and metadata values in an encoded
/// `RateLimitConfig`, at all depths.
///
/// # Errors
///
/// Returns an error if a message is malformed. It must then not be decoded, because the decoder
/// reads the fields in a message even if they extend beyond the end of the message.
pub(super) fn count_elements(config: &[u8]) -> Result<usize, DecodeError> {
    count(MessageKind::Config, config, 0)
}

fn count(kind: MessageKind, mut message: &[u8], depth: usize) -> Result<usize, DecodeError> {
    let mut elements = 0;
    while !message.is_empty() {
        let (field, wire_type) = decode_key(&mut message)?;
        let mut value = message;
        skip_field(wire_type, field, &mut message, DecodeContext::default())?;
        let Some(inside) = kind.inside(field) else {
            continue;
        };
        // The decoder rejects a message with another wire type or with more nested messages.
        if wire_type != WireType::LengthDelimited || depth == MAX_DEPTH {
            continue;
        }
        decode_varint(&mut value)?;
        let (value, _) = value.split_at(value.len() - message.len());
        elements += usize::from(kind.is_repeated(field)) + count(inside, value, depth + 1)?;
    }
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::{ListValue, Struct, Value, value};

    use super::*;
    use crate::proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace,
    };

    fn with_descriptors(descriptors: Vec<RateLimitDescriptor>) -> RateLimitDescriptor {
        RateLimitDescriptor {
            descriptors,
            ..RateLimitDescriptor::default()
        }
    }

    fn count_of(descriptors: Vec<RateLimitDescriptor>) -> usize {
        let config = RateLimitConfig {
            name: "name".to_owned(),
            domain: "domain".to_owned(),
            descriptors,
        };
        count_elements(&config.encode_to_vec()).unwrap()
    }

    #[test]
    fn each_element_is_counted_once() {
        let empty = RateLimitDescriptor::default;
        assert_eq!(count_of(Vec::new()), 0);
        assert_eq!(count_of(vec![empty(); 3]), 3);
        let nested = with_descriptors(vec![with_descriptors(vec![empty(); 2]), empty()]);
        assert_eq!(count_of(vec![nested]), 5);

        let replacing = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy {
                replaces: vec![RateLimitReplace::default(); 4],
                ..RateLimitPolicy::default()
            }),
            ..empty()
        };
        assert_eq!(count_of(vec![replacing]), 5);

        let list = |values| Value {
            kind: Some(value::Kind::ListValue(ListValue { values })),
        };
        let structure = |fields| Struct { fields };
        let member = Value {
            kind: Some(value::Kind::StructValue(structure(
                [("inside".to_owned(), list(vec![Value::default(); 2]))].into(),
            ))),
        };
        let members = [("a".to_owned(), member), ("b".to_owned(), Value::default())];
        let described = RateLimitDescriptor {
            metadata: Some(structure(members.into())),
            ..empty()
        };
        // The descriptor, the members a, b and inside, and the values in the list.
        assert_eq!(count_of(vec![described]), 6);
    }

    /// The values of a resource that has the maximum depth of the decoder are all counted.
    #[test]
    fn the_maximum_depth_is_the_one_of_the_decoder() {
        let deep = |depth: usize| {
            let innermost = with_descriptors(Vec::new());
            let descriptor = (1..depth).fold(innermost, |inside, _| with_descriptors(vec![inside]));
            RateLimitConfig {
                descriptors: vec![descriptor],
                ..RateLimitConfig::default()
            }
            .encode_to_vec()
        };
        assert_eq!(count_elements(&deep(MAX_DEPTH)).unwrap(), MAX_DEPTH);
        assert!(RateLimitConfig::decode(&*deep(MAX_DEPTH)).is_ok());
        assert!(RateLimitConfig::decode(&*deep(MAX_DEPTH + 1)).is_err());
    }
}
