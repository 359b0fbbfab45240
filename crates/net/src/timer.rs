//! A timer for deadlines that are often set and rarely reached.

use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    task::coop,
    time::{Instant, Sleep, sleep_until},
};

/// A timer whose deadline moves with every request.
///
/// Moving the deadline takes two stores. The runtime's timer is registered again only if it fires
/// before the deadline. For example, with a timeout of one minute, a connection that is busy for an
/// hour registers a timer about 60 times, regardless of its number of requests. While the same task
/// waits, the waker is also not registered again.
///
/// If the deadline moves to a time before the registered timer, the timer is registered again
/// immediately.
#[derive(Debug)]
pub struct LazyTimer {
    sleep: Pin<Box<Sleep>>,
    due: Instant,
    /// The waker registered with the runtime's timer.
    woken: Option<Waker>,
}

impl LazyTimer {
    /// Creates a timer that expires `after` from now. The timer belongs to the current async
    /// runtime.
    #[must_use]
    pub fn new(after: Duration) -> Self {
        let due = later(Instant::now(), after);
        Self {
            sleep: Box::pin(sleep_until(due)),
            due,
            woken: None,
        }
    }

    /// Moves the deadline to `after` from now.
    pub fn set(&mut self, after: Duration) {
        self.set_from(Instant::now(), after);
    }

    /// Moves the deadline to `after` from `now`, for a caller that has already read the clock.
    pub fn set_from(&mut self, now: Instant, after: Duration) {
        self.due = later(now, after);
        if self.due < self.sleep.deadline() {
            self.reset();
        }
    }

    /// Returns ready once the deadline has passed. Before that, returns pending and wakes the task
    /// at the deadline, or earlier if the deadline has moved.
    pub fn poll_due(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let is_known = |woken: &Waker| woken.will_wake(cx.waker());
        if self.woken.as_ref().is_some_and(is_known) && !self.sleep.is_elapsed() {
            return Poll::Pending;
        }
        while self.sleep.as_mut().poll(cx).is_ready() {
            if self.sleep.deadline() >= self.due {
                return Poll::Ready(());
            }
            self.reset();
        }
        // If the task has used up its cooperative budget, tokio's timer wakes the task immediately
        // and does not register the waker.
        self.woken = coop::has_budget_remaining().then(|| cx.waker().clone());
        Poll::Pending
    }

    /// Registers the runtime's timer for the deadline.
    fn reset(&mut self) {
        self.woken = None;
        self.sleep.as_mut().reset(self.due);
    }
}

/// Returns `now` plus `after`. `after` is capped at one year to avoid overflow; no sensible timeout
/// is longer.
fn later(now: Instant, after: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    now + after.min(YEAR)
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        task::Wake,
    };

    use super::*;

    async fn due(timer: &mut LazyTimer) {
        std::future::poll_fn(|cx| timer.poll_due(cx)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_can_move_later() {
        let start = Instant::now();
        let mut timer = LazyTimer::new(Duration::from_secs(10));
        tokio::time::advance(Duration::from_secs(7)).await;
        timer.set(Duration::from_secs(10));
        due(&mut timer).await;
        assert_eq!(start.elapsed().as_secs(), 17);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_can_move_earlier() {
        let start = Instant::now();
        let mut timer = LazyTimer::new(Duration::from_secs(3_600));
        timer.set(Duration::from_secs(2));
        due(&mut timer).await;
        assert_eq!(start.elapsed().as_secs(), 2);
        timer.set(Duration::MAX);
        timer.set(Duration::from_secs(1));
        due(&mut timer).await;
        assert_eq!(start.elapsed().as_secs(), 3);
    }

    /// A number of polls that exceeds tokio's cooperative budget for a task.
    const MORE_THAN_A_TURN: usize = 200;

    /// The task may have used any part of its budget before it polls the timer, so the test tries
    /// each amount. The test covers a new timer, and a timer that has fired before the deadline.
    #[tokio::test(start_paused = true)]
    async fn a_task_that_was_polled_is_still_woken() {
        for (done, fires_before) in
            (0..MORE_THAN_A_TURN).flat_map(|done| [(done, false), (done, true)])
        {
            let start = Instant::now();
            let mut timer = LazyTimer::new(Duration::from_secs(1));
            if fires_before {
                let registered = std::future::poll_fn(|cx| Poll::Ready(timer.poll_due(cx)));
                assert!(registered.await.is_pending());
                timer.set(Duration::from_secs(10));
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
            let mut done = 0..done;
            std::future::poll_fn(|cx| {
                while coop::has_budget_remaining() && done.next().is_some() {
                    let _ = pin!(coop::consume_budget()).poll(cx);
                }
                timer.poll_due(cx)
            })
            .await;
            let expected = if fires_before { 10 } else { 1 };
            assert_eq!(start.elapsed().as_secs(), expected);
        }
    }

    /// A waker that counts its wake-ups.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_waiting_task_is_woken() {
        let (first, last) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let mut timer = LazyTimer::new(Duration::from_secs(10));
        for waiting in [&first, &first, &last, &last] {
            let waker = Waker::from(Arc::clone(waiting));
            let polled = timer.poll_due(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
        }
        tokio::time::sleep(Duration::from_secs(11)).await;
        let woken = |by: &Woken| by.0.load(Ordering::Relaxed);
        assert_eq!((woken(&first), woken(&last)), (0, 1));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(timer.poll_due(&mut cx).is_ready());
    }
}
