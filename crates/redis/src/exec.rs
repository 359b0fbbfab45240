//! Script execution. [`Executor`] hides the topology of the servers.

use std::{fmt, future::Future, pin::Pin};

use redis::{Arg, Cmd, RedisError, ServerErrorKind, Value};

use crate::{
    call::{Call, Reply},
    error::StoreError,
};

/// The reason why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExecError {
    /// The script did not run. Another attempt may succeed.
    NotExecuted(String),
    /// The script did not run, because some of its keys have already migrated to another node.
    SplitHashSlot(String),
    /// The script may have run. The store never sends such a call again.
    Unknown(String),
    /// The server refuses the call, and will refuse it again.
    Refused(String),
    /// A key holds a value of another Redis type.
    WrongType,
}

impl ExecError {
    /// Converts the error to a [`StoreError`] about the keys of `call`.
    pub(crate) fn into_store_error(self, call: &Call) -> StoreError {
        match self {
            Self::NotExecuted(problem) | Self::SplitHashSlot(problem) => {
                StoreError::NotExecuted(problem)
            }
            Self::Unknown(problem) => StoreError::Unknown(problem),
            Self::Refused(problem) => StoreError::Refused(problem),
            Self::WrongType => {
                let keys = call.keys.iter().map(|key| key.escape_ascii().to_string());
                StoreError::Foreign {
                    key: keys.collect::<Vec<_>>().join("\" or \""),
                    problem: "it has a different type".to_owned(),
                }
            }
        }
    }
}

pub(crate) type Replies = Vec<Result<Reply, ExecError>>;

/// Runs calls in one round trip per node, and returns one reply per call. Calls to the same node
/// keep their order.
pub(crate) trait Executor: fmt::Debug + Send + Sync {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>>;

    /// Returns whether the executor uses a Redis Cluster, in which all keys of one call must be in
    /// the same slot.
    fn is_cluster(&self) -> bool;

    /// Returns the sorted names of the servers that hold the keys.
    ///
    /// # Errors
    ///
    /// Returns the reason if some keys are on unknown servers.
    fn servers(&self) -> Result<Vec<String>, ExecError>;

    /// Runs a read-only command on the server with this name.
    fn run_on<'a>(
        &'a self,
        server: &'a str,
        command: Cmd,
    ) -> Pin<Box<dyn Future<Output = Result<Reply, ExecError>> + Send + 'a>>;
}

/// Runs a single call.
pub(crate) async fn run_once(executor: &dyn Executor, call: &Call) -> Result<Reply, ExecError> {
    let mut replies = executor.run(std::slice::from_ref(call)).await;
    let reply = replies.pop();
    reply.unwrap_or_else(|| Err(ExecError::Unknown("no reply".to_owned())))
}

/// How a command specifies its script: by digest, or as source code.
#[derive(Clone, Copy)]
pub(crate) enum ScriptForm {
    Sha,
    Source,
}

pub(crate) fn command(call: &Call, form: ScriptForm) -> Cmd {
    let (name, script) = match form {
        ScriptForm::Sha => ("EVALSHA", &call.script.sha),
        ScriptForm::Source => ("EVAL", &call.script.text),
    };
    let mut command = Cmd::with_capacity(3 + call.keys.len() + call.args.len(), 256);
    command.arg(name).arg(script).arg(call.keys.len());
    call.keys.iter().chain(&call.args).for_each(|part| {
        command.arg(part.as_slice());
    });
    command
}

/// The keys and the arguments of a call, as they were sent in a command.
#[derive(Debug)]
pub(crate) struct SentCall<'c> {
    pub(crate) keys: Vec<&'c [u8]>,
    pub(crate) args: Vec<&'c [u8]>,
}

impl<'c> SentCall<'c> {
    /// Reads the call that [`command`] has built as `sent`.
    pub(crate) fn read(sent: &'c Cmd) -> Option<Self> {
        let mut parts = sent.args_iter().map(|part| match part {
            Arg::Simple(part) => part,
            _ => &[],
        });
        // The name of the command and the script precede the number of keys.
        let keys = std::str::from_utf8(parts.nth(2)?).ok()?.parse().ok()?;
        Some(Self {
            keys: parts.by_ref().take(keys).collect(),
            args: parts.collect(),
        })
    }
}

/// Returns whether the server did not run the script because it does not know the digest.
pub(crate) fn is_no_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// Returns the reply, or an error that says whether the script ran.
pub(crate) fn parse_reply(reply: Value) -> Result<Reply, ExecError> {
    let Value::ServerError(error) = reply else {
        return Ok(reply);
    };
    let kind = error.kind();
    // If a command inside the script failed, the error code is in the middle of the message.
    let says = |text: &str| {
        error.code() == text
            || error
                .details()
                .is_some_and(|details| details.contains(text))
    };
    if says("WRONGTYPE") {
        return Err(ExecError::WrongType);
    }
    let advice = if says("OOM") {
        "; raise the `maxmemory` of Redis, and use this Redis only for Tidegate"
    } else if says("NOPERM") || says("The user executing the script") {
        "; grant the store's user the ACL in docs/fleet.md (ACL SETUSER), with the prefix of this store"
    } else {
        ""
    };
    let problem = RedisError::from(error).to_string();
    Err(match kind {
        Some(ServerErrorKind::TryAgain) => ExecError::SplitHashSlot(problem),
        Some(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::NoScript,
        ) => ExecError::NotExecuted(problem),
        _ => ExecError::Refused(problem + advice),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripts;

    #[test]
    fn a_sent_call_has_the_keys_and_the_arguments_of_the_call() {
        let bytes = |parts: &[&str]| parts.iter().map(|part| Vec::from(*part)).collect();
        let call = Call {
            script: &scripts::REFUND,
            keys: bytes(&["a", "", "c"]),
            args: bytes(&["", "charge", "3"]),
            on_late_reply: None,
        };
        for form in [ScriptForm::Sha, ScriptForm::Source] {
            let sent = command(&call, form);
            let SentCall { keys, args } = SentCall::read(&sent).unwrap();
            assert_eq!(
                (keys, args),
                (vec![&b"a"[..], b"", b"c"], vec![&b""[..], b"charge", b"3"])
            );
        }
    }
}
