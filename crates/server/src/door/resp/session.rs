//! What a connection has told us about itself.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{reply::Protocol, transaction::Transaction};

/// The state of one connection, as far as commands can see and change it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) peer: SocketAddr,
    pub(super) protocol: Protocol,
    pub(super) replies: Replies,
    /// Whether this command was the last.
    pub(super) ending: Ending,
    pub(super) names: Option<Box<Names>>,
    /// What has been sent since `MULTI`.
    pub(super) transaction: Option<Box<Transaction>>,
}

/// The names that a client gave; boxed, because most connections of a pool give none.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    pub(super) connection: Vec<u8>,
    pub(super) library: Vec<u8>,
    pub(super) version: Vec<u8>,
}

/// What `CLIENT REPLY` asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Replies {
    #[default]
    On,
    Off,
    /// Not to this command, but to the next but one.
    SkipNext,
}

/// Whether and why a connection ends after what was answered last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Ending {
    #[default]
    No,
    /// The client said goodbye.
    Quit,
    /// The client cannot be understood; what it still sends is thrown away.
    Broken,
}

impl Session {
    /// A connection that has said nothing yet.
    pub(super) fn new(id: u64, peer: SocketAddr) -> Self {
        Self {
            id,
            peer,
            protocol: Protocol::default(),
            replies: Replies::default(),
            ending: Ending::default(),
            names: None,
            transaction: None,
        }
    }

    /// An id that no other connection of this process has had.
    pub(super) fn next_id() -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        LAST.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Forgets everything but who it is.
    pub(super) fn reset(&mut self) {
        self.protocol = Protocol::default();
        self.replies = Replies::default();
        self.names = None;
        self.transaction = None;
    }

    /// How much memory it holds that a client may fill at will.
    pub(super) fn held(&self) -> usize {
        self.transaction.as_ref().map_or(0, |open| open.held())
    }

    pub(super) fn names_mut(&mut self) -> &mut Names {
        self.names.get_or_insert_default()
    }
}
