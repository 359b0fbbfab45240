//! Renews the leases of concurrency slots.
//!
//! Leases expire, so that a crashed process does not keep its slots. A request that runs longer
//! renews its lease after a third of it, which leaves time for two more attempts. One task with one
//! timer does that for all requests of a layer. It does not look at requests that have ended, so
//! only requests that run longer than a third of their lease cost anything. The task runs on the
//! runtime of the first such request, and ends when there are none left. If that runtime ends
//! earlier, the next request with a slot starts a new task.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tidegate_core::Span;
use tokio::{
    runtime::Handle,
    sync::Notify,
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};

use super::receipt_guard::Hold;

/// How many renewals fit into a lease.
const TIMES_A_LEASE: u32 = 3;

/// The minimum interval between renewals of a slot, however short its lease is. Timers are not more
/// precise.
const SHORTEST: Duration = Duration::from_millis(1);

/// The maximum number of concurrent renewals, if the store has to be waited for.
const AT_ONCE: usize = 64;

/// All requests with leases of one layer and its clones.
#[derive(Default)]
pub(super) struct Renewals {
    line: Mutex<Line>,
    /// Notified when a renewal is due before the task would wake up.
    sooner: Notify,
}

#[derive(Default)]
struct Line {
    holders: HashMap<u64, Holder>,
    /// The time of the next renewal of each holder, with its number.
    due: BTreeSet<(Instant, u64)>,
    numbers: u64,
    /// When the task wakes up next, if there is one.
    looks_at: Option<Instant>,
}

struct Holder {
    held: Arc<dyn Hold>,
    due: Instant,
    every: Duration,
}

/// Keeps the leases of one request renewed until it is dropped.
pub(super) struct Ticket {
    renewals: Arc<Renewals>,
    number: u64,
}

impl Renewals {
    /// Starts to renew the slots of `held`, which have this `lease`. Returns `None` if there is no
    /// runtime for it, or if the time of the next renewal cannot be represented.
    pub(super) fn enter(self: &Arc<Self>, held: Arc<dyn Hold>, lease: Span) -> Option<Ticket> {
        let runtime = Handle::try_current().ok()?;
        let every = Duration::from_micros(lease.as_micros()) / TIMES_A_LEASE;
        let every = every.max(SHORTEST);
        let due = Instant::now().checked_add(every)?;
        let mut line = self.line();
        let number = line.numbers;
        line.numbers += 1;
        line.due.insert((due, number));
        line.holders.insert(number, Holder { held, due, every });
        let begins = line.looks_at.is_none();
        match line.looks_at {
            None => line.looks_at = Some(due),
            Some(looks_at) if due < looks_at => self.sooner.notify_one(),
            Some(_) => {}
        }
        drop(line);
        if begins {
            // If the runtime is shutting down, it drops the task before it starts, maybe in this
            // call. `AtWork` handles that like any other end.
            runtime.spawn(renew_all(AtWork(Some(Arc::clone(self)))));
        }
        let renewals = Arc::clone(self);
        Some(Ticket { renewals, number })
    }

    /// Returns when the next renewal is due. `None` if there are no holders, so that the task ends.
    fn next(&self) -> Option<Instant> {
        let mut line = self.line();
        let next = line.due.first().map(|(due, _)| *due);
        line.looks_at = next;
        next
    }

    /// Returns the holders that are due by `now`, each with the timeout of its renewal, and
    /// schedules their next renewals. The timeout ends before the next renewal.
    fn due(&self, now: Instant) -> Vec<(Arc<dyn Hold>, Duration)> {
        let mut line = self.line();
        let mut due = Vec::new();
        while let Some(&(first, number)) = line.due.first()
            && first <= now
        {
            line.due.pop_first();
            let Some(holder) = line.holders.get_mut(&number) else {
                continue;
            };
            due.push((Arc::clone(&holder.held), holder.every / 2));
            // `enter` has checked this sum for an earlier instant, so it does not overflow.
            holder.due = now + holder.every;
            let again = (holder.due, number);
            line.due.insert(again);
        }
        due
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut line = self.renewals.line();
        let left = line.holders.remove(&self.number);
        if let Some(holder) = &left {
            line.due.remove(&(holder.due, self.number));
        }
        drop(line);
    }
}

/// A guard of the renewal task. However the task ends, even before it starts, dropping it allows a
/// new task to start.
struct AtWork(Option<Arc<Renewals>>);

impl Drop for AtWork {
    fn drop(&mut self) {
        if let Some(renewals) = &self.0 {
            renewals.line().looks_at = None;
        }
    }
}

async fn renew_all(mut at_work: AtWork) {
    let Some(renewals) = at_work.0.clone() else {
        return;
    };
    let mut renewing = JoinSet::new();
    while let Some(next) = renewals.next() {
        let sooner = timeout_at(next, renewals.sooner.notified()).await;
        if sooner.is_ok() {
            continue;
        }
        while renewing.try_join_next().is_some() {}
        for (held, longest) in renewals.due(Instant::now()) {
            if renewing.len() == AT_ONCE {
                renewing.join_next().await;
            }
            renewing.spawn(timeout(longest, held.renew()));
        }
    }
    // `next` has already recorded the end of this task, and another one may have started.
    at_work.0 = None;
    while renewing.join_next().await.is_some() {}
}
