//! The state of a connection that moves to another process, as bytes.
//!
//! ```text
//! | R | version: 1 | protocol: 1 | replies: 1 | database: 1 | authenticated: 1 | id: 8
//!   names: 3 | transaction: 0, or 1, count: 8, failed: 1, commands | unread
//! ```
//!
//! Each of the names, the commands and the unread bytes is preceded by its length (4 bytes).

use tidegate_limiter::Database;
use tidegate_net::StateFormat;

use super::{
    bounds::{MAX_COMMAND_BYTES, MAX_NAME_BYTES, READ_BYTES},
    reply::RespVersion,
    session::{Names, ReplyMode, RespSession},
    transaction::Transaction,
};

const MOVED: StateFormat = StateFormat {
    protocol: b'R',
    version: 1,
};

/// The maximum length of the bytes that were read and not used: a command, and one read.
const MAX_UNREAD_BYTES: usize = MAX_COMMAND_BYTES + READ_BYTES;

/// The state of a connection that is not part of its session.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MovedState {
    /// The bytes that were read and not used.
    pub(super) unread: Vec<u8>,
}

impl RespSession {
    /// Returns the state of this session and its connection; `unread` are the bytes that were read
    /// from the connection but not processed.
    pub(super) fn state_to_move(&self, unread: &[u8]) -> Vec<u8> {
        let replies = match self.replies {
            ReplyMode::On => 0,
            ReplyMode::Off => 1,
            ReplyMode::SkipNext => 2,
        };
        let mut state = MOVED.header().to_vec();
        state.extend([
            u8::from(self.protocol == RespVersion::Resp3),
            replies,
            self.database.number(),
            // A session that needed no password may need one in the other process.
            u8::from(self.is_authenticated() && !self.is_open()),
        ]);
        state.extend(self.id.to_le_bytes());
        let names = self.names.as_deref().cloned().unwrap_or_default();
        for name in [&names.connection, &names.library, &names.version] {
            put(&mut state, name);
        }
        match &self.transaction {
            None => state.push(0),
            Some(open) => {
                let (count, queued, is_spoilt) = open.parts();
                state.push(1);
                state.extend((count as u64).to_le_bytes());
                state.push(u8::from(is_spoilt));
                put(&mut state, queued);
            }
        }
        put(&mut state, unread);
        state
    }

    /// Continues the session with `state`. Returns `None`, and changes nothing, if the state is not
    /// valid.
    pub(super) fn resume(&mut self, state: &[u8]) -> Option<MovedState> {
        let mut input = StateReader(MOVED.strip(state)?);
        let [protocol, replies, database, is_authenticated] = input.array()?;
        let protocol = match protocol {
            0 => RespVersion::Resp2,
            1 => RespVersion::Resp3,
            _ => return None,
        };
        let replies = match replies {
            0 => ReplyMode::On,
            1 => ReplyMode::Off,
            2 => ReplyMode::SkipNext,
            _ => return None,
        };
        let database = Database::new(database.into())?;
        let id = u64::from_le_bytes(input.array()?);
        let names = Names {
            connection: input.bytes(MAX_NAME_BYTES)?,
            library: input.bytes(MAX_NAME_BYTES)?,
            version: input.bytes(MAX_NAME_BYTES)?,
        };
        let transaction = match input.array()? {
            [0] => None,
            [1] => {
                let count = usize::try_from(u64::from_le_bytes(input.array()?)).ok()?;
                let [is_spoilt] = input.array()?;
                let queued = input.bytes(MAX_COMMAND_BYTES)?;
                // Each command takes at least one byte.
                if count > queued.len() && is_spoilt == 0 {
                    return None;
                }
                let open = Transaction::from_parts(count, queued, is_spoilt != 0);
                Some(Box::new(open))
            }
            _ => return None,
        };
        let unread = input.bytes(MAX_UNREAD_BYTES)?;
        if !input.0.is_empty() {
            return None;
        }
        Self::skip_id(id);
        self.id = id;
        self.protocol = protocol;
        self.replies = replies;
        self.database = database;
        let has_names = names != Names::default();
        self.names = has_names.then(|| Box::new(names));
        self.transaction = transaction;
        if is_authenticated == 1 {
            self.mark_authenticated();
        }
        Some(MovedState { unread })
    }
}

fn put(state: &mut Vec<u8>, bytes: &[u8]) {
    // No part of a session is longer than `MAX_UNREAD_BYTES`.
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    state.extend(length.to_le_bytes());
    state.extend(bytes);
}

struct StateReader<'b>(&'b [u8]);

impl StateReader<'_> {
    fn array<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    /// Returns bytes with a length, at most `max` bytes.
    fn bytes(&mut self, max: usize) -> Option<Vec<u8>> {
        let length = usize::try_from(u32::from_le_bytes(self.array()?)).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length).filter(|_| length <= max)?;
        self.0 = rest;
        Some(bytes.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    fn session() -> RespSession {
        RespSession::new(1, SocketAddr::from((Ipv4Addr::LOCALHOST, 1)))
    }

    fn moved() -> Vec<u8> {
        let mut session = session();
        session.id = 7_000;
        session.protocol = RespVersion::Resp3;
        session.replies = ReplyMode::SkipNext;
        session.database = Database::new(3).unwrap();
        session.names_mut().library = b"redis-py".to_vec();
        let queued = b"*1\r\n$4\r\nPING\r\n".to_vec();
        let open = Transaction::from_parts(1, queued, false);
        session.transaction = Some(Box::new(open));
        session.state_to_move(b"*1\r\n$4")
    }

    #[test]
    fn a_session_continues_with_its_state() {
        let mut resumed = session();
        let MovedState { unread } = resumed.resume(&moved()).unwrap();
        assert_eq!(unread, b"*1\r\n$4");
        assert_eq!(
            (resumed.id, resumed.protocol, resumed.replies),
            (7_000, RespVersion::Resp3, ReplyMode::SkipNext)
        );
        assert_eq!(resumed.database.number(), 3);
        assert_eq!(resumed.names.as_ref().unwrap().library, b"redis-py");
        let (count, queued, is_spoilt) = resumed.transaction.as_ref().unwrap().parts();
        assert_eq!((count, queued.len(), is_spoilt), (1, 14, false));
        assert!(RespSession::next_id() > 7_000);
    }

    #[test]
    fn a_truncated_or_unknown_state_is_refused() {
        let whole = moved();
        for length in 0..whole.len() {
            assert_eq!(session().resume(&whole[..length]), None, "{length}");
        }
        for (at, byte) in [(0, b'H'), (1, 9), (2, 2), (3, 3), (4, 99)] {
            let mut other = whole.clone();
            other[at] = byte;
            assert_eq!(session().resume(&other), None, "{at}");
        }
        let longer = [&whole[..], b"x"].concat();
        assert_eq!(session().resume(&longer), None);
    }
}
