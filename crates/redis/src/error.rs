//! Errors that prevent a decision.

/// Either the store made no decision, or the caller cannot know whether the store made a decision.
/// If the caller cannot get a decision, the rule's fallback policy decides the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The script did not run: the connection was down, or the server temporarily refused the
    /// script. Nothing was charged.
    #[error("Redis did not execute the request: {0}")]
    NotExecuted(String),
    /// No reply arrived, so the script may or may not have run. The store never sends such a call
    /// again.
    #[error("no reply from Redis, so it is unknown whether the request was executed: {0}")]
    Unknown(String),
    /// The server refuses the call, and will refuse it until an operator intervenes. Nothing was
    /// charged.
    #[error("Redis rejected the request: {0}")]
    Refused(String),
    /// The value under the key was not written by this store.
    #[error(
        "the value under the key \"{key}\" was not written by Tidegate ({problem}): `tidegate reset` deletes the value; if another program writes keys with the prefix of the store, set another `store.prefix`"
    )]
    Foreign {
        /// The key in Redis, with bytes outside of printable ASCII escaped.
        key: String,
        /// A description of the defect.
        problem: String,
    },
}

impl StoreError {
    /// Other clients changed the same keys during every attempt.
    pub(crate) fn contended() -> Self {
        let problem = "other clients changed the same keys during every attempt";
        Self::NotExecuted(problem.to_owned())
    }

    /// Several charges must be made in one script call, but their keys are on two nodes.
    pub(crate) fn hash_slot_migrating() -> Self {
        let problem = "the hash slot of the keys is moving to another node";
        Self::NotExecuted(problem.to_owned())
    }

    pub(crate) fn unexpected_reply() -> Self {
        let problem =
            "unexpected reply from the script; check whether a proxy changes the replies of Redis";
        Self::Unknown(problem.to_owned())
    }
}
