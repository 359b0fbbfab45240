//! The state of a client connection that moves to another process, as bytes.

use tidegate_net::StateFormat;

const MOVED: StateFormat = StateFormat {
    protocol: b'P',
    version: 1,
};

const NEW: u8 = 0;
const HTTP1: u8 = 1;

/// The state of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MovedState {
    /// Nothing has been read, so the protocol is not known.
    New,
    /// The connection is an HTTP/1 connection between two requests, with the bytes that were read
    /// and not used.
    Http1(Vec<u8>),
}

impl MovedState {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, unread) = match self {
            Self::New => (NEW, &[][..]),
            Self::Http1(unread) => (HTTP1, &unread[..]),
        };
        [&MOVED.header()[..], &[kind], unread].concat()
    }

    /// Returns the state; `None` if it is not valid.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match MOVED.strip(bytes)? {
            [NEW] => Some(Self::New),
            [HTTP1, unread @ ..] => Some(Self::Http1(unread.to_vec())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_decoded_and_an_unknown_one_is_refused() {
        for state in [MovedState::New, MovedState::Http1(b"GET /".to_vec())] {
            assert_eq!(MovedState::decode(&state.encode()), Some(state));
        }
        for bytes in [
            &b""[..],
            b"P",
            b"P\x01",
            b"P\x02\x01",
            b"P\x01\x02",
            b"H\x01\x01",
        ] {
            assert_eq!(MovedState::decode(bytes), None);
        }
    }
}
