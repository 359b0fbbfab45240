//! Who holds places, and when their leases are to be renewed.
//!
//! A lease ends by itself, so that a process that dies leaves nobody's place taken. Whoever is at work for longer than that holds its
//! place by renewing it, when a third of the lease has passed: two more tries are left then. One task does that for all requests of a
//! layer, with one timer. It looks at none that has ended, and only those cost it anything that last for longer than a third of their
//! lease. It runs where the first of them came from, and ends when there are none; should that runtime end before, the next
//! request that holds a place begins another.

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

use super::held::Hold;

/// How often a place could be renewed within its lease.
const TIMES_A_LEASE: u32 = 3;

/// No place is renewed more often than this, however short its lease is: timers are no finer.
const SHORTEST: Duration = Duration::from_millis(1);

/// How many are renewed at a time where the store has to be waited for.
const AT_ONCE: usize = 64;

/// Everything that holds places, of one layer and its clones.
#[derive(Default)]
pub(super) struct Renewals {
    line: Mutex<Line>,
    /// Somebody is due before the task would look again.
    sooner: Notify,
}

#[derive(Default)]
struct Line {
    holders: HashMap<u64, Holder>,
    /// When each of them is due, and its number.
    due: BTreeSet<(Instant, u64)>,
    numbers: u64,
    /// When the task looks again, if there is one.
    looks_at: Option<Instant>,
}

struct Holder {
    held: Arc<dyn Hold>,
    due: Instant,
    every: Duration,
}

/// As long as this is there, the places of one request are renewed.
pub(super) struct Ticket {
    renewals: Arc<Renewals>,
    number: u64,
}

impl Renewals {
    /// Renews the places of `held`, whose lease is so long. `None` where there is no runtime to do so on, or the lease is longer than any
    /// clock shows.
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
            // A runtime that is about to end drops the task before it has begun, maybe here, and that is known like any other end.
            runtime.spawn(renew_all(AtWork(Some(Arc::clone(self)))));
        }
        let renewals = Arc::clone(self);
        Some(Ticket { renewals, number })
    }

    /// When somebody is due next; where nobody is there any more, the task is to end.
    fn next(&self) -> Option<Instant> {
        let mut line = self.line();
        let next = line.due.first().map(|(due, _)| *due);
        line.looks_at = next;
        next
    }

    /// Those that are due by `now`, who are due again later, and how long each renewal may take: it has ended before the next.
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
            // What a clock shows now and a third of a lease later it has shown before.
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

/// The task, in whatever way it ends, before it has begun too: another may begin.
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
    // It is known to have ended already, and another may have begun.
    at_work.0 = None;
    while renewing.join_next().await.is_some() {}
}
