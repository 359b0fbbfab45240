//! Answers over HTTP/2 that their client does not take are given up in time.
//!
//! hyper asks a body for its next piece when the client has room for it, however long that takes. Meanwhile the client answers pings, and the
//! body keeps what it holds: a connection to an upstream, a place. So each body notes whether it waits to be asked, and the task of its stream,
//! in which it is asked, looks at that note whenever it has run.

use std::{
    cell::{Cell, RefCell},
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
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
    static NOTED: RefCell<Option<Rc<Note>>> = const { RefCell::new(None) };
}

/// Whether a body waits to be asked, and how often it has begun to.
#[derive(Debug, Default)]
struct Note {
    is_waiting: Cell<bool>,
    times: Cell<u64>,
}

impl Note {
    fn wait(self: &Rc<Self>) {
        self.is_waiting.set(true);
        self.times.set(self.times.get() + 1);
        NOTED.set(Some(Rc::clone(self)));
    }
}

/// The body of an answer, which knows whether it waits for its client.
#[derive(Debug)]
pub(super) struct Taken<B> {
    body: B,
    note: Rc<Note>,
}

impl<B> Taken<B> {
    /// `body`, from now on to be taken. To be made in the task of its stream.
    pub(super) fn new(body: B) -> Self {
        let note = Rc::new(Note::default());
        note.wait();
        Self { body, note }
    }
}

impl<B> Drop for Taken<B> {
    fn drop(&mut self) {
        self.note.is_waiting.set(false);
    }
}

impl<B: Body + Unpin> Body for Taken<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.note.is_waiting.set(false);
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = frame {
            self.note.wait();
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

/// Runs streams on the thread of their connection, and drops, and so resets, those whose [`Taken`] body waits for longer than this.
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

async fn watched(stream: impl Future<Output = ()>, longest: Duration) {
    let mut stream = pin!(stream);
    let mut note: Option<Rc<Note>> = None;
    let mut timer: Option<LazyTimer> = None;
    let mut seen = 0;
    poll_fn(|cx| {
        NOTED.take();
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        note = NOTED.take().or_else(|| note.take());
        let Some(note) = note.as_ref().filter(|note| note.is_waiting.get()) else {
            return Poll::Pending;
        };
        let timer = timer.get_or_insert_with(|| LazyTimer::new(longest));
        if seen != note.times.get() {
            seen = note.times.get();
            timer.set(longest);
        }
        timer.poll_due(cx)
    })
    .await;
}
