//! One connection: bytes in, bytes out, and never more of either than the bounds allow.
//!
//! Written as one `poll` function rather than as `async` code, because at one request per packet what the
//! runtime does around a request costs more than the request: here that is one `read`, one `write`, and
//! two looks at the clock.

#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::{
    bounds::{LINGER_BYTES, MAX_HELD_BYTES, READ_BYTES, SMALL_BYTES},
    desk::Desk,
    session::{Ending, Session},
    waiting::Deciding,
};
use crate::{
    limiter::Limiter,
    net::{Connection, LazyTimer},
};

/// How long a client that is being sent away may take to read why.
const LINGER: Duration = Duration::from_secs(1);

thread_local! {
    static WORKER: RefCell<Worker> = RefCell::default();
    /// How much all the connections of this worker hold.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// What the connections of a worker share, one at a time.
#[derive(Debug, Default)]
struct Worker {
    input: Vec<u8>,
    desk: Desk,
}

/// Serves one client until either side ends it.
pub(super) async fn serve<S>(
    session: Session,
    stream: S,
    connection: Connection,
    limiter: Arc<Limiter>,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut client = Client::new(session, stream, connection, limiter);
    // Registered once and for all: this future is a task of its own, whose waker stays the same.
    let shutdown = client.connection.shutdown.clone();
    let mut begun = std::pin::pin!(shutdown.begun());
    let mut registered = false;
    poll_fn(|cx| {
        if !registered {
            registered = true;
            // Whether it has begun is looked up where it matters.
            let _ = begun.as_mut().poll(cx);
        }
        WORKER.with_borrow_mut(|worker| client.poll(cx, worker))
    })
    .await;
    if client.session.ending == Ending::Broken {
        client.linger().await;
    }
}

#[derive(Debug)]
struct Client<S> {
    stream: S,
    connection: Connection,
    limiter: Arc<Limiter>,
    session: Session,
    /// The beginning of a command that has not arrived whole, or commands that wait for `unsent`.
    unread: Vec<u8>,
    /// Whether `unread` may hold whole commands.
    more: bool,
    /// The batch at hand, while Redis decides it.
    deciding: Option<Deciding>,
    /// Answers that the client has not taken.
    unsent: Vec<u8>,
    sent: usize,
    /// Whether the stream may hold back something that was written; TLS does.
    must_flush: bool,
    timer: LazyTimer,
    waiting: Option<Waiting>,
    /// Whether a whole command has come.
    has_asked: bool,
    held: usize,
}

/// What a connection waits for; each has its own bound in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// The next command.
    Command,
    /// The rest of a command.
    Rest,
    /// Room for answers.
    Room,
}

