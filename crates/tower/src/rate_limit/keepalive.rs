//! Renews the leases of concurrency slots.
//!
//! Leases expire, so that a crashed process does not keep its slots. The lease of a long request is
//! renewed after a third of the lease duration, which leaves time for two more attempts. One task
//! with one timer renews the leases of all requests of a layer. Completed requests cause no work
//! for the renewal task, so only requests that run longer than a third of their lease cost
//! processing time.
//!
//! The task runs on the tokio runtime of the first request with a lease, and ends when no requests
//! with leases are left. If the runtime shuts down earlier, the next request with a lease starts a
//! new task.

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

use super::receipt_guard::ChargeGuard;

/// The number of renewals per lease duration.
const TIMES_A_LEASE: u32 = 3;

/// The minimum interval between renewals of a slot, even if its lease is very short. The interval
/// equals the resolution of the timers.
const SHORTEST: Duration = Duration::from_millis(1);

/// The maximum number of concurrent renewals, for stores that have to wait.
const AT_ONCE: usize = 64;

/// The requests with leases in one layer and its clones.
#[derive(Default)]
pub(super) struct LeaseKeepalive {
    schedule: Mutex<Schedule>,
    /// Notifies the task that a renewal is due before its next wake-up time.
    sooner: Notify,
}

#[derive(Default)]
struct Schedule {
    holders: HashMap<u64, LeaseHolder>,
    /// The next renewal time of each request with leases, with the ID of the request.
    due: BTreeSet<(Instant, u64)>,
    numbers: u64,
    /// The time at which the task wakes up next; `None` if there is no task.
    wakes_at: Option<Instant>,
}

struct LeaseHolder {
    charges: Arc<dyn ChargeGuard>,
    due: Instant,
    every: Duration,
}

/// A guard for one request, whose leases are renewed until the guard is dropped.
pub(super) struct KeepaliveTicket {
    keepalive: Arc<LeaseKeepalive>,
    number: u64,
}

impl LeaseKeepalive {
    /// Starts to renew the leases of the concurrency slots in `charges`. The leases have the
    /// duration `lease`. Returns `None` if there is no tokio runtime, or if the time of the next
    /// renewal cannot be represented.
    pub(super) fn enter(
        self: &Arc<Self>,
        charges: Arc<dyn ChargeGuard>,
        lease: Span,
    ) -> Option<KeepaliveTicket> {
        let runtime = Handle::try_current().ok()?;
        let every = Duration::from_micros(lease.as_micros()) / TIMES_A_LEASE;
        let every = every.max(SHORTEST);
        let due = Instant::now().checked_add(every)?;
        let mut schedule = self.schedule();
        let number = schedule.numbers;
        schedule.numbers += 1;
        schedule.due.insert((due, number));
        schedule.holders.insert(
            number,
            LeaseHolder {
                charges,
                due,
                every,
            },
        );
        let begins = schedule.wakes_at.is_none();
        match schedule.wakes_at {
            None => schedule.wakes_at = Some(due),
            Some(wakes_at) if due < wakes_at => self.sooner.notify_one(),
            Some(_) => {}
        }
        drop(schedule);
        if begins {
            // A runtime that is shutting down drops the task before the task starts, possibly
            // during this call. `TaskGuard` handles a dropped task like any other end of the task.
            runtime.spawn(renew_all(TaskGuard(Some(Arc::clone(self)))));
        }
        let keepalive = Arc::clone(self);
        Some(KeepaliveTicket { keepalive, number })
    }

    /// Returns the time of the next renewal. Returns `None` if no request has leases. If no request
    /// has leases, the task ends.
    fn next(&self) -> Option<Instant> {
        let mut schedule = self.schedule();
        let next = schedule.due.first().map(|(due, _)| *due);
        schedule.wakes_at = next;
        next
    }

    /// Returns the charges whose renewal is due at `now`, each with the timeout of the renewal.
    /// Schedules the next renewals. Each timeout elapses before the next renewal of the same
    /// charges.
    fn due(&self, now: Instant) -> Vec<(Arc<dyn ChargeGuard>, Duration)> {
        let mut schedule = self.schedule();
        let mut due = Vec::new();
        while let Some(&(first, number)) = schedule.due.first()
            && first <= now
        {
            schedule.due.pop_first();
            let Some(holder) = schedule.holders.get_mut(&number) else {
                continue;
            };
            due.push((Arc::clone(&holder.charges), holder.every / 2));
            // The addition cannot overflow in practice, because `enter` has already checked the
            // same addition at an earlier time.
            holder.due = now + holder.every;
            let again = (holder.due, number);
            schedule.due.insert(again);
        }
        due
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeepaliveTicket {
    fn drop(&mut self) {
        let mut schedule = self.keepalive.schedule();
        let holder = schedule.holders.remove(&self.number);
        if let Some(holder) = &holder {
            schedule.due.remove(&(holder.due, self.number));
        }
        drop(schedule);
    }
}

/// A guard that the renewal task owns. The guard is dropped when the task ends, even if the task
/// never started. Dropping the guard allows a new task to start.
struct TaskGuard(Option<Arc<LeaseKeepalive>>);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if let Some(keepalive) = &self.0 {
            keepalive.schedule().wakes_at = None;
        }
    }
}

async fn renew_all(mut task: TaskGuard) {
    let Some(keepalive) = task.0.clone() else {
        return;
    };
    let mut renewing = JoinSet::new();
    while let Some(next) = keepalive.next() {
        let sooner = timeout_at(next, keepalive.sooner.notified()).await;
        if sooner.is_ok() {
            continue;
        }
        while renewing.try_join_next().is_some() {}
        for (charges, longest) in keepalive.due(Instant::now()) {
            if renewing.len() == AT_ONCE {
                renewing.join_next().await;
            }
            renewing.spawn(timeout(longest, charges.renew()));
        }
    }
    // Disarm the guard: `next` has already recorded the end of this task, and another task may have
    // started.
    task.0 = None;
    while renewing.join_next().await.is_some() {}
}
