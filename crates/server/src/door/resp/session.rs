//! What a connection has told us about itself.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{reply::Protocol, transaction::Transaction};
use crate::{
    door::{
        Authenticator,
        auth::{self, Attempt},
    },
    limiter::Database,
};

/// The user that a client is unless it says otherwise.
pub(super) const DEFAULT_USER: &str = "default";

/// The state of one connection, as far as commands can see and change it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) peer: SocketAddr,
    pub(super) protocol: Protocol,
    pub(super) replies: Replies,
    /// Where the keys of limits that come with requests count.
    pub(super) database: Database,
    /// Whether this command was the last.
    pub(super) ending: Ending,
    pub(super) names: Option<Box<Names>>,
    /// Who says whether the password is right, and the user's name; `None` if everybody may ask.
    authenticator: Option<(Arc<Authenticator>, Arc<str>)>,
    is_authenticated: bool,
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
            database: Database::default(),
            ending: Ending::default(),
            names: None,
            authenticator: None,
            is_authenticated: true,
            transaction: None,
        }
    }

    /// The same, of somebody who has to authenticate if `authenticator` is not open.
    pub(super) fn guarded_by(self, authenticator: &Arc<Authenticator>, user: &Arc<str>) -> Self {
        if authenticator.is_open() {
            return self;
        }
        Self {
            authenticator: Some((Arc::clone(authenticator), Arc::clone(user))),
            is_authenticated: false,
            ..self
        }
    }

    /// Whether commands of this connection are run.
    pub(super) const fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Whether there is no password to be shown.
    pub(super) const fn is_open(&self) -> bool {
        self.authenticator.is_none()
    }

    /// Tries to authenticate as `user`.
    pub(super) fn authenticate(&mut self, user: &[u8], password: &[u8]) -> Attempt {
        let Some((authenticator, _)) = &self.authenticator else {
            return if user == DEFAULT_USER.as_bytes() {
                Attempt::Accepted
            } else {
                Attempt::Wrong
            };
        };
        let attempt = authenticator.check(self.peer.ip(), &auth::login(user, password));
        // As in Redis, a wrong password leaves a connection as it was.
        self.is_authenticated |= attempt == Attempt::Accepted;
        attempt
    }

    /// The user that `AUTH` with a password alone names.
    pub(super) fn default_user(&self) -> Vec<u8> {
        let user = self.authenticator.as_ref();
        let user = user.map_or(DEFAULT_USER, |(_, user)| user);
        user.as_bytes().to_vec()
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
        self.database = Database::default();
        self.names = None;
        self.is_authenticated = self.is_open();
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
