//! Runs script calls on any topology.

use std::pin::Pin;

use futures_util::future::join_all;

use super::{
    Redis, Routes,
    pipeline::{Command, NoReply},
};
use crate::{
    call::{Call, Reply},
    exec::{self, ExecError, Executor, Replies, ScriptForm},
};

impl Executor for Redis {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>> {
        Box::pin(async move {
            match calls {
                [call] => vec![self.call(call).await],
                // Calls that are queued at the same time are sent in the same batch.
                calls => join_all(calls.iter().map(|call| self.call(call))).await,
            }
        })
    }

    fn is_cluster(&self) -> bool {
        matches!(self.routes, Routes::Cluster(_))
    }
}

impl Redis {
    async fn call(&self, call: &Call) -> Result<Reply, ExecError> {
        let key = call.keys.first().map_or(&[][..], Vec::as_slice);
        let command = |text| Command {
            cmd: exec::command(call, text),
            on_late_reply: call.on_late_reply.clone(),
        };
        let mut reply = self.send(key, command(ScriptForm::Sha)).await;
        if reply.as_ref().is_ok_and(exec::is_no_script) {
            // `NOSCRIPT` means that the script did not run. `EVAL` runs it, and the server knows
            // the script from then on.
            reply = self.send(key, command(ScriptForm::Source)).await;
        }
        match reply {
            Ok(value) => exec::parse_reply(value),
            Err(NoReply::NotSent) => Err(ExecError::NotExecuted(self.why_not_sent())),
            Err(NoReply::Unknown) => Err(ExecError::Unknown(
                "the request was sent, but no reply arrived in time".to_owned(),
            )),
        }
    }

    fn why_not_sent(&self) -> String {
        match self.health().error {
            Some(error) => error.to_string(),
            None => "too many requests are waiting, or the connection was just lost".to_owned(),
        }
    }
}
