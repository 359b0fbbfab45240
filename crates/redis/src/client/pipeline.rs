//! One connection and its request queue. All requests in the queue are sent as one pipeline.
//!
//! A batch is sent once all replies to the previous batch have arrived. Under low load, each
//! request is sent immediately and on its own. The higher the load, the more requests share a
//! packet, so a higher load increases the throughput rather than the latency. Requests for one key
//! always use the same connection and keep their order.

use redis::{Cmd, Pipeline, Value, aio::MultiplexedConnection};
use tokio::sync::{mpsc, oneshot};

use crate::call::OnLateReply;

/// The maximum number of requests in one batch. Redis processes a full batch within a fraction of a
/// millisecond.
const MAX_BATCH: usize = 256;

/// The reason why a request got no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoReply {
    /// The request was never sent, so it changed nothing.
    NotSent,
    /// The request may have reached the server, so it must not be sent again.
    Unknown,
}

/// The server's reply, which may be an error reply.
pub(super) type ReplyResult = Result<Value, NoReply>;

/// A command, and the callback for a late reply.
#[derive(Clone, Debug)]
pub(super) struct PipelinedCommand {
    pub(super) cmd: Cmd,
    pub(super) on_late_reply: Option<OnLateReply>,
}

/// A request in a connection's queue.
#[derive(Debug)]
pub(super) struct QueuedCommand {
    pub(super) command: PipelinedCommand,
    /// Whether the slot is migrating to this node, so that `ASKING` must precede the command.
    pub(super) asking: bool,
    pub(super) reply: oneshot::Sender<ReplyResult>,
}

/// The sending end of a connection's queue.
pub(super) type RequestQueue = mpsc::Sender<QueuedCommand>;

/// Sends the requests from `queue` on `connection`, until the node has dropped all of the queue's
/// senders. Passes the result of each batch to `record`.
pub(super) async fn run(
    mut queue: mpsc::Receiver<QueuedCommand>,
    mut connection: MultiplexedConnection,
    record: impl Fn(BatchOutcome),
) {
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while queue.recv_many(&mut batch, MAX_BATCH).await > 0 {
        // A caller that has stopped waiting treats the outcome of its request as unknown. If the
        // request were sent now, it would be charged, but nobody would use its decision.
        batch.retain(|request| !request.reply.is_closed());
        if batch.is_empty() {
            continue;
        }
        if queue.is_closed() {
            // The node closed its queue while the requests were waiting.
            fail_all(&mut batch, NoReply::NotSent);
            continue;
        }
        let (pipeline, replies) = build_pipeline(&mut batch);
        let sent = connection.send_packed_commands(&pipeline, 0, replies).await;
        match sent {
            Ok(values) if values.len() == replies => {
                deliver(&mut batch, &pipeline, values);
                record(BatchOutcome::Answered);
            }
            Err(error) if error.is_timeout() => {
                fail_all(&mut batch, NoReply::Unknown);
                record(BatchOutcome::TimedOut);
            }
            Ok(_) | Err(_) => {
                fail_all(&mut batch, NoReply::Unknown);
                record(BatchOutcome::ConnectionLost);
            }
        }
    }
}

/// The result of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchOutcome {
    /// All requests of the batch have received a reply.
    Answered,
    /// The replies did not arrive within the timeout.
    TimedOut,
    /// The connection is broken, or its replies do not match the requests.
    ConnectionLost,
}

/// Takes the commands out of `batch`. Returns them as a pipeline, together with the number of
/// replies to expect.
fn build_pipeline(batch: &mut [QueuedCommand]) -> (Pipeline, usize) {
    let asking = batch.iter().filter(|request| request.asking).count();
    let replies = batch.len() + asking;
    let mut pipeline = Pipeline::with_capacity(replies);
    for request in batch {
        if request.asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(std::mem::take(&mut request.command.cmd));
    }
    (pipeline, replies)
}

/// Sends each reply in `values` to the caller that made the corresponding request in `batch`.
/// `pipeline` contains the commands.
fn deliver(batch: &mut Vec<QueuedCommand>, pipeline: &Pipeline, values: Vec<Value>) {
    debug_assert_eq!(pipeline.len(), values.len());
    let mut answered = pipeline.cmd_iter().zip(values);
    for request in batch.drain(..) {
        if request.asking {
            answered.next();
        }
        let Some((command, reply)) = answered.next() else {
            let _ = request.reply.send(Err(NoReply::Unknown));
            continue;
        };
        // If the caller has stopped waiting, the callback gets the late reply, for example to
        // refund the charge.
        if let (Err(Ok(late)), Some(on_late_reply)) =
            (request.reply.send(Ok(reply)), request.command.on_late_reply)
        {
            (on_late_reply.0)(command, late);
        }
    }
}

fn fail_all(batch: &mut Vec<QueuedCommand>, reason: NoReply) {
    for request in batch.drain(..) {
        let _ = request.reply.send(Err(reason));
    }
}
