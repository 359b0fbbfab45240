//! Bodies over HTTP/2 that the other side does not take are given up in time.
//!
//! hyper asks a body for its next piece when the other side has room for it, however long that takes. Meanwhile that side answers pings, and
//! the body keeps what it holds: a connection to an upstream, a place. So each body notes whether it waits to be asked, and the task of its stream,
//! in which it is asked, looks at that note whenever it has run.

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
    /// The note of the body that was made or asked last: after a stream's task has run, that of its body.
    static NOTED: RefCell<Option<Arc<Note>>> = const { RefCell::new(None) };
}

/// Whether a body waits to be asked, and how often it has begun to. Atomic only because hyper wants requests that may change threads.
#[derive(Debug, Default)]
struct Note {
    is_waiting: AtomicBool,
    /// Whether nobody wants the rest of the body.
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

/// A body that knows whether it waits for who is to take it.
#[derive(Debug)]
pub(super) struct Taken<B> {
    body: B,
    waiting: Waiting,
}

/// Ends the stream of a body of which nobody wants the rest, once its task runs.
#[derive(Clone, Debug)]
pub(super) struct Stop(Arc<Note>);

impl Stop {
    pub(super) fn stop(&self) {
        self.0.is_unwanted.store(true, Ordering::Relaxed);
    }
}

/// A body's note, which is true no more when the body is gone.
#[derive(Debug, Default)]
struct Waiting(Arc<Note>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.wait_no_more();
    }
}

impl<B> Taken<B> {
    /// `body`, to be taken from when it is first asked.
    pub(super) fn new(body: B) -> Self {
        Self {
            body,
            waiting: Waiting::default(),
        }
    }

    /// `body`, to be taken from now on. To be made in the task of its stream.
    pub(super) fn from_now(body: B) -> Self {
        let taken = Self::new(body);
        taken.waiting.0.wait();
        taken
    }

    pub(super) const fn inner(&self) -> &B {
        &self.body
    }

    /// What ends its stream before the other side has taken all.
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

/// Runs streams on the thread of their connection, [`watched`].
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

/// Runs `stream`, and drops, and so resets it, when its [`Taken`] body waits for longer than `longest`. What was asked of that body
/// in this task so far counts: hyper's client asks once before it gives a body a task of its own.
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
            NOTED.take();
            if stream.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
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
