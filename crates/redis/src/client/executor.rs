//! Runs script calls on any topology.

use std::{pin::Pin, sync::Arc};

use futures_util::future::join_all;
use redis::Cmd;

use super::{
    Address, Redis, Routes,
    node::Node,
    pipeline::{NoReply, PipelinedCommand},
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
                // Calls queued at the same time are sent in the same batch.
                calls => join_all(calls.iter().map(|call| self.call(call))).await,
            }
        })
    }

    fn is_cluster(&self) -> bool {
        matches!(self.routes, Routes::Cluster(_))
    }

    fn servers(&self) -> Result<Vec<String>, ExecError> {
        match &self.routes {
            Routes::Node(_) => Ok(vec![String::new()]),
            Routes::Cluster(cluster) => {
                let nodes = cluster.owners_of_all_slots();
                let nodes = nodes.ok_or_else(|| {
                    let problem = match self.health().error {
                        Some(error) => error.to_string(),
                        None => {
                            "the nodes of some hash slots of the cluster are unknown".to_owned()
                        }
                    };
                    ExecError::NotExecuted(problem)
                })?;
                let mut names: Vec<String> = nodes.iter().map(name).collect();
                names.sort_unstable();
                names.dedup();
                Ok(names)
            }
        }
    }

    fn run_on<'a>(
        &'a self,
        server: &'a str,
        command: Cmd,
    ) -> Pin<Box<dyn Future<Output = Result<Reply, ExecError>> + Send + 'a>> {
        Box::pin(async move {
            let command = PipelinedCommand {
                cmd: command,
                on_late_reply: None,
            };
            let reply = match &self.routes {
                Routes::Node(node) => node.send(0, command, false).await,
                Routes::Cluster(cluster) => {
                    let nodes = cluster.nodes();
                    match nodes.iter().find(|node| name(node) == server) {
                        Some(node) => node.send(0, command, false).await,
                        None => Err(NoReply::NotSent),
                    }
                }
            };
            reply.map_err(|error| self.not_answered(&error))
        })
    }
}

/// Returns the name of a cluster node, which is its address.
fn name(node: &Arc<Node>) -> String {
    node.address().map(Address::to_string).unwrap_or_default()
}

impl Redis {
    async fn call(&self, call: &Call) -> Result<Reply, ExecError> {
        let key = call.keys.first().map_or(&[][..], Vec::as_slice);
        let command = |text| PipelinedCommand {
            cmd: exec::command(call, text),
            on_late_reply: call.on_late_reply.clone(),
        };
        let mut reply = self.send(key, command(ScriptForm::Sha)).await;
        if reply.as_ref().is_ok_and(exec::is_no_script) {
            // `NOSCRIPT` means that the script did not run. `EVAL` sends the script's source, which
            // the server caches for later calls.
            reply = self.send(key, command(ScriptForm::Source)).await;
        }
        match reply {
            Ok(value) => exec::parse_reply(value),
            Err(error) => Err(self.not_answered(&error)),
        }
    }

    fn not_answered(&self, error: &NoReply) -> ExecError {
        match error {
            NoReply::NotSent => ExecError::NotExecuted(self.why_not_sent()),
            NoReply::Unknown => {
                ExecError::Unknown("the request was sent, but no reply arrived in time".to_owned())
            }
        }
    }

    fn why_not_sent(&self) -> String {
        match self.health().error {
            Some(error) => error.to_string(),
            None => {
                "too many requests are queued for Redis, or the connection was just lost".to_owned()
            }
        }
    }
}
