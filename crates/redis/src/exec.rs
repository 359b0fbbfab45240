//! Running calls: the way to the servers, whatever they are, is behind [`Exec`].

use std::{fmt, future::Future, pin::Pin};

use redis::{Cmd, RedisError, ServerErrorKind, Value};

use crate::{
    call::{Call, Reply},
    error::StoreError,
};

/// Why a call came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExecError {
    /// The script did not run, and may on another try.
    NotExecuted(String),
    /// The script may have run: it is never sent again.
    Unknown(String),
    /// The server refuses, and will refuse again.
    Refused(String),
}

impl From<ExecError> for StoreError {
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::NotExecuted(problem) => Self::NotExecuted(problem),
            ExecError::Unknown(problem) => Self::Unknown(problem),
            ExecError::Refused(problem) => Self::Refused(problem),
        }
    }
}

pub(crate) type Replies = Vec<Result<Reply, ExecError>>;

/// Runs calls, those of a node in the order in which they are given, in one round trip a node; one reply a call.
pub(crate) trait Exec: fmt::Debug + Send + Sync {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>>;

    /// Whether keys of different slots must not come in one call.
    fn is_slotted(&self) -> bool;
}

/// How a script is named to the server.
#[derive(Clone, Copy)]
pub(crate) enum Text {
    BySha,
    InFull,
}

pub(crate) fn command(call: &Call, text: Text) -> Cmd {
    let (name, script) = match text {
        Text::BySha => ("EVALSHA", &call.script.sha),
        Text::InFull => ("EVAL", &call.script.text),
    };
    let mut command = Cmd::with_capacity(3 + call.keys.len() + call.args.len(), 256);
    command.arg(name).arg(script).arg(call.keys.len());
    call.keys.iter().chain(&call.args).for_each(|part| {
        command.arg(part.as_slice());
    });
    command
}

/// Whether the server does not know the script, and so did not run it.
pub(crate) fn is_no_script(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// Takes an answer for what it is: a reply, or an error that says whether the script ran.
pub(crate) fn read(answer: Value) -> Result<Reply, ExecError> {
    let Value::ServerError(error) = answer else {
        return Ok(answer);
    };
    let kind = error.kind();
    let problem = RedisError::from(error).to_string();
    Err(match kind {
        Some(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::NoScript,
        ) => ExecError::NotExecuted(problem),
        _ => ExecError::Refused(problem),
    })
}
