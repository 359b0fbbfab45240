//! Pending decisions. The replies to a batch are held back until all decisions in the batch are
//! made.
//!
//! With Redis, all decisions in a batch are requested at the same time, so that they share a
//! pipeline. No more commands are read from the client until all of these decisions are made. With
//! the memory store, decisions are made immediately. With either store, a request waiting for a
//! concurrency slot is pending. If the client disconnects during the wait, the batch is dropped. A
//! transaction may need more than [`MAX_WAITING`] decisions. The excess decisions wait in this
//! module, so that a single client cannot fill the queue of requests to Redis.

use std::{fmt, pin::Pin, sync::Arc, task};

use futures_util::{StreamExt, stream};
use tidegate::rate_limiter::CancelSignal;
use tidegate_limiter::{ServerLimiter, metrics::ListenerKind, trace};
use tidegate_net::InFlight;
use tracing::Instrument as _;

use super::{
    bounds::MAX_WAITING,
    command::{PendingCommand, PendingReply},
    reply::Reply,
};

/// The replies to a batch. The replies are complete once all decisions in the batch are made.
pub(super) struct PendingBatch {
    answers: Pin<Box<dyn Future<Output = Vec<u8>>>>,
    /// The memory that the pending decisions use, in bytes.
    pub(super) heap_bytes: usize,
    /// Whether any request in the batch can wait for a concurrency slot.
    pub(super) can_wait: bool,
    /// The signals that cancel the waiting requests in the batch.
    signals: Vec<Arc<CancelSignal>>,
    /// Marks the connection as in use while a request is waiting. If the connection were not
    /// marked, the idle timeout could close it.
    in_flight: Option<InFlight>,
}

impl fmt::Debug for PendingBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingBatch")
    }
}

impl PendingBatch {
    /// Starts the decisions in `pending` and merges their replies into `output`.
    pub(super) fn new(
        limiter: Arc<ServerLimiter>,
        pending: Vec<PendingReply>,
        output: Vec<u8>,
    ) -> Self {
        let decisions = pending.iter().map(|one| one.command.heap_bytes());
        let heap_bytes = pending.capacity() * size_of::<PendingReply>() + decisions.sum::<usize>();
        let can_wait = pending.iter().any(|one| one.command.can_wait());
        let signals = pending.iter().filter_map(|one| one.command.signal());
        let signals = signals.cloned().collect();
        let answers = Box::pin(async move {
            let decisions = stream::iter(pending).map(|one| answer(&limiter, one));
            let answers: Vec<_> = decisions.buffered(MAX_WAITING).collect().await;
            merge(&output, &answers)
        });
        Self {
            answers,
            heap_bytes,
            can_wait,
            signals,
            in_flight: None,
        }
    }

    /// Keeps `in_flight` until the replies to the batch are complete.
    pub(super) fn hold(&mut self, in_flight: InFlight) {
        self.in_flight = Some(in_flight);
    }

    /// Cancels the waiting requests. Returns true if one of these requests has a store call in
    /// progress; the batch must then not be dropped yet.
    pub(super) fn cancel(&self) -> bool {
        let calling = self.signals.iter().filter(|signal| signal.cancel());
        calling.count() > 0
    }

    pub(super) fn poll(&mut self, cx: &mut task::Context<'_>) -> task::Poll<Vec<u8>> {
        self.answers.as_mut().poll(cx)
    }
}

async fn answer(limiter: &Arc<ServerLimiter>, pending: PendingReply) -> (Option<usize>, Vec<u8>) {
    let mut out = Vec::new();
    let mut reply = Reply {
        out: &mut out,
        protocol: pending.protocol,
    };
    // The wait for Redis is traced as a child span of the decision's span.
    let span = || trace::command_span(ListenerKind::Resp);
    match pending.command {
        PendingCommand::Check(check) => {
            let answer = check.answer(limiter, &mut reply);
            answer.instrument(span()).await;
        }
        PendingCommand::Reservation(command) => {
            let answer = command.answer(limiter, &mut reply);
            answer.instrument(span()).await;
        }
        PendingCommand::Reset(reset) => reset.answer(limiter, &mut reply).await,
        PendingCommand::Throttle(throttle) => {
            let answer = throttle.answer(limiter, &mut reply);
            answer.instrument(span()).await;
        }
        PendingCommand::Top(top) => top.answer(limiter, &mut reply).await,
    }
    (pending.offset, out)
}

/// Merges `answers`, which are sorted by their offset, into `output`.
fn merge(output: &[u8], answers: &[(Option<usize>, Vec<u8>)]) -> Vec<u8> {
    let bytes: usize = answers.iter().map(|(_, answer)| answer.len()).sum();
    let mut merged = Vec::with_capacity(output.len() + bytes);
    let mut written = 0;
    for (offset, answer) in answers {
        if let Some(offset) = offset {
            merged.extend_from_slice(&output[written..*offset]);
            merged.extend_from_slice(answer);
            written = *offset;
        }
    }
    merged.extend_from_slice(&output[written..]);
    merged
}

#[cfg(test)]
mod tests {
    use super::merge;

    #[test]
    fn replies_are_in_the_order_of_their_commands() {
        let answer = |offset, text: &str| (offset, text.as_bytes().to_vec());
        let answers = [
            answer(Some(0), "a"),
            answer(Some(2), "b"),
            answer(None, "muted"),
            answer(Some(2), "c"),
            answer(Some(4), "d"),
        ];
        assert_eq!(merge(b"1234", &answers), b"a12bc34d");
        assert_eq!(merge(b"1234", &[]), b"1234");
    }
}
