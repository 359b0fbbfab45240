//! A decoded response with a bounded number of resources.

use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType, skip_field},
};

use super::resources::MAX_RESOURCES;
use crate::proto::envoy::service::discovery::v3::DiscoveryResponse;

/// The number of the field `resources`.
const RESOURCES: u32 = 2;

/// A response of which at most one resource more than the maximum is decoded. An empty resource
/// takes two bytes on the wire, but twenty times as much memory.
#[derive(Debug, Default)]
pub(super) struct BoundedResponse(pub(super) DiscoveryResponse);

impl Message for BoundedResponse {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        self.0.encode_raw(buffer);
    }

    fn merge_field(
        &mut self,
        field: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if field == RESOURCES && self.0.resources.len() > MAX_RESOURCES {
            return skip_field(wire_type, field, buffer, context);
        }
        self.0.merge_field(field, wire_type, buffer, context)
    }

    fn encoded_len(&self) -> usize {
        self.0.encoded_len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use prost_types::Any;

    use super::*;

    #[test]
    fn the_decoded_resources_are_bounded() {
        for (sent, decoded) in [
            (3, 3),
            (MAX_RESOURCES, MAX_RESOURCES),
            (1_000_000, MAX_RESOURCES + 1),
        ] {
            let response = DiscoveryResponse {
                resources: vec![Any::default(); sent],
                nonce: "n".to_owned(),
                ..DiscoveryResponse::default()
            };
            let BoundedResponse(found) = Message::decode(&*response.encode_to_vec()).unwrap();
            assert_eq!(found.resources.len(), decoded);
            assert_eq!(found.nonce, "n");
        }
    }
}
