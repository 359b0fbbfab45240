//! The part of a connection's state that commands can read and change.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_limiter::Database;
use tidegate_net::auth::{self, AuthOutcome, Authenticator};

use super::{reply::RespVersion, transaction::Transaction};

/// The default user name, for clients that send none.
pub(super) const DEFAULT_USER: &str = "default";

/// The connection ID that was assigned last.
static LAST_ID: AtomicU64 = AtomicU64::new(0);

/// The part of a connection's state that commands can read and change.
#[derive(Debug)]
pub(super) struct RespSession {
    pub(super) id: u64,
    pub(super) peer: SocketAddr,
    pub(super) protocol: RespVersion,
    pub(super) replies: ReplyMode,
    /// The selected database. The keys of limits that are sent with commands are separate for each
    /// database.
    pub(super) database: Database,
    /// Whether the connection must be closed after the current command, and why.
    pub(super) close: CloseAfterReply,
    pub(super) names: Option<Box<Names>>,
    /// The authenticator and the configured user name; `None` if no authentication is required.
    authenticator: Option<(Arc<Authenticator>, Arc<str>)>,
    is_authenticated: bool,
    /// Whether the client may run commands that list the keys of all clients.
    pub(super) may_list_keys: bool,
    /// The commands since `MULTI`.
    pub(super) transaction: Option<Box<Transaction>>,
}

/// The names that a client has set. Boxed, because most clients set no names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) connection: Vec<u8>,
    pub(super) library: Vec<u8>,
    pub(super) version: Vec<u8>,
}

/// The mode set by `CLIENT REPLY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ReplyMode {
    #[default]
    On,
    Off,
    /// Neither the current command nor the next command gets a reply.
    SkipNext,
}

/// Whether the connection is closed after the last reply, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CloseAfterReply {
    #[default]
    No,
    /// The client sent `QUIT`.
    Quit,
    /// The client sent malformed input. Further input is discarded.
    Broken,
}

impl RespSession {
    /// Creates the state of a new connection that needs no authentication.
    pub(super) fn new(id: u64, peer: SocketAddr) -> Self {
        Self {
            id,
            peer,
            protocol: RespVersion::default(),
            replies: ReplyMode::default(),
            database: Database::default(),
            close: CloseAfterReply::default(),
            names: None,
            authenticator: None,
            is_authenticated: true,
            may_list_keys: false,
            transaction: None,
        }
    }

    /// Requires authentication unless `authenticator` is open.
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

    /// Sets whether the client may run commands that list the keys of all clients.
    pub(super) fn listing_keys(self, may_list_keys: bool) -> Self {
        Self {
            may_list_keys,
            ..self
        }
    }

    /// Returns whether the client may run commands.
    pub(super) const fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Returns whether the listener requires no authentication.
    pub(super) const fn is_open(&self) -> bool {
        self.authenticator.is_none()
    }

    /// Tries to authenticate as `user`.
    pub(super) fn authenticate(&mut self, user: &[u8], password: &[u8]) -> AuthOutcome {
        let Some((authenticator, _)) = &self.authenticator else {
            return if user == DEFAULT_USER.as_bytes() {
                AuthOutcome::Accepted { secret: 0 }
            } else {
                AuthOutcome::Wrong
            };
        };
        let outcome = authenticator.check(self.peer.ip(), &auth::login(user, password));
        // As in Redis, a wrong password does not revoke an earlier authentication.
        self.is_authenticated |= matches!(outcome, AuthOutcome::Accepted { .. });
        outcome
    }

    /// Returns the user name that `AUTH` uses if the client sends only a password.
    pub(super) fn default_user(&self) -> Vec<u8> {
        let user = self.authenticator.as_ref();
        let user = user.map_or(DEFAULT_USER, |(_, user)| user);
        user.as_bytes().to_vec()
    }

    /// Marks the client as authenticated, because another process has authenticated it.
    pub(super) fn mark_authenticated(&mut self) {
        self.is_authenticated = true;
    }

    /// Returns a connection ID that is unique in this process.
    pub(super) fn next_id() -> u64 {
        LAST_ID.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Lets all further connection IDs be larger than `id`.
    pub(super) fn skip_id(id: u64) {
        LAST_ID.fetch_max(id, Ordering::Relaxed);
    }

    /// Resets the state of the connection, except for its identity.
    pub(super) fn reset(&mut self) {
        self.protocol = RespVersion::default();
        self.replies = ReplyMode::default();
        self.database = Database::default();
        self.names = None;
        self.is_authenticated = self.is_open();
        self.transaction = None;
    }

    /// Returns the heap memory that this session uses because of the client's commands, in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        self.transaction
            .as_ref()
            .map_or(0, |open| open.heap_bytes())
    }

    pub(super) fn names_mut(&mut self) -> &mut Names {
        self.names.get_or_insert_default()
    }
}
