//! The body of a message that hands over a connection.
//!
//! ```text
//! | address of the listener | address of the client | name of the client | state of the protocol |
//! ```
//!
//! The first three parts are text, each after its length (4 bytes, little-endian). The second and
//! the third part are empty unless the connection is relayed. The third part is also empty if the
//! client has no certificate.

use std::net::SocketAddr;

use tidegate_net::{MovedConnection, RelayedClient};

/// The parts of the body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ConnectionBody<'b> {
    pub(super) listener: SocketAddr,
    pub(super) relayed: Option<RelayedClient>,
    pub(super) state: &'b [u8],
}

/// Returns the part of the body that precedes the state.
pub(super) fn encode_head(connection: &MovedConnection) -> Vec<u8> {
    let mut head = Vec::new();
    put_text(&mut head, &connection.listener.to_string());
    let client = connection.relayed.as_ref();
    put_text(
        &mut head,
        &client.map_or_else(String::new, |client| client.address.to_string()),
    );
    let name = client.and_then(|client| client.name.as_deref());
    put_text(&mut head, name.unwrap_or_default());
    head
}

/// Returns the parts of `body`; `None` if it is not valid.
pub(super) fn decode(body: &[u8]) -> Option<ConnectionBody<'_>> {
    let (listener, rest) = split_text(body)?;
    let (client, rest) = split_text(rest)?;
    let (name, state) = split_text(rest)?;
    let relayed = match client {
        "" => None,
        address => Some(RelayedClient {
            address: address.parse().ok()?,
            name: (!name.is_empty()).then(|| name.to_owned()),
        }),
    };
    Some(ConnectionBody {
        listener: listener.parse().ok()?,
        relayed,
        state,
    })
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    // The upgrade channel rejects a message of `u32::MAX` bytes.
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    out.extend(length.to_le_bytes());
    out.extend(text.as_bytes());
}

fn split_text(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let (text, rest) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(text).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn connection(listener: &str, relayed: Option<RelayedClient>) -> MovedConnection {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        MovedConnection {
            listener: listener.parse().unwrap(),
            socket: TcpStream::connect(socket.local_addr().unwrap()).unwrap(),
            relayed,
            state: b"GET".to_vec(),
        }
    }

    #[test]
    fn a_body_is_decoded() {
        let client = |name: Option<&str>| RelayedClient {
            address: "203.0.113.9:4711".parse().unwrap(),
            name: name.map(str::to_owned),
        };
        for listener in ["127.0.0.1:80", "[2001:db8::1%3]:443"] {
            for relayed in [None, Some(client(None)), Some(client(Some("billing")))] {
                let moved = connection(listener, relayed);
                let body = [&encode_head(&moved)[..], &moved.state].concat();
                let expected = ConnectionBody {
                    listener: moved.listener,
                    relayed: moved.relayed,
                    state: b"GET",
                };
                assert_eq!(decode(&body), Some(expected));
            }
        }
    }

    #[test]
    fn an_invalid_body_is_refused() {
        let valid = encode_head(&connection("127.0.0.1:80", None));
        for length in 0..valid.len() {
            assert_eq!(decode(&valid[..length]), None);
        }
        assert_eq!(decode(b"\x02\0\0\0ab\0\0\0\0\0\0\0\0"), None);
        assert_eq!(decode(b"\x02\0\0\0\xff\xff\0\0\0\0\0\0\0\0"), None);
    }
}
