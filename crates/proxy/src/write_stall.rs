//! A write timeout for HTTP/2 bodies. The timeout expires if the receiver stops reading.
//!
//! hyper polls a body for its next frame only after h2 has accepted the previous frame, which h2
//! does only while the receiver's flow-control window is open. hyper has no timeout for this wait.
//! A receiver can keep the window closed while it still replies to pings. While the window is
//! closed, the body holds an upstream connection and a concurrency permit.
//!
//! hyper offers no hook for a timeout. Therefore, each body records whether it is waiting to be
//! polled. The body is polled by its stream's task. [`with_write_timeout`] wraps the stream's task,
//! and checks the body's state after each poll of the task.

use std::{
    cell::RefCell,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    body::{Body, Frame, SizeHint},
    rt::Executor,
};
use tidegate_net::LazyTimer;

thread_local! {
    /// The state of the body that was created or polled most recently on this thread. Immediately
    /// after a stream's task was polled, the value is the state of that stream's body.
    static LAST_POLLED: RefCell<Option<Arc<BodyPollState>>> = const { RefCell::new(None) };
}

/// The state of a body: whether the body is waiting to be polled, and how many waits have begun.
/// The fields are atomic only because hyper requires requests to be `Send`.
#[derive(Debug, Default)]
struct BodyPollState {
    is_waiting: AtomicBool,
    /// Whether the rest of the body is no longer needed.
    is_cancelled: AtomicBool,
    waits: AtomicU64,
}

impl BodyPollState {
    fn wait(self: &Arc<Self>) {
        self.is_waiting.store(true, Ordering::Relaxed);
        self.waits.fetch_add(1, Ordering::Relaxed);
        LAST_POLLED.set(Some(Arc::clone(self)));
    }

    fn end_wait(&self) {
        self.is_waiting.store(false, Ordering::Relaxed);
    }
}

/// A body that records whether it is waiting for its receiver.
#[derive(Debug)]
pub(crate) struct WatchedBody<B> {
    body: B,
    wait: PollWait,
}

/// A handle that can reset a body's stream if the rest of the body is no longer needed. The reset
/// happens when the stream's task is next polled.
#[derive(Clone, Debug)]
pub(crate) struct StreamReset(Arc<BodyPollState>);

impl StreamReset {
    pub(crate) fn reset(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }
}

/// The state of a body. Dropping this value ends the wait.
#[derive(Debug, Default)]
struct PollWait(Arc<BodyPollState>);

impl Drop for PollWait {
    fn drop(&mut self) {
        self.0.end_wait();
    }
}

impl<B> WatchedBody<B> {
    /// Wraps `body`. The wait for the receiver begins with the first frame.
    pub(crate) fn new(body: B) -> Self {
        Self {
            body,
            wait: PollWait::default(),
        }
    }

    /// Wraps `body`. The receiver's time to accept data is measured from this call on. Call this
    /// function in the task of the body's stream.
    pub(crate) fn waiting_from_now(body: B) -> Self {
        let watched_body = Self::new(body);
        watched_body.wait.0.wait();
        watched_body
    }

    pub(crate) const fn inner(&self) -> &B {
        &self.body
    }

    /// Returns a handle that can reset the stream before the receiver has read the whole body.
    pub(crate) fn reset_handle(&self) -> StreamReset {
        StreamReset(Arc::clone(&self.wait.0))
    }

    pub(crate) fn into_inner(self) -> B {
        self.body
    }
}

impl<B: Body + Unpin> Body for WatchedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.wait.0.end_wait();
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = frame {
            self.wait.0.wait();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An executor that runs hyper's stream tasks on the connection's thread, each wrapped in
/// [`with_write_timeout`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamExecutor(pub(crate) Duration);

impl<F> Executor<F> for StreamExecutor
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, stream: F) {
        drop(tokio::task::spawn_local(with_write_timeout(stream, self.0)));
    }
}

/// Runs the stream task `stream`. If the [`WatchedBody`] of the stream has waited for more than
/// `timeout`, drops the task, which resets the stream.
///
/// The wait may have begun just before this call, because hyper's client polls a body once before
/// it spawns a task for the body.
pub(crate) fn with_write_timeout(
    stream: impl Future<Output = ()>,
    timeout: Duration,
) -> impl Future<Output = ()> {
    let mut state = LAST_POLLED.take();
    async move {
        let mut stream = pin!(stream);
        let mut timer: Option<LazyTimer> = None;
        let mut seen_waits = 0;
        poll_fn(|cx| {
            // Clear the state that another stream's task has left behind on this thread.
            LAST_POLLED.take();
            if stream.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            // If this poll did not poll the body, keep the state from the previous poll.
            state = LAST_POLLED.take().or_else(|| state.take());
            let is_cancelled =
                |state: &Arc<BodyPollState>| state.is_cancelled.load(Ordering::Relaxed);
            if state.as_ref().is_some_and(is_cancelled) {
                return Poll::Ready(());
            }
            let is_waiting = |state: &&Arc<BodyPollState>| state.is_waiting.load(Ordering::Relaxed);
            let Some(state) = state.as_ref().filter(is_waiting) else {
                return Poll::Pending;
            };
            let timer = timer.get_or_insert_with(|| LazyTimer::new(timeout));
            let waits = state.waits.load(Ordering::Relaxed);
            if seen_waits != waits {
                seen_waits = waits;
                timer.set(timeout);
            }
            timer.poll_due(cx)
        })
        .await;
    }
}
