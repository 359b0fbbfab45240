//! The tokens of the admin listener.

use std::fmt;

/// The token that clients of the admin listener must send.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum AdminToken {
    /// No token is required, because the listener is on loopback.
    #[default]
    None,
    /// `admin.token`: the token itself.
    Literal(String),
    /// `admin.token_env`: the name of the environment variable that contains the token. The code
    /// that starts the server must read the variable, and must abort the start if the variable is
    /// not set.
    Env(String),
}

/// A named token of the admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorToken {
    /// `name`: the operator's name in the audit log.
    pub name: String,
    /// `scope`: the permissions of the token; default `read`.
    pub scope: TokenScope,
    /// `token` or `token_env`. Never [`AdminToken::None`].
    pub token: AdminToken,
}

/// The permissions of an admin listener token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenScope {
    /// The token permits only reading.
    #[default]
    Read,
    /// The token permits reading and every change.
    Operate,
}

impl TokenScope {
    /// Returns `read` or `operate`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

/// Hides the token, because `Debug` output can reach logs.
impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Literal(_) => f.write_str("Literal(…)"),
            Self::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}
