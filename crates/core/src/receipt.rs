//! Receipts: where a charge is in the state of its key, so that it can be given back, and nothing of anybody else's.
//!
//! Whoever gives units back without one can mint them: a bucket that has drained since has nothing left to return. What a
//! receipt gives back was charged by its owner and is still there.
//!
//! ```text
//!   reserve ──▶ admitted, and a receipt ──▶ the request runs ──▶ settle: its leases end, and what it did not
//!                                                                need comes back
//! ```
//!
//! - **Windows, buckets, logs.** The units are taken out where they were counted, if they still are.
//! - **Schedules.** A schedule is time that passes, and part of a charge may have passed with it. Let it be a queue of work that is
//!   served in the order of arrival: what may be taken out is the part of the charge that is not served. That is at least
//!   `cost - (now - then)`, because no more can have been served meanwhile; and at least
//!   `min(cost, arrival after the charge - given back by others since - now)`, because it lies right before that place, which
//!   moves forward by what others before it take out and by nothing else; whoever is last in line moves nobody. The larger of
//!   the two is taken. Of a queue that delays, only the last in line can leave: who came later has been told when he starts.
//! - **Tokens by the interval.** What the refills since then may have brought of the charge has come back already.
//! - **Places.** Who holds one for longer than its lease renews it meanwhile: it is held from that instant on, as if it had just been
//!   taken. A place that is not there any more, because its holder was late or the store has lost it, is taken again if one is free,
//!   and else lost: as many as may be hold one, and he is not among them. One that is still there needs no room.
//!
//! A receipt that is dropped gives nothing back, which is safe: the charge stays, and leases end by themselves.

use crate::{kernel::Mark, time::Timestamp};

/// What a decision charged, and where.
///
/// It is good once, for the charges that it came with, in the store that wrote it.
#[derive(Debug, Default)]
pub struct Receipt {
    pub(crate) charged: Vec<Option<Charged>>,
}

impl Receipt {
    /// Whether there is nothing to give back: nothing was charged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charged.iter().all(Option::is_none)
    }
}

/// What becomes of one charge once its request has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// How many units of its cost come back, at most the cost; 0 leaves it charged. Leases end either way.
    pub unused: u64,
}

/// What became of the places of a receipt when they were to be renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// All are held from now on.
    Held,
    /// One was not held any more, and others have it: its lease was over, or the store had lost it.
    Lost,
    /// The store could not be asked, nobody knows, or there is no room to take one again. They are held as long as they were, and may be
    /// renewed later.
    Unknown,
}

impl Renewal {
    /// Whether all places `are_held`.
    pub(crate) fn of(are_held: bool) -> Self {
        if are_held { Self::Held } else { Self::Lost }
    }

    /// Of these places, and of those whose renewal ended so: what is lost is known to be.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Lost, _) | (_, Self::Lost) => Self::Lost,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Held, Self::Held) => Self::Held,
        }
    }
}

/// Where one charge is.
#[derive(Clone, Debug)]
pub(crate) struct Charged {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    /// Of the limits.
    pub(crate) fingerprint: u32,
    /// Where it is in the state of each kernel; nowhere in those that count what is denied as well.
    pub(crate) marks: Box<[Option<Mark>]>,
    /// By how much what is last in each had ever been moved up by what others gave back, by the ledger.
    pub(crate) given: Box<[u64]>,
}

impl Charged {
    /// Brings what was charged while the clock was ahead of `now` in line with the state, which was clamped to
    /// `rewound`.
    ///
    /// A place counts as held since then. Of all else nothing comes back: how much of it had been used at
    /// the instant of the charge, which is still to come, cannot be told.
    pub(crate) fn clamp(&mut self, now: Timestamp, rewound: Timestamp) {
        let is_ahead = self.at > now;
        for mark in &mut self.marks {
            match mark {
                Some(Mark::HeldSince(since)) if *since > now => *since = rewound,
                Some(Mark::HeldSince(_)) | None => {}
                Some(_) if is_ahead => *mark = None,
                Some(_) => {}
            }
        }
    }
}

/// Where a charge is in one state, and what is known of what came after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    pub(crate) mark: Mark,
    /// By how much others have moved it up since by what they gave back, in microseconds; `None` if nobody knows.
    pub(crate) shift: Option<u64>,
}
