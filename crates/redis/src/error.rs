//! What can keep a decision from being made.

/// Nothing could be decided, or nobody knows whether it was: the rule's failure policy answers instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The script did not run: no connection, or the server refused for now. Nothing was charged.
    #[error("Redis did not decide: {0}")]
    NotExecuted(String),
    /// The script may have run or not, because no answer came. It is never sent again.
    #[error("no answer came from Redis, and nobody knows whether it decided: {0}")]
    Unknown(String),
    /// The server refuses, and will refuse again until somebody does something about it. Nothing was charged.
    #[error("Redis refuses to decide: {0}")]
    Refused(String),
    /// What stands under the key was not written by this store.
    #[error(
        "the value under the key \"{key}\" was not written by Tidegate ({problem}): `tidegate reset` deletes it; if another program writes there, give the store a prefix of its own"
    )]
    Foreign {
        /// The key as Redis knows it, escaped.
        key: String,
        /// What is wrong with the value.
        problem: String,
    },
}

impl StoreError {
    /// Others change the same keys at the same time, every time.
    pub(crate) fn overtaken() -> Self {
        let problem = "others take over or change the same keys faster";
        Self::NotExecuted(problem.to_owned())
    }

    /// The keys of several charges have to be asked about together, and lie on two nodes.
    pub(crate) fn split() -> Self {
        let problem = "the slot of the keys is moving to another node";
        Self::NotExecuted(problem.to_owned())
    }

    pub(crate) fn unreadable() -> Self {
        let problem = "the script's answer makes no sense: is there a proxy in between?";
        Self::Unknown(problem.to_owned())
    }
}
