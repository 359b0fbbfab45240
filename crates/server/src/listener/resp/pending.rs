//! Pending Redis decisions: the replies to a batch are held until all of its decisions are made.
//!
//! The memory store needs none of this. With Redis, all decisions of a batch are requested at once,
//! so that they share a pipeline, and nothing more is read from the client until they are made. A
//! transaction may need more than [`MAX_WAITING`] decisions. The excess waits here, so that no
//! single client can fill the queue to Redis.

use std::{fmt, pin::Pin, sync::Arc, task};

use futures_util::{StreamExt, stream};

use super::{
    bounds::MAX_WAITING,
    command::{LaterCheck, LaterReset, LaterThrottle},
    reply::{Protocol, Reply},
};
use crate::limiter::Limiter;

/// A command that needs a decision from Redis.
#[derive(Debug)]
pub(super) enum Later {
    Check(LaterCheck),
    Reset(LaterReset),
    Throttle(LaterThrottle),
}

/// A pending decision and the position of its reply.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) later: Later,
    pub(super) protocol: Protocol,
    /// The offset of the reply in the other replies; `None` if replies are off.
    pub(super) place: Option<usize>,
}

/// The replies to a batch, once all of its decisions are made.
pub(super) struct Deciding {
    answers: Pin<Box<dyn Future<Output = Vec<u8>>>>,
    /// The memory of the pending decisions, in bytes.
    pub(super) held: usize,
}

impl fmt::Debug for Deciding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Deciding")
    }
}

impl Later {
    fn heap_bytes(&self) -> usize {
        match self {
            Self::Check(check) => check.heap_bytes(),
            Self::Reset(reset) => reset.heap_bytes(),
            Self::Throttle(throttle) => throttle.heap_bytes(),
        }
    }
}

impl Waiting {
    /// Creates a pending decision whose reply belongs at the current end of `reply`.
    pub(super) fn new(later: Later, reply: &Reply<'_>) -> Self {
        Self {
            later,
            protocol: reply.protocol,
            place: Some(reply.out.len()),
        }
    }
}

impl Deciding {
    /// Starts the decisions in `waiting` and merges their replies into `output`.
    pub(super) fn new(limiter: Arc<Limiter>, waiting: Vec<Waiting>, output: Vec<u8>) -> Self {
        let decisions = waiting.iter().map(|one| one.later.heap_bytes());
        let held = waiting.capacity() * size_of::<Waiting>() + decisions.sum::<usize>();
        let answers = Box::pin(async move {
            let decisions = stream::iter(waiting).map(|one| answer(&limiter, one));
            let answers: Vec<_> = decisions.buffered(MAX_WAITING).collect().await;
            merge(&output, &answers)
        });
        Self { answers, held }
    }

    pub(super) fn poll(&mut self, cx: &mut task::Context<'_>) -> task::Poll<Vec<u8>> {
        self.answers.as_mut().poll(cx)
    }
}

async fn answer(limiter: &Limiter, waiting: Waiting) -> (Option<usize>, Vec<u8>) {
    let mut out = Vec::new();
    let mut reply = Reply {
        out: &mut out,
        protocol: waiting.protocol,
    };
    match waiting.later {
        Later::Check(check) => check.answer(limiter, &mut reply).await,
        Later::Reset(reset) => reset.answer(limiter, &mut reply).await,
        Later::Throttle(throttle) => throttle.answer(limiter, &mut reply).await,
    }
    (waiting.place, out)
}

/// Merges `answers`, which are sorted by their offset, into `output`.
fn merge(output: &[u8], answers: &[(Option<usize>, Vec<u8>)]) -> Vec<u8> {
    let bytes: usize = answers.iter().map(|(_, answer)| answer.len()).sum();
    let mut merged = Vec::with_capacity(output.len() + bytes);
    let mut written = 0;
    for (place, answer) in answers {
        if let Some(place) = place {
            merged.extend_from_slice(&output[written..*place]);
            merged.extend_from_slice(answer);
            written = *place;
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
        let answer = |place, text: &str| (place, text.as_bytes().to_vec());
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
