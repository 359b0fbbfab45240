//! A write timeout for HTTP/2 bodies whose receiver stops reading.
//!
//! hyper polls a body for its next frame only when the receiver's flow-control window is open,
//! however long that takes. A receiver can keep the window closed and still answer pings. The body
//! then holds its resources: an upstream connection, a concurrency permit.
//!
//! hyper offers no hook for this. So each body records in a note whether it waits to be polled. The
//! task that polls the body is the task of its stream; [`watched`] wraps that task, and looks at
//! the note after each poll.

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

use crate::net::LazyTimer;

thread_local! {
    /// The note of the body that was created or polled last on this thread. Right after a stream's
    /// task was polled, it is the note of that stream's body.
    static NOTED: RefCell<Option<Arc<Note>>> = const { RefCell::new(None) };
}

/// Whether a body waits to be polled, and how many waits it has begun. The fields are atomic only
/// because hyper requires `Send` requests.
#[derive(Debug, Default)]
struct Note {
    is_waiting: AtomicBool,
    /// Whether the rest of the body is unwanted.
    is_unwanted: AtomicBool,
    times: AtomicU64,
}

impl Note {
    fn wait(self: &Arc<Self>) {
        self.is_waiting.store(true, Ordering::Relaxed);
        self.times.fetch_add(1, Ordering::Relaxed);
        NOTED.set(Some(Arc::clone(self)));
    }

    fn wait_no_more(&self) {
        self.is_waiting.store(false, Ordering::Relaxed);
    }
}

/// A body that records whether it waits for its receiver.
#[derive(Debug)]
pub(super) struct Taken<B> {
    body: B,
    waiting: Waiting,
}

/// Resets the stream of a body whose rest is unwanted, the next time its task is polled.
#[derive(Clone, Debug)]
pub(super) struct Stop(Arc<Note>);

impl Stop {
    pub(super) fn stop(&self) {
        self.0.is_unwanted.store(true, Ordering::Relaxed);
    }
}

/// A body's note. Dropping it ends the wait.
#[derive(Debug, Default)]
struct Waiting(Arc<Note>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.wait_no_more();
    }
}

impl<B> Taken<B> {
    /// Wraps `body`. The wait for the receiver begins with the first frame.
    pub(super) fn new(body: B) -> Self {
        Self {
            body,
            waiting: Waiting::default(),
        }
    }

    /// Wraps `body`, with the wait beginning now. To be called in the task of the body's stream.
    pub(super) fn from_now(body: B) -> Self {
        let taken = Self::new(body);
        taken.waiting.0.wait();
        taken
    }

    pub(super) const fn inner(&self) -> &B {
        &self.body
    }

    /// Returns the handle that resets the stream before the receiver has read everything.
    pub(super) fn stop(&self) -> Stop {
        Stop(Arc::clone(&self.waiting.0))
    }

    pub(super) fn into_inner(self) -> B {
        self.body
    }
}

impl<B: Body + Unpin> Body for Taken<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.waiting.0.wait_no_more();
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = frame {
            self.waiting.0.wait();
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

/// An executor that runs hyper's stream tasks on the connection's thread, each one [`watched`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams(pub(super) Duration);

impl<F> Executor<F> for Streams
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, stream: F) {
        drop(tokio::task::spawn_local(watched(stream, self.0)));
    }
}

/// Runs `stream`, and drops it, which resets the stream, once its [`Taken`] body has waited for
/// more than `longest`. A poll of the body just before this call counts too: hyper's client polls a
/// body once before it spawns a task for it.
pub(super) fn watched(
    stream: impl Future<Output = ()>,
    longest: Duration,
) -> impl Future<Output = ()> {
    let mut note = NOTED.take();
    async move {
        let mut stream = pin!(stream);
        let mut timer: Option<LazyTimer> = None;
        let mut seen = 0;
        poll_fn(|cx| {
            // Forget the body of another stream that ran before on this thread.
            NOTED.take();
            if stream.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            // If this poll did not reach the body, its previous note still holds.
            note = NOTED.take().or_else(|| note.take());
            let is_unwanted = |note: &Arc<Note>| note.is_unwanted.load(Ordering::Relaxed);
            if note.as_ref().is_some_and(is_unwanted) {
                return Poll::Ready(());
            }
            let waiting = |note: &&Arc<Note>| note.is_waiting.load(Ordering::Relaxed);
            let Some(note) = note.as_ref().filter(waiting) else {
                return Poll::Pending;
            };
            let timer = timer.get_or_insert_with(|| LazyTimer::new(longest));
            let times = note.times.load(Ordering::Relaxed);
            if seen != times {
                seen = times;
                timer.set(longest);
            }
            timer.poll_due(cx)
        })
        .await;
    }
}
