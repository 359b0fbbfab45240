//! One connection and the questions that wait for it: those that wait together travel together.
//!
//! A batch is sent when the answers to the one before are there. With little to do a question goes out at once and
//! alone; the more there is to do, the more questions share a packet, so that load buys throughput and not latency.
//! Questions about one key always take the same link and keep their order.

use redis::{Cmd, Pipeline, Value, aio::MultiplexedConnection};
use tokio::sync::{mpsc, oneshot};

use super::node::Shared;
use crate::call::Unheard;

/// The most questions of one batch: what Redis answers within a fraction of a millisecond.
const MAX_BATCH: usize = 256;

/// What became of a question that got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It never left, and so changed nothing.
    NotSent,
    /// It may have arrived, or not. It must not be sent again.
    Unknown,
}

/// The server's answer, an error among them.
pub(super) type Answer = Result<Value, Fate>;

/// What is to be asked.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) command: Cmd,
    pub(super) unheard: Option<Unheard>,
}

/// A question on its way.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) order: Order,
    /// Whether the slot is just moving here, so that the server must be told to answer all the same.
    pub(super) asking: bool,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// Where to put questions for one connection.
pub(super) type Link = mpsc::Sender<Question>;

/// Asks what comes through `questions` on `connection`, until the node gives its links up.
pub(super) async fn serve(
    mut questions: mpsc::Receiver<Question>,
    mut connection: MultiplexedConnection,
    node: std::sync::Arc<Shared>,
) {
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while questions.recv_many(&mut batch, MAX_BATCH).await > 0 {
        // Who has stopped waiting was told that nothing is known; sent now it would charge for nothing.
        batch.retain(|question| !question.answer.is_closed());
        if batch.is_empty() {
            continue;
        }
        if questions.is_closed() {
            // The node was given up while these waited.
            settle_all(&mut batch, Fate::NotSent);
            continue;
        }
        let (pipeline, replies) = pack(&mut batch);
        let sent = connection.send_packed_commands(&pipeline, 0, replies).await;
        match sent {
            Ok(values) if values.len() == replies => {
                settle(&mut batch, values);
                node.note(Ended::Answered);
            }
            Err(error) if error.is_timeout() => {
                settle_all(&mut batch, Fate::Unknown);
                node.note(Ended::TooLate);
            }
            Ok(_) | Err(_) => {
                settle_all(&mut batch, Fate::Unknown);
                node.note(Ended::Lost);
            }
        }
    }
}

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Answered,
    TooLate,
    /// The connection is gone, or makes no sense any more.
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
        // Who has stopped waiting is not told, and what was done for him may have to be undone.
        if let (Err(Ok(late)), Some(unheard)) =
            (question.answer.send(answer), question.order.unheard)
        {
            (unheard.0)(late);
        }
    }
}

fn settle_all(batch: &mut Vec<Question>, fate: Fate) {
    for question in batch.drain(..) {
        let _ = question.answer.send(Err(fate));
    }
}
