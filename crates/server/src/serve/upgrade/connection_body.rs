//! The body of a message that hands over a connection.
//!
//! ```text
//! | length of the address: 1 | address of the listener, as text | state of the protocol |
//! ```

use std::net::SocketAddr;

/// Returns the part of the body that precedes the state.
pub(super) fn encode(listener: SocketAddr) -> Vec<u8> {
    let address = listener.to_string();
    // The text of an address is shorter than 100 bytes.
    let length = u8::try_from(address.len()).unwrap_or(u8::MAX);
    [&[length], address.as_bytes()].concat()
}

/// Returns the address of the listener and the state.
pub(super) fn decode(body: &[u8]) -> Option<(SocketAddr, &[u8])> {
    let (length, rest) = body.split_first()?;
    let (address, state) = rest.split_at_checked(usize::from(*length))?;
    let address = std::str::from_utf8(address).ok()?.parse().ok()?;
    Some((address, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_decoded_and_an_invalid_one_is_refused() {
        for address in ["127.0.0.1:80", "[2001:db8::1%3]:443"] {
            let address: SocketAddr = address.parse().unwrap();
            let body = [&encode(address)[..], b"GET"].concat();
            assert_eq!(decode(&body), Some((address, &b"GET"[..])));
        }
        for body in [&b""[..], b"\x05a", b"\x02ab", b"\x02\xff\xff"] {
            assert_eq!(decode(body), None);
        }
    }
}