/// Why a connection ends.
#[derive(Debug)]
struct End;

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        tracing::debug!(%error, "a connection was lost");
        Self
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    fn new(session: Session, stream: S, connection: Connection, limiter: Arc<Limiter>) -> Self {
        Self {
            session,
            timer: LazyTimer::new(connection.bounds.request),
            stream,
            connection,
            limiter,
            unread: Vec::new(),
            more: false,
            deciding: None,
            unsent: Vec::new(),
            sent: 0,
            must_flush: false,
            waiting: None,
            has_asked: false,
            held: 0,
        }
    }

    /// Ready when the connection is to be closed.
    fn poll(&mut self, cx: &mut Context<'_>, worker: &mut Worker) -> Poll<()> {
        let mut answered = false;
        loop {
            match self.poll_step(cx, worker, answered) {
                Poll::Ready(Ok(Turn::Go)) => answered = true,
                Poll::Ready(Ok(Turn::Yield)) => {
                    // Others on this worker have waited for as long as a full batch takes.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(Err(End)) => return Poll::Ready(()),
                // The store keeps the time of what it decides.
                Poll::Pending if self.deciding.is_some() => return Poll::Pending,
                Poll::Pending => return self.poll_patience(cx),
            }
        }
    }

    /// Writes what is unsent, or else answers what has been decided or is unread, or else reads and answers.
    fn poll_step(
        &mut self,
        cx: &mut Context<'_>,
        worker: &mut Worker,
        answered: bool,
    ) -> Poll<Result<Turn, End>> {
        ready!(self.poll_flush(cx))?;
        if let Some(deciding) = &mut self.deciding {
            let mut output = ready!(deciding.poll(cx));
            self.deciding = None;
            self.send(cx, &mut output)?;
            self.account()?;
            return Poll::Ready(Ok(Turn::Go));
        }
        let shutdown = || self.connection.shutdown.has_begun();
        if self.session.ending != Ending::No || (answered && self.unread.is_empty() && shutdown()) {
            return Poll::Ready(Err(End));
        }
        if self.more {
            self.answer_unread(&mut worker.desk);
        } else {
            ready!(self.poll_read(cx, worker))?;
        }
        self.deciding = worker.desk.undecided(&self.limiter);
        self.send(cx, &mut worker.desk.output)?;
        self.account()?;
        Poll::Ready(Ok(if self.more { Turn::Yield } else { Turn::Go }))
    }

    /// Reads once and answers what is whole.
    fn poll_read(&mut self, cx: &mut Context<'_>, worker: &mut Worker) -> Poll<Result<(), End>> {
        let Worker { input, desk } = worker;
        input.resize(SMALL_BYTES + READ_BYTES, 0);
        // A small beginning is put before what is read. A large one is left where it is, and what is read
        // is put behind it: to move it with every byte that arrives would be quadratic.
        let small = self.unread.len() <= SMALL_BYTES;
        let start = if small { self.unread.len() } else { 0 };
        let mut buffer = ReadBuf::new(&mut input[start..start + READ_BYTES]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
        let end = start + buffer.filled().len();
        if end == start {
            return Poll::Ready(Err(End));
        }
        if small {
            input[..start].copy_from_slice(&self.unread);
            let batch = &input[..end];
            let progress = desk.answer(&self.limiter, &mut self.session, batch);
            self.unread.clear();
            self.unread.extend_from_slice(&batch[progress.used..]);
            self.note(progress);
        } else {
            self.unread.extend_from_slice(&input[..end]);
            self.answer_unread(desk);
        }
        Poll::Ready(Ok(()))
    }

    fn answer_unread(&mut self, desk: &mut Desk) {
        let progress = desk.answer(&self.limiter, &mut self.session, &self.unread);
        self.unread.drain(..progress.used);
        self.note(progress);
    }

    fn note(&mut self, progress: super::desk::Progress) {
        self.more = progress.more && !self.unread.is_empty();
        if progress.used > 0 {
            self.waiting = None;
            self.has_asked = true;
            self.connection.activity.note_request();
        }
    }

    /// Writes `output` as far as the client takes it now, and keeps the rest.
    fn send(&mut self, cx: &mut Context<'_>, output: &mut Vec<u8>) -> Result<(), End> {
        if output.is_empty() {
            return Ok(());
        }
        let sent = match Pin::new(&mut self.stream).poll_write(cx, output) {
            Poll::Ready(sent) => sent.inspect_err(|_| output.clear())?,
            Poll::Pending => 0,
        };
        self.must_flush = true;
        self.unsent.extend_from_slice(&output[sent..]);
        output.clear();
        Ok(())
    }

    /// Ready when nothing is unsent.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), End>> {
        while self.sent < self.unsent.len() {
            let sent =
                ready!(Pin::new(&mut self.stream).poll_write(cx, &self.unsent[self.sent..]))?;
            if sent == 0 {
                return Poll::Ready(Err(End));
            }
            self.sent += sent;
        }
        if self.sent > 0 {
            self.unsent = Vec::new();
            self.sent = 0;
            self.waiting = None;
        }
        if self.must_flush {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.must_flush = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Gives memory back, and ends a connection that would hold more than its worker has.
    fn account(&mut self) -> Result<(), End> {
        if self.unread.is_empty() && self.unread.capacity() > 0 {
            self.unread = Vec::new();
        }
        let deciding = self.deciding.as_ref().map_or(0, |deciding| deciding.held);
        let holds =
            self.unread.capacity() + self.unsent.capacity() + self.session.held() + deciding;
        if holds == self.held {
            return Ok(());
        }
        let total = HELD.get() - self.held + holds;
        HELD.set(total);
        self.held = holds;
        if total > MAX_HELD_BYTES && holds > SMALL_BYTES + READ_BYTES {
            tracing::warn!(peer = %self.connection.peer, "closed a connection: its worker holds too much for slow clients");
            return Err(End);
        }
        Ok(())
    }

    /// Ready when the client has kept us waiting for too long, or has nothing under way at a shutdown.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let waiting = self.waits_for();
        if self.waiting != Some(waiting) {
            self.waiting = Some(waiting);
            self.timer.set(self.patience(waiting));
        }
        if waiting == Waiting::Command && self.connection.shutdown.has_begun() {
            return Poll::Ready(());
        }
        self.timer.poll_due(cx)
    }

    fn waits_for(&self) -> Waiting {
        if !self.unsent.is_empty() || self.must_flush {
            Waiting::Room
        } else if self.unread.is_empty() {
            Waiting::Command
        } else {
            Waiting::Rest
        }
    }

    fn patience(&self, waiting: Waiting) -> Duration {
        let bounds = &self.connection.bounds;
        match waiting {
            // A client that has just connected came to ask: it gets no idle client's time.
            Waiting::Command if !self.has_asked => bounds.request,
            Waiting::Command => bounds.idle,
            Waiting::Rest => bounds.request,
            Waiting::Room => bounds.write,
        }
    }

    /// Closes in such a way that the client can read the last answer: a socket that is closed with
    /// something unread in it is reset, and the answer with it.
    async fn linger(mut self) {
        let stream = &mut self.stream;
        let drained = async {
            stream.shutdown().await?;
            tokio::io::copy(
                &mut stream.take(LINGER_BYTES as u64),
                &mut tokio::io::sink(),
            )
            .await
        };
        // Whether it worked or took too long, there is nothing more to be done for this client.
        let _ = tokio::time::timeout(LINGER, drained).await;
    }
}

impl<S> Drop for Client<S> {
    fn drop(&mut self) {
        HELD.set(HELD.get() - self.held);
    }
}

/// What to do after a step.
#[derive(Debug)]
enum Turn {
    Go,
    Yield,
}
