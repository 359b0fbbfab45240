//! One connection, and the queue of requests for it. All requests in the queue are sent as one
//! pipeline.
//!
//! A batch is sent once all replies to the previous one have arrived. Under low load each request
//! is sent immediately and alone. The higher the load, the more requests share a packet, so a
//! higher load increases the throughput rather than the latency. Requests for one key always use
//! the same link and keep their order.

use redis::{Cmd, Pipeline, Value, aio::MultiplexedConnection};
use tokio::sync::{mpsc, oneshot};

use super::node::Shared;
use crate::call::OnLateReply;

/// The maximum number of requests in one batch. Redis answers a full batch within a fraction of a
/// millisecond.
const MAX_BATCH: usize = 256;

/// The reason why a request got no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The request was never sent, so it changed nothing.
    NotSent,
    /// The request may or may not have arrived. It must not be sent again.
    Unknown,
}

/// The server's reply, which may be an error.
pub(super) type Answer = Result<Value, Fate>;

/// A command, and the callback for a late reply.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) command: Cmd,
    pub(super) on_late_reply: Option<OnLateReply>,
}

/// A queued request.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) order: Order,
    /// Whether the slot is migrating to this node, so that `ASKING` must precede the command.
    pub(super) asking: bool,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// The sending end of the queue of one connection.
pub(super) type Link = mpsc::Sender<Question>;

/// Sends the requests from `questions` on `connection`, until the node drops the sending ends.
pub(super) async fn serve(
    mut questions: mpsc::Receiver<Question>,
    mut connection: MultiplexedConnection,
    node: std::sync::Arc<Shared>,
) {
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while questions.recv_many(&mut batch, MAX_BATCH).await > 0 {
        // A caller that has stopped waiting treats the outcome of its request as unknown. If the
        // request were sent now, it would be charged although nobody uses the decision.
        batch.retain(|question| !question.answer.is_closed());
        if batch.is_empty() {
            continue;
        }
        if questions.is_closed() {
            // The node closed its links while these requests were queued.
            settle_all(&mut batch, Fate::NotSent);
            continue;
        }
        let (pipeline, replies) = pack(&mut batch);
        let sent = connection.send_packed_commands(&pipeline, 0, replies).await;
        match sent {
            Ok(values) if values.len() == replies => {
                settle(&mut batch, values);
                node.record(Ended::Answered);
            }
            Err(error) if error.is_timeout() => {
                settle_all(&mut batch, Fate::Unknown);
                node.record(Ended::TooLate);
            }
            Ok(_) | Err(_) => {
                settle_all(&mut batch, Fate::Unknown);
                node.record(Ended::Lost);
            }
        }
    }
}

/// The result of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Answered,
    TooLate,
    /// The connection is broken, or its replies do not match the requests.
    Lost,
}

fn pack(batch: &mut [Question]) -> (Pipeline, usize) {
    let asking = batch.iter().filter(|question| question.asking).count();
    let replies = batch.len() + asking;
    let mut pipeline = Pipeline::with_capacity(replies);
    for question in batch {
        if question.asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(std::mem::take(&mut question.order.command));
    }
    (pipeline, replies)
}

fn settle(batch: &mut Vec<Question>, values: Vec<Value>) {
    let mut values = values.into_iter();
    for question in batch.drain(..) {
        if question.asking {
            values.next();
        }
        let answer = values.next().ok_or(Fate::Unknown);
        // If the caller has stopped waiting, the callback may have to undo the charge.
        if let (Err(Ok(late)), Some(on_late_reply)) =
            (question.answer.send(answer), question.order.on_late_reply)
        {
            (on_late_reply.0)(late);
        }
    }
}

fn settle_all(batch: &mut Vec<Question>, fate: Fate) {
    for question in batch.drain(..) {
        let _ = question.answer.send(Err(fate));
    }
}
