//! The state of a sliding window log: the instant of each admission, and the log position at which
//! each window begins.

use std::collections::VecDeque;

use crate::{
    algorithm::CounterState,
    limit::bounds,
    time::{Span, Timestamp},
};

/// A log entry for an admission. The low 53 bits contain the instant in microseconds, and the high
/// 11 bits contain the cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(u64);

impl Stamp {
    const AT_BITS: u32 = 53;
    const MAX_COST: u64 = (1 << (64 - Self::AT_BITS)) - 1;

    pub(super) fn new(at: Timestamp, cost: u64) -> Self {
        debug_assert!(
            cost <= Self::MAX_COST,
            "a larger cost takes several timestamps"
        );
        Self(cost << Self::AT_BITS | at.as_micros())
    }

    /// Creates a log entry from untrusted numbers. A cost over 2,047 is reduced to 2,047, the
    /// largest cost that fits in 11 bits.
    pub(crate) fn of(at: u64, cost: u64) -> Self {
        Self::new(Timestamp::from_micros(at), cost.min(Self::MAX_COST))
    }

    pub(crate) fn parts(self) -> (u64, u64) {
        (self.at().as_micros(), self.cost())
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn to_bits(self) -> u64 {
        self.0
    }

    pub(super) fn at(self) -> Timestamp {
        Timestamp::from_micros(self.0 & ((1 << Self::AT_BITS) - 1))
    }

    pub(super) fn cost(self) -> u64 {
        self.0 >> Self::AT_BITS
    }
}

/// A window over the log: the position of its first entry (`head`), and the sum of the units from
/// that entry on (`sum`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WindowCursor {
    pub(super) head: usize,
    pub(super) sum: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogState {
    pub(super) stamps: VecDeque<Stamp>,
    pub(super) cursors: Box<[WindowCursor]>,
    /// The length of the longest window of the limits under which the log was last used.
    pub(super) longest: Span,
}

impl CounterState for LogState {
    fn expires(&self) -> Timestamp {
        self.stamps
            .back()
            .map_or_else(Timestamp::default, |last| last.at().after(self.longest))
    }

    /// Moves the instant of every entry back by `span`.
    fn move_back(&mut self, span: Span) {
        for stamp in &mut self.stamps {
            *stamp = Stamp::new(stamp.at().before(span), stamp.cost());
        }
    }

    fn heap_bytes(&self) -> usize {
        size_of::<Self>()
            + self.stamps.capacity() * size_of::<Stamp>()
            + self.cursors.len() * size_of::<WindowCursor>()
    }

    fn log_growth_bytes(&self) -> usize {
        self.growth_bytes(bounds::MAX_LOG_LIMIT)
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        put(self.longest.as_micros());
        put(self.stamps.len() as u64);
        self.stamps.iter().for_each(|stamp| put(stamp.to_bits()));
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        let (longest, len) = (next()?, next()?);
        let stamps = (0..len).map(|_| next().map(Stamp::from_bits));
        let mut stamps: VecDeque<Stamp> = stamps.collect::<Option<_>>()?;
        stamps.shrink_to_fit();
        Some(Self::from_stamps(stamps, Span::from_micros(longest)))
    }
}

impl LogState {
    /// Creates a log from the entries `stamps`, oldest first. `longest` is the length of its
    /// longest window. The log has no window positions until it is converted for a limit.
    pub(crate) fn from_stamps(stamps: VecDeque<Stamp>, longest: Span) -> Self {
        Self {
            stamps,
            cursors: Box::default(),
            longest,
        }
    }

    pub(crate) fn stamps(&self) -> impl ExactSizeIterator<Item = Stamp> {
        self.stamps.iter().copied()
    }

    pub(crate) fn longest(&self) -> Span {
        self.longest
    }

    pub(crate) fn capacity(&self) -> usize {
        self.stamps.capacity()
    }

    /// Reduces the capacity to `capacity`, but not below the length of the log.
    pub(crate) fn shrink_to(&mut self, capacity: usize) {
        self.stamps.shrink_to(capacity);
    }

    pub(crate) fn growth_bytes(&self, cost: u64) -> usize {
        let needed = self.stamps.len() + stamps_for(cost);
        let capacity = self.stamps.capacity();
        if needed <= capacity {
            0
        } else {
            (grown(capacity, needed) - capacity) * size_of::<Stamp>()
        }
    }

    /// Removes up to `units` charged at `at`, beginning with the newest entry.
    pub(crate) fn refund_at(&mut self, at: Timestamp, mut units: u64) {
        let mut behind = self.stamps.partition_point(|stamp| stamp.at() <= at);
        while units > 0 && behind > 0 && self.stamps[behind - 1].at() == at {
            behind -= 1;
            let taken = units.min(self.stamps[behind].cost());
            units -= taken;
            self.take(behind, taken);
        }
    }

    /// Renews a lease: moves `units` charged at `since` to `now`. Units missing from the log are
    /// charged again. If the total including these units would exceed `limit`, returns false and
    /// moves nothing.
    pub(crate) fn renew(
        &mut self,
        now: Timestamp,
        since: Timestamp,
        units: u64,
        limit: u64,
    ) -> bool {
        while let Some(oldest) = self.stamps.front()
            && now.since(oldest.at()) >= self.longest
        {
            self.drop_oldest();
        }
        let held = self.held_since(since).min(units);
        let others = self.units() - held;
        let is_renewed = held == units || units <= limit && others <= limit - units;
        if is_renewed {
            self.refund_at(since, units);
            self.enter(now, units);
        }
        is_renewed
    }

