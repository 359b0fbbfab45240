//! Timers for waiting requests, in a task or in a thread.

use std::{
    cell::Cell,
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Wake},
    thread::{self, Thread},
};

use tidegate_core::Timestamp;

use crate::Clock;

/// A timer that sleeps until an instant.
pub(crate) trait Timer {
    type Sleep: Future<Output = ()>;

    /// Sleeps until `clock` reaches `until`, or slightly longer.
    fn sleep_until(&self, until: Timestamp, clock: &Clock) -> Self::Sleep;
}

/// The timer of the tokio runtime that polls the future.
#[cfg(feature = "tokio")]
pub(crate) struct TokioTimer;

#[cfg(feature = "tokio")]
impl Timer for TokioTimer {
    type Sleep = tokio::time::Sleep;

    fn sleep_until(&self, until: Timestamp, clock: &Clock) -> Self::Sleep {
        tokio::time::sleep(until.since(clock.now()).into())
    }
}

/// A timer for [`block_on`]: the thread is parked until the next instant.
#[derive(Clone, Default)]
pub(crate) struct ThreadTimer {
    /// The earliest wake-up time that the future has requested in its latest poll.
    next: Rc<Cell<Option<Timestamp>>>,
}

pub(crate) struct ThreadSleep {
    timer: ThreadTimer,
    clock: Clock,
    until: Timestamp,
}

impl Timer for ThreadTimer {
    type Sleep = ThreadSleep;

    fn sleep_until(&self, until: Timestamp, clock: &Clock) -> ThreadSleep {
        ThreadSleep {
            timer: self.clone(),
            clock: clock.clone(),
            until,
        }
    }
}

impl Future for ThreadSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<()> {
        let (timer, until) = (&self.timer, self.until);
        if self.clock.now() >= until {
            return Poll::Ready(());
        }
        let next = timer.next.get().map_or(until, |next| next.min(until));
        timer.next.set(Some(next));
        Poll::Pending
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks the thread until the future that `start` returns is ready. The future may wait only for
/// the timer that is passed to `start`, or for another thread to call its waker.
pub(crate) fn block_on<T>(clock: &Clock, start: impl AsyncFnOnce(&ThreadTimer) -> T) -> T {
    let timer = ThreadTimer::default();
    let mut future = pin!(start(&timer));
    let waker = Arc::new(Unpark(thread::current())).into();
    loop {
        timer.next.set(None);
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        // If the waker was called before this line, `park` returns immediately.
        match timer.next.get() {
            Some(next) => thread::park_timeout(next.since(clock.now()).into()),
            None => thread::park(),
        }
    }
}
