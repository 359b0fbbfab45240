//! Running calls: everything that touches the `redis` crate's connections is behind [`Exec`].

use std::{fmt, future::Future, pin::Pin};

use redis::{
    Client, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, ServerErrorKind, Value,
    aio::MultiplexedConnection,
};

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
}

/// One server.
#[derive(Clone)]
pub(crate) struct Standalone {
    connection: MultiplexedConnection,
}

impl fmt::Debug for Standalone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Standalone")
    }
}

impl Standalone {
    pub(crate) async fn connect(url: &str) -> Result<Self, ExecError> {
        let refused = |error: RedisError| ExecError::Refused(error.to_string());
        let info = url.into_connection_info().map_err(refused)?;
        // Without this a small request waits for the acknowledgement of the one before it.
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = Client::open(info.set_tcp_settings(tcp)).map_err(refused)?;
        let connection = client.get_multiplexed_async_connection().await;
        let connection = connection.map_err(|error| ExecError::NotExecuted(error.to_string()))?;
        Ok(Self { connection })
    }

    async fn run(&self, calls: &[Call]) -> Replies {
        let mut replies = self
            .send(calls.iter().map(|call| command(call, Text::BySha)))
            .await;
        let unknown: Vec<usize> = (0..replies.len())
            .filter(|at| is_no_script(&replies[*at]))
            .collect();
        if !unknown.is_empty() {
            // A script that the server does not know did not run; its text does, and is known from then on.
            let again = unknown.iter().map(|at| command(&calls[*at], Text::InFull));
            for (at, reply) in unknown.iter().zip(self.send(again).await) {
                replies[*at] = reply;
            }
        }
        replies.into_iter().map(read).collect()
    }

    async fn send(
        &self,
        commands: impl ExactSizeIterator<Item = Cmd>,
    ) -> Vec<Result<Value, RedisError>> {
        let count = commands.len();
        let mut pipeline = Pipeline::with_capacity(count);
        commands.for_each(|command| {
            pipeline.add_command(command);
        });
        match self
            .connection
            .clone()
            .send_packed_commands(&pipeline, 0, count)
            .await
        {
            Ok(replies) => replies.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); count],
        }
    }
}

impl Exec for Standalone {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>> {
        Box::pin(Self::run(self, calls))
    }
}

/// How a script is named to the server.
#[derive(Clone, Copy)]
enum Text {
    BySha,
    InFull,
}

fn command(call: &Call, text: Text) -> Cmd {
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

fn is_no_script(reply: &Result<Value, RedisError>) -> bool {
    matches!(reply, Ok(Value::ServerError(error)) if error.kind() == Some(ServerErrorKind::NoScript))
}

fn read(reply: Result<Value, RedisError>) -> Result<Reply, ExecError> {
    let error: RedisError = match reply {
        Ok(Value::ServerError(error)) => error.into(),
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let problem = error.to_string();
    Err(match error.kind() {
        ErrorKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::NoScript,
        ) => ExecError::NotExecuted(problem),
        ErrorKind::Server(_) | ErrorKind::Extension => ExecError::Refused(problem),
        _ => ExecError::Unknown(problem),
    })
}