    /// Returns whether the log contains all `units` charged at `since`, and has enough capacity to
    /// move these units to another instant. Moving the units can add entries to the log, because
    /// requests charged at the same instant share an entry.
    pub(crate) fn renews_in_place(&self, since: Timestamp, units: u64) -> bool {
        let first = self.stamps.partition_point(|stamp| stamp.at() < since);
        let behind = self.stamps.partition_point(|stamp| stamp.at() <= since);
        let Some(mut staying) = self.held_since(since).checked_sub(units) else {
            return false;
        };
        let stays = |stamp: &&Stamp| {
            let begun = staying > 0;
            staying = staying.saturating_sub(stamp.cost());
            begun
        };
        let kept = self.stamps.range(first..behind).take_while(stays).count();
        let others = first + kept + self.stamps.len() - behind;
        others + stamps_for(units) <= self.stamps.capacity()
    }

    /// Returns the instant of the newest entry.
    pub(crate) fn newest(&self) -> Timestamp {
        self.stamps
            .back()
            .map_or_else(Timestamp::default, |last| last.at())
    }

    fn held_since(&self, since: Timestamp) -> u64 {
        let first = self.stamps.partition_point(|stamp| stamp.at() < since);
        let stamps = self.stamps.range(first..);
        let held = stamps.take_while(|stamp| stamp.at() == since);
        held.map(|stamp| stamp.cost()).sum()
    }

    /// Sets the instant of all entries later than `at` to `at`. Every window start is reset to the
    /// front of the log, because entries before its old start can now be inside the window again.
    /// The next decision advances the start positions.
    pub(crate) fn clamp(&mut self, at: Timestamp) {
        for stamp in &mut self.stamps {
            if stamp.at() > at {
                *stamp = Stamp::new(at, stamp.cost());
            }
        }
        let sum = self.stamps.iter().map(|stamp| stamp.cost()).sum();
        self.cursors.fill(WindowCursor { head: 0, sum });
    }

    /// Returns the number of units in the whole log. The longest window starts at the front of the
    /// log, so the largest window sum is the total. If the log has no window positions, the costs
    /// of all entries are added up.
    pub(super) fn units(&self) -> u64 {
        let longest = self.cursors.iter().map(|cursor| cursor.sum).max();
        longest.unwrap_or_else(|| self.stamps.iter().map(|stamp| stamp.cost()).sum())
    }

    /// Adds `units` at `now` to the log and to the sum of every window.
    pub(super) fn enter(&mut self, now: Timestamp, units: u64) {
        self.push(now, units);
        for cursor in &mut self.cursors {
            cursor.sum += units;
        }
    }

    fn push(&mut self, now: Timestamp, mut cost: u64) {
        if let Some(last) = self.stamps.back_mut()
            && last.at() == now
            && last.cost() + cost <= Stamp::MAX_COST
        {
            *last = Stamp::new(now, last.cost() + cost);
            return;
        }
        let needed = self.stamps.len() + stamps_for(cost);
        if needed > self.stamps.capacity() {
            let capacity = grown(self.stamps.capacity(), needed);
            self.stamps.reserve_exact(capacity - self.stamps.len());
        }
        while cost > 0 {
            let part = cost.min(Stamp::MAX_COST);
            self.stamps.push_back(Stamp::new(now, part));
            cost -= part;
        }
    }

    /// Removes `units` from the entry with index `number`, which must have at least that many
    /// units. The entry is removed if it has no units left.
    pub(super) fn take(&mut self, number: usize, units: u64) {
        let stamp = self.stamps[number];
        let left = Stamp::new(stamp.at(), stamp.cost() - units);
        self.stamps[number] = left;
        for cursor in &mut self.cursors {
            if cursor.head <= number {
                cursor.sum -= units;
            }
        }
        if left.cost() > 0 {
            return;
        }
        self.stamps.remove(number);
        for cursor in &mut self.cursors {
            if cursor.head > number {
                cursor.head -= 1;
            }
        }
    }

    /// Drops the oldest entry from the log, and subtracts its units from every window that contains
    /// the entry.
    pub(super) fn drop_oldest(&mut self) {
        let Some(oldest) = self.stamps.pop_front() else {
            return;
        };
        for cursor in &mut self.cursors {
            if cursor.head == 0 {
                cursor.sum -= oldest.cost();
            } else {
                cursor.head -= 1;
            }
        }
    }
}

pub(super) fn stamps_for(cost: u64) -> usize {
    usize::try_from(cost.div_ceil(Stamp::MAX_COST)).unwrap_or(usize::MAX)
}

/// Returns the new capacity of a log that needs `needed` entries. The capacity grows by an eighth,
/// so that a full log wastes little memory and is rarely reallocated.
pub(super) fn grown(capacity: usize, needed: usize) -> usize {
    needed.max(capacity + capacity / 8 + 4)
}
