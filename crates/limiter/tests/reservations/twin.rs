//! The twin: a reference model of the reservations of a fleet that knows only integers. It shares
//! no code with the stores, and keeps the units of each key as a list of positions and units.
//!
//! The twin is exact, except for buckets. A refund to a bucket depends on how much of the charge
//! has drained, so the twin computes an upper and a lower bound for the level of a bucket:
//!
//! - At least the level of a bucket that was never charged the unused units.
//! - At most the level of a bucket whose charges drain as soon as possible: a refund returns at
//!   least `cost - (time since the charge)`, in units of the leak.
//!
//! If a reload changes more than the number of units that a limit admits, the twin computes bounds
//! for the key from then on (`changed_units.rs`): the store converts the state at the next request,
//! and then refunds nothing. A denied request may convert the state, too.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    changed_units::{ChangedUnits, Holding},
    kind::{Change, DAY, Kind, LIMIT, UNIT},
};

/// How long after its expiry a reservation of a stopped server is left to that server.
const GRACE: u64 = 5_000_000;

/// How long after its expiry a reservation that another server has renewed is left to that server
/// and to the expiry queue.
const BACKUP_DELAY: u64 = 10_000_000;

/// The interval in which the servers end reservations, in microseconds.
pub(crate) const TICK: u64 = 1_000_000;
/// The interval in which the servers write the expiry queue, in microseconds.
pub(crate) const WRITE_INTERVAL: u64 = 100_000;

/// The state of a key.
#[derive(Clone, Debug)]
struct Key {
    kind: Kind,
    change: Change,
    /// The limit.
    most: u64,
    /// The highest limit until now. Lowering a limit refunds nothing.
    highest_most: u64,
    /// The units at each position: an instant, a window, or a part of a window. Empty for a bucket.
    units: BTreeMap<u64, u64>,
    /// The units after the terms of the limit have changed, instead of `units`. Empty for a bucket.
    changed: Option<ChangedUnits>,
    /// The terms of the state, and its shape.
    terms: Conversions,
    shape: Conversions,
    /// The longest lease of a limit of the key until now.
    longest_lease: u64,
    /// All charges and refunds of a bucket that could have had an effect, as if the unused units
    /// had never been charged.
    events: Vec<Event>,
    /// The highest possible level of a bucket, and the instant of this level.
    highest: (u64, u64),
    /// The lowest rate at which the bucket may drain since that instant.
    slowest: u64,
    /// Whether nothing is known about the level of a bucket: after a restart, the store does not
    /// know the former rate, so the time until the bucket is full again stays the same, and the
    /// used units change.
    is_unknown: bool,
    /// The number of resets.
    resets: u64,
    /// The number of events of a bucket before the latest refund of a charge from before a reset.
    /// Such a refund may remove units of these events.
    blurred: usize,
}

/// A unit of a bucket, as a level. A bucket drains at [`Change::drain_rate`].
const LEVEL: u64 = 2 * UNIT;

/// A charge or a refund of a bucket.
#[derive(Clone, Copy, Debug)]
struct Event {
    at: u64,
    units: i64,
    /// The highest rate at which the bucket may drain after the event.
    fastest: u64,
}

/// The conversions of a key's state: to other terms, or to other shapes.
#[derive(Clone, Copy, Debug)]
struct Conversions {
    /// What the latest admitted request has left.
    latest: Change,
    /// Whether a denied request may have converted the state since then.
    is_unknown: bool,
    /// The number of conversions by admitted requests.
    certain: u64,
    /// The number of denied requests that may have converted the state.
    possible: u64,
}

/// Whether a state has been converted since a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Same,
    Converted,
    Unknown,
}

impl Conversions {
    fn new(latest: Change) -> Self {
        Self {
            latest,
            is_unknown: false,
            certain: 0,
            possible: 0,
        }
    }

    /// A request under `change` is admitted.
    fn admit(&mut self, change: Change) {
        self.certain += u64::from(self.latest != change);
        (self.latest, self.is_unknown) = (change, false);
    }

    /// A request under `change` is denied.
    fn deny(&mut self, change: Change) {
        if self.latest != change {
            self.forget();
        }
    }

    /// The state may have been converted.
    fn forget(&mut self) {
        self.possible += 1;
        self.is_unknown = true;
    }

    /// Returns whether the state has been converted since it was `then`.
    fn fate(&self, then: &Self) -> Fate {
        if self.certain != then.certain {
            Fate::Converted
        } else if self.possible != then.possible {
            Fate::Unknown
        } else {
            Fate::Same
        }
    }

    /// Returns whether the state certainly differs from what it was `then`.
    fn differs(&self, then: &Self) -> bool {
        !self.is_unknown && self.latest != then.latest
    }
}

/// A charge of a reservation.
#[derive(Clone, Copy, Debug)]
struct Charge {
    key: usize,
    /// The position of the units; for a bucket, the index of the event; for a key whose limits have
    /// changed, the ID.
    position: u64,
    units: u64,
    /// The number of resets of the key before the charge.
    resets: u64,
    /// The limits under which the charge was made.
    change: Change,
    /// The conversions of the key's state before the charge.
    terms: Conversions,
    shape: Conversions,
}

/// How a reservation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Settled(u64),
    Expired,
    /// The memory store has lost the reservation in a crash.
    Lost,
}

/// A reservation, as known to a server that has made or renewed it.
#[derive(Clone, Debug)]
struct View {
    server: usize,
    expires: u64,
    /// The instant at which the server tries to end the reservation.
    due_at: u64,
    /// Whether the server has not written the reservation to the expiry queue yet.
    is_unwritten: bool,
}

/// A reservation in the expiry queue.
#[derive(Clone, Copy, Debug)]
struct Queued {
    expires: u64,
}

/// A reservation.
#[derive(Clone, Debug)]
struct Held {
    charges: Vec<Charge>,
    is_of_counters: bool,
    at: u64,
    cost: u64,
    expires: u64,
    end: Option<End>,
    /// The latest expiry. If another server renews the reservation for a shorter time, the other
    /// servers notice the renewal only at the former expiry.
    latest_expiry: u64,
    views: Vec<View>,
    queued: Option<Queued>,
}

/// The units that remain for a key: at least, and at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remaining {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

/// The expected result of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// The reservation is settled, and this number of units of the final cost is charged.
    Settled(Remaining, Released),
    /// The reservation was already settled at the same cost.
    Repeated,
    /// The reservation was already settled at another cost.
    SettledBefore,
    /// The reservation was already settled and would have expired, so the server may have forgotten
    /// the settlement.
    Forgotten,
    NotOutstanding,
}

/// The units that a settlement reports as released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// All unused units.
    All,
    /// None, because units stay charged.
    Nothing,
    /// All or none.
    Either,
}

/// The expected result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// The reservation is renewed for this time.
    Renewed(u64),
    /// The reservation has lost its slot in a reset.
    SlotLost,
    NotOutstanding,
}

#[derive(Clone, Debug)]
pub(crate) struct Twin {
    pub(crate) now: u64,
    /// Whether the servers share a Redis. Otherwise, there is one server with a memory store.
    pub(crate) is_shared: bool,
    /// Whether expired reservations stay charged, except for those of counters.
    charges_expired: bool,
    keys: Vec<Key>,
    held: Vec<Held>,
}

impl Key {
    fn new(kind: Kind) -> Self {
        let change = Change::None;
        let most = kind.most(change);
        Self {
            kind,
            change,
            most,
            highest_most: most,
            units: BTreeMap::new(),
            changed: None,
            terms: Conversions::new(change),
            shape: Conversions::new(change),
            longest_lease: kind.window(change),
            events: Vec::new(),
            highest: (0, 0),
            slowest: change.drain_rate(),
            is_unknown: false,
            resets: 0,
            blurred: 0,
        }
    }

    /// Returns whether the terms of the limit have ever changed.
    fn has_changed(&self) -> bool {
        self.changed.is_some()
    }

    fn has_slots(&self) -> bool {
        self.kind.has_slots(self.change)
    }

    /// Returns the position of units that are charged at `now`.
    fn position(&self, now: u64) -> u64 {
        match self.kind {
            Kind::FixedWindow | Kind::Weighted => now / self.window(),
            Kind::Budget => now / DAY,
            Kind::Buckets => now / (self.window() / 6),
            Kind::Log | Kind::Slots => now,
            Kind::FirstRequest => {
                let current = self.units.keys().find(|end| **end > now);
                current.copied().unwrap_or_else(|| now + self.window())
            }
            Kind::TokenBucket | Kind::Gcra | Kind::Meter => self.events.len() as u64,
        }
    }

    fn window(&self) -> u64 {
        self.kind.window(Change::None)
    }

    /// Returns the units that count at `now`, as a numerator and a denominator.
    fn counted(&self, now: u64) -> (u64, u64) {
        let sum = |counts: &dyn Fn(u64) -> bool| {
            let counted = self.units.iter().filter(|(position, _)| counts(**position));
            counted.map(|(_, units)| *units).sum::<u64>()
        };
        let window = self.window();
        match self.kind {
            Kind::FixedWindow => (sum(&|at| at == now / window), 1),
            Kind::Budget => (sum(&|at| at == now / DAY), 1),
            Kind::FirstRequest => (sum(&|end| end > now), 1),
            Kind::Log | Kind::Slots => (sum(&|at| at + window > now), 1),
            // A strict counter also sums the sub-window in which the window begins.
            Kind::Buckets => (sum(&|at| at + 7 > now / (window / 6)), 1),
            Kind::Weighted => {
                let previous = sum(&|at| at + 1 == now / window) * (window - now % window);
                (previous + sum(&|at| at == now / window) * window, window)
            }
            Kind::TokenBucket | Kind::Gcra | Kind::Meter => unreachable!("a bucket has a level"),
        }
    }

    fn lowest_level(&self, now: u64) -> u64 {
        let (mut level, mut last, mut fastest) = (0_u64, 0, 0);
        for event in &self.events {
            level = level.saturating_sub((event.at - last) * fastest);
            let size = event.units.unsigned_abs() * LEVEL;
            level = if event.units < 0 {
                level.saturating_sub(size)
            } else {
                level + size
            };
            (last, fastest) = (event.at, event.fastest);
        }
        level.saturating_sub((now - last) * fastest)
    }

    fn highest_level(&self, now: u64) -> u64 {
        let (level, at) = self.highest;
        level.saturating_sub((now - at) * self.slowest)
    }

    fn remaining(&self, now: u64) -> Remaining {
        let most = self.most;
        if self.is_unknown {
            return Remaining { least: 0, most };
        }
        if self.kind.is_bucket() {
            let left = |level: u64| (most * LEVEL).saturating_sub(level) / LEVEL;
            return Remaining {
                least: left(self.highest_level(now)),
                most: left(self.lowest_level(now)),
            };
        }
        if let Some(changed) = &self.changed {
            let (least, highest) = changed.counted(self.change, now);
            return Remaining {
                least: most.saturating_sub(highest),
                most: most.saturating_sub(least),
            };
        }
        let (counted, one) = self.counted(now);
        let left = (most * one).saturating_sub(counted) / one;
        Remaining {
            least: left,
            most: left,
        }
    }

    /// Charges at least `least` and at most `most` units. Returns their position.
    fn charge(&mut self, least: u64, most: u64, now: u64) -> u64 {
        if least > 0 {
            self.terms.admit(self.change.terms());
            self.shape.admit(self.change.shape());
        } else if most > 0 {
            self.deny();
        }
        let position = self.position(now);
        if self.kind.is_bucket() {
            let rate = self.change.drain_rate();
            let fastest = self.events.last().map_or(rate, |event| event.fastest);
            self.events.push(Event {
                at: now,
                units: least.cast_signed(),
                fastest: if least > 0 { rate } else { fastest },
            });
            self.highest = (self.highest_level(now) + most * LEVEL, now);
            self.slowest = if least > 0 { rate } else { self.slowest };
        } else if let Some(changed) = &mut self.changed {
            return changed.charge(self.kind, self.change, (least, most), now);
        } else {
            assert_eq!(least, most, "only the level of a bucket is not exact");
            if most > 0 {
                *self.units.entry(position).or_default() += most;
            }
        }
        position
    }

    /// A request is denied, or charges an unknown number of units.
    fn deny(&mut self) {
        self.terms.deny(self.change.terms());
        self.shape.deny(self.change.shape());
    }

    /// Changes the limits.
    fn change(&mut self, change: Change, now: u64) {
        let former = std::mem::replace(&mut self.change, change);
        self.most = self.kind.most(change);
        self.highest_most = self.highest_most.max(self.most);
        if self.changed.is_none() && former.terms() == change.terms() {
            return;
        }
        let earlier = std::mem::take(&mut self.units);
        let changed = self.changed.get_or_insert_with(|| {
            let mut changed = ChangedUnits::default();
            for (position, units) in earlier {
                changed.add_earlier(self.kind, position, units);
            }
            changed
        });
        self.longest_lease = self.longest_lease.max(self.kind.window(change));
        if !self.kind.is_bucket() {
            changed.change(self.kind, former, change, now);
            return;
        }
        let rate = change.drain_rate();
        let fastest = self.events.last().map_or(rate, |event| event.fastest);
        self.events.push(Event {
            at: now,
            units: 0,
            fastest: fastest.max(rate),
        });
        self.highest = (self.highest_level(now), now);
        self.slowest = self.slowest.min(rate);
    }

    /// Returns whether the state of a charge has been converted to other terms.
    fn fate(&self, charge: &Charge) -> Fate {
        if charge.resets < self.resets {
            return Fate::Unknown;
        }
        self.terms.fate(&charge.terms)
    }

    /// Returns whether the charge was made with slots.
    fn holds_slots(&self, charge: &Charge) -> bool {
        self.kind.has_slots(charge.change)
    }

    /// Returns what a settlement reports as released of a charge with unused units.
    fn released(&self, charge: &Charge, now: u64) -> Released {
        let has_units = !self.holds_slots(charge)
            || matches!(charge.change, Change::AddedBefore | Change::AddedAfter);
        if !self.has_changed() || !has_units || self.fate(charge) == Fate::Same {
            return Released::All;
        }
        let counts = match &self.changed {
            _ if self.kind.is_bucket() => self.lowest_level(now) > 0,
            Some(changed) => changed.counted(self.change, now).0 > 0,
            None => false,
        };
        let is_certain = self.fate(charge) == Fate::Converted;
        match is_certain && counts && self.terms.differs(&charge.terms) {
            true => Released::Nothing,
            false => Released::Either,
        }
    }

    /// Refunds `unused` units of a charge that was made at `since`.
    fn refund(&mut self, charge: Charge, unused: u64, since: u64, now: u64) {
        let (fate, holds_slots) = (self.fate(&charge), self.holds_slots(&charge));
        if self.kind.is_bucket() {
            return self.refund_bucket(charge, unused, (since, fate), now);
        }
        let Some(changed) = &mut self.changed else {
            if let Some(units) = self.units.get_mut(&charge.position) {
                *units = units.saturating_sub(unused);
            }
            self.units.retain(|_, units| *units > 0);
            return;
        };
        let fate = match holds_slots {
            // Slots are released if the state still has the same shape.
            true if self.shape.fate(&charge.shape) != Fate::Same => Fate::Unknown,
            true => Fate::Same,
            false => fate,
        };
        if charge.resets < self.resets {
            changed.refund_any(unused);
            return;
        }
        match fate {
            Fate::Same => {
                let missing = changed.refund(charge.position, unused);
                if self.resets > 0 {
                    // A refund of a charge from before the reset may have removed the units.
                    changed.refund_any(missing);
                }
            }
            Fate::Converted => {}
            Fate::Unknown => changed.refund_possibly(charge.position, unused),
        }
    }

    fn refund_bucket(&mut self, charge: Charge, unused: u64, (since, fate): (u64, Fate), now: u64) {
        let is_reset = charge.resets < self.resets;
        if fate == Fate::Converted {
            return;
        }
        let event = usize::try_from(charge.position).unwrap();
        if is_reset || event < self.blurred {
            // The charge is gone, or another refund may have removed the units. The refund may
            // remove units of other charges.
            let fastest = self.events.last().map_or(0, |event| event.fastest);
            self.events.push(Event {
                at: now,
                units: -unused.cast_signed(),
                fastest,
            });
        } else {
            self.events[event].units -= unused.cast_signed();
        }
        if is_reset {
            self.blurred = self.events.len();
        } else if fate == Fate::Same {
            let drained = (now - since) * charge.change.drain_rate();
            let undrained = (charge.units * LEVEL).saturating_sub(drained);
            let refunded = undrained.min(unused * LEVEL);
            self.highest = (self.highest_level(now).saturating_sub(refunded), now);
        }
    }

    /// Renews slots that are held until `until`, if the limits do not change. Returns whether they
    /// are certainly renewed or certainly lost. If this is not certain, `is_renewed` is the reply
    /// of the server.
    fn renew(
        &mut self,
        charge: &mut Charge,
        until: u64,
        is_renewed: bool,
        now: u64,
    ) -> Option<bool> {
        let Some(changed) = &mut self.changed else {
            let has_slot = self.units.remove(&charge.position).is_some();
            if !has_slot && self.remaining(now).least == 0 {
                return Some(false);
            }
            charge.position = self.charge(1, 1, now);
            return Some(true);
        };
        let has_same_terms = charge.change.terms() == self.change.terms();
        let most = match has_same_terms {
            true => self.most,
            false => self.kind.most(charge.change),
        };
        let (least, highest) = changed.counted(charge.change, now);
        let is_reset = charge.resets < self.resets;
        let expected = match self.shape.fate(&charge.shape) {
            Fate::Same if !is_reset => match changed.holding(charge.position, charge.units, now) {
                Holding::Held => Some(true),
                _ if highest + charge.units <= most => Some(true),
                Holding::Lost if least + charge.units > most => Some(false),
                Holding::Lost | Holding::Unknown => None,
            },
            Fate::Converted
                if self.shape.differs(&charge.shape) && changed.counted(self.change, now).0 > 0 =>
            {
                Some(false)
            }
            _ => None,
        };
        // A renewal does not convert the state, which has the lease of the latest request. If
        // several reloads have changed the lease, it may be shorter than that of the reservation.
        let state_lease = match self.terms.is_unknown {
            true => self.kind.window(Change::Shorter),
            false => self.kind.window(self.terms.latest),
        };
        let until = until.min(now + state_lease);
        let (id, units, longest) = (charge.position, charge.units, now + self.longest_lease);
        let is_swapped = charge.change == Change::Swapped;
        match expected.unwrap_or(is_renewed) {
            true => {
                charge.position = changed.renew(id, units, (until, longest), is_swapped, now);
                charge.resets = self.resets;
                if self.terms.latest != charge.change.terms() || is_reset {
                    // If the key had no state, the state has the terms of the reservation.
                    self.terms.forget();
                    self.shape.forget();
                }
            }
            false if expected.is_none() => {
                charge.position = changed.renew_possibly(id, units, longest, is_swapped, now);
            }
            false => {}
        }
        expected
    }

    fn reset(&mut self) {
        let Self { change, .. } = *self;
        let mut changed = self.changed.take();
        if let Some(changed) = &mut changed {
            changed.clear();
        }
        *self = Self {
            resets: self.resets + 1,
            change,
            most: self.most,
            highest_most: self.most,
            changed,
            terms: self.terms,
            shape: self.shape,
            longest_lease: self.longest_lease,
            slowest: change.drain_rate(),
            ..Self::new(self.kind)
        };
        self.terms.forget();
        self.shape.forget();
    }
}

impl Twin {
    pub(crate) fn new(
        kinds: impl IntoIterator<Item = Kind>,
        is_shared: bool,
        charges_expired: bool,
        now: u64,
    ) -> Self {
        Self {
            now,
            is_shared,
            charges_expired,
            keys: kinds.into_iter().map(Key::new).collect(),
            held: Vec::new(),
        }
    }

    pub(crate) fn key_count(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn is_of_counters(&self, which: usize) -> bool {
        self.held[which].is_of_counters
    }

    pub(crate) fn remaining(&self, key: usize) -> Remaining {
        self.keys[key].remaining(self.now)
    }

    /// Panics if more units are counted than a limit allows.
    pub(crate) fn assert_limits(&self) {
        for key in &self.keys {
            if key.kind.is_bucket() {
                let is_known = key.resets == 0 && !key.is_unknown;
                assert!(
                    !is_known || key.lowest_level(self.now) <= LIMIT * LEVEL,
                    "{key:?} at {}",
                    self.now
                );
                continue;
            }
            let (counted, one) = match &key.changed {
                Some(changed) => (changed.counted(key.change, self.now).0, 1),
                None => key.counted(self.now),
            };
            assert!(counted <= key.highest_most * one, "{key:?} at {}", self.now);
        }
    }

    /// Returns the number of units that a request of `cost` charges to a key.
    pub(crate) fn units(&self, key: usize, cost: u64) -> u64 {
        if self.keys[key].kind == Kind::Slots {
            1
        } else {
            cost
        }
    }

    /// Returns whether a request of `cost` is admitted; `None` if it depends on the level of a
    /// bucket.
    pub(crate) fn admits(&self, keys: &[usize], cost: u64) -> Option<bool> {
        let fits = |key: &usize, least: bool| {
            let Remaining { least: low, most } = self.remaining(*key);
            self.units(*key, cost) <= if least { low } else { most }
        };
        if keys.iter().all(|key| fits(key, true)) {
            return Some(true);
        }
        keys.iter().any(|key| !fits(key, false)).then_some(false)
    }

    /// Charges an admitted request.
    pub(crate) fn charge(&mut self, keys: &[usize], cost: u64) {
        self.charge_each(keys, cost);
    }

    /// A request is denied.
    pub(crate) fn deny(&mut self, keys: &[usize]) {
        for key in keys {
            self.keys[*key].deny();
        }
    }

    fn charge_each(&mut self, keys: &[usize], cost: u64) -> Vec<Charge> {
        let mut charges = Vec::new();
        for key in keys {
            let units = self.units(*key, cost);
            let state = &mut self.keys[*key];
            let position = state.charge(units, units, self.now);
            charges.push(Charge {
                key: *key,
                position,
                units,
                resets: state.resets,
                change: state.change,
                terms: state.terms,
                shape: state.shape,
            });
        }
        charges
    }

    /// Makes the reservation of an admitted request. Returns its time to live.
    pub(crate) fn reserve(
        &mut self,
        server: usize,
        keys: &[usize],
        cost: u64,
        ttl: u64,
        is_of_counters: bool,
    ) -> u64 {
        let mut ttl = self.lease(keys).map_or(ttl, |lease| ttl.min(lease));
        if is_of_counters {
            // One of the counters has a window of a day.
            ttl = ttl.min(DAY - self.now % DAY);
        }
        let charges = self.charge_each(keys, cost);
        let expires = self.now + ttl;
        self.held.push(Held {
            charges,
            is_of_counters,
            at: self.now,
            cost,
            expires,
            latest_expiry: expires,
            end: None,
            views: vec![View {
                server,
                expires,
                due_at: expires,
                is_unwritten: self.is_shared,
            }],
            queued: None,
        });
        ttl
    }

    /// Returns the shortest lease of the limits that apply to `keys`.
    fn lease(&self, keys: &[usize]) -> Option<u64> {
        let keys = keys.iter().map(|key| &self.keys[*key]);
        let leases = keys.filter(|key| key.has_slots());
        leases.map(|key| key.kind.window(key.change)).min()
    }

    /// Returns the number of units of a charge that a final cost does not use.
    fn unused(&self, charge: &Charge, final_cost: u64) -> u64 {
        match self.keys[charge.key].kind {
            // The rule has a fixed cost.
            Kind::Slots if final_cost > 0 => 0,
            _ => charge.units.saturating_sub(final_cost),
        }
    }

    fn end(&mut self, which: usize, end: End, final_cost: u64) {
        let held = &mut self.held[which];
        held.end = Some(end);
        let (at, charges) = (held.at, held.charges.clone());
        for charge in charges {
            let unused = match self.keys[charge.key].holds_slots(&charge) {
                // Slots are always released.
                true => charge.units,
                false => self.unused(&charge, final_cost),
            };
            self.keys[charge.key].refund(charge, unused, at, self.now);
        }
    }

    fn end_expired(&mut self, which: usize) {
        let held = &self.held[which];
        let is_charged = self.charges_expired && !held.is_of_counters;
        let final_cost = if is_charged { held.cost } else { 0 };
        self.end(which, End::Expired, final_cost);
    }

    /// Settles a reservation at `cost`, with any of its tokens.
    pub(crate) fn settle(&mut self, which: usize, cost: u64) -> Settlement {
        let held = &self.held[which];
        match held.end {
            Some(End::Settled(before)) if self.is_shared && before == cost => {
                return Settlement::Repeated;
            }
            Some(End::Settled(_)) if held.expires <= self.now => return Settlement::Forgotten,
            Some(End::Settled(_)) => return Settlement::SettledBefore,
            Some(_) => return Settlement::NotOutstanding,
            None => {}
        }
        if held.expires <= self.now {
            self.end_if_local(which);
            return Settlement::NotOutstanding;
        }
        let (reserved, is_of_counters) = (held.cost, held.is_of_counters);
        let charges = held.charges.clone();
        let mut released = Released::All;
        for charge in charges
            .iter()
            .filter(|charge| self.unused(charge, cost) > 0)
        {
            released = match (released, self.keys[charge.key].released(charge, self.now)) {
                (Released::Nothing, _) | (_, Released::Nothing) => Released::Nothing,
                (Released::Either, _) | (_, Released::Either) => Released::Either,
                (Released::All, Released::All) => Released::All,
            };
        }
        self.end(which, End::Settled(cost), cost);
        let excess = cost.saturating_sub(reserved);
        let mut charged = Remaining {
            least: cost,
            most: cost,
        };
        for charge in charges {
            let key = &self.keys[charge.key];
            // A rule of slots has a fixed cost.
            if excess == 0 || key.kind == Kind::Slots || is_of_counters {
                continue;
            }
            if key.has_slots() {
                // No request would release further slots. The reply reports this if the rule
                // counted units when the reservation was made.
                if !key.holds_slots(&charge) {
                    charged.least = charged.least.min(reserved);
                    charged.most = charged.most.min(reserved);
                }
                continue;
            }
            let left = self.remaining(charge.key);
            let (least, most) = (excess.min(left.least), excess.min(left.most));
            if least < excess {
                self.keys[charge.key].deny();
            }
            self.keys[charge.key].charge(least, most, self.now);
            charged.least = charged.least.min(cost - (excess - least));
            charged.most = charged.most.min(cost - (excess - most));
        }
        Settlement::Settled(charged, released)
    }

    /// Renews a reservation for `ttl`. If it is not certain whether the slots are held,
    /// `is_slot_lost` decides: the server has replied that a slot is lost.
    pub(crate) fn renew(
        &mut self,
        server: usize,
        which: usize,
        ttl: u64,
        is_slot_lost: bool,
    ) -> Renewal {
        let held = &mut self.held[which];
        if held.end.is_some() {
            return Renewal::NotOutstanding;
        }
        if held.expires <= self.now {
            self.end_if_local(which);
            return Renewal::NotOutstanding;
        }
        let keys: Vec<usize> = held.charges.iter().map(|charge| charge.key).collect();
        let current_lease = self.lease(&keys);
        let held = &mut self.held[which];
        let slots = |charge: &&mut Charge| self.keys[charge.key].holds_slots(charge);
        let mut charges: Vec<&mut Charge> = held.charges.iter_mut().filter(slots).collect();
        // A lease is renewed under its own limits, and a request under the current limits converts
        // the lease.
        let own = charges
            .iter()
            .map(|charge| self.keys[charge.key].kind.window(charge.change));
        let own = own.min();
        let lease = own.map(|own| current_lease.map_or(own, |current| own.min(current)));
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let until = self.now + lease.unwrap_or_default();
        let (mut is_lost, mut is_unknown) = (false, false);
        for charge in &mut charges {
            let key = &mut self.keys[charge.key];
            let is_renewed = key.renew(charge, until, !is_slot_lost, self.now);
            is_lost |= is_renewed == Some(false);
            is_unknown |= is_renewed.is_none();
        }
        let renewal = match is_lost || is_unknown && is_slot_lost {
            true => Renewal::SlotLost,
            false => Renewal::Renewed(ttl),
        };
        held.expires = self.now + ttl;
        held.latest_expiry = held.latest_expiry.max(held.expires);
        // The server that has renewed a reservation ends it.
        held.views.retain(|view| view.server != server);
        held.views.push(View {
            server,
            expires: held.expires,
            due_at: held.expires,
            is_unwritten: self.is_shared,
        });
        held.views.sort_by_key(|view| view.server);
        renewal
    }

    /// Ends an expired reservation, if it belongs to a single server. A server with a memory store
    /// ends an expired reservation as soon as it notices the expiry.
    fn end_if_local(&mut self, which: usize) {
        if !self.is_shared {
            self.end_expired(which);
        }
    }

    pub(crate) fn reset(&mut self, key: usize) {
        self.keys[key].reset();
    }

    /// Changes the limits of some keys. The units that are counted stay counted. With the same
    /// terms, they are refunded as before.
    pub(crate) fn change(&mut self, keys: Range<usize>, change: Change) {
        for key in &mut self.keys[keys] {
            key.change(change, self.now);
        }
    }

    /// Kills a server of a fleet. Other servers end those of its reservations that are in the
    /// expiry queue.
    pub(crate) fn kill(&mut self, server: usize) {
        for held in &mut self.held {
            held.views.retain(|view| view.server != server);
        }
    }

    /// Restores the server with the memory store from `snapshot`.
    pub(crate) fn restore(&mut self, snapshot: &Self) {
        let (now, made_later) = (self.now, self.held.split_off(snapshot.held.len()));
        let keys = std::mem::take(&mut self.keys);
        *self = snapshot.clone();
        self.now = now;
        // A snapshot does not contain the rules.
        for (key, before) in self.keys.iter_mut().zip(keys) {
            key.change(before.change, now);
            key.highest_most = key.highest_most.max(before.highest_most);
            key.longest_lease = key.longest_lease.max(before.longest_lease);
            if key.has_changed() {
                // A snapshot contains neither the former limits nor the conversions.
                key.terms.forget();
                key.shape.forget();
                key.is_unknown = key.kind.is_bucket();
                if let Some(changed) = &mut key.changed
                    && key.kind == Kind::FirstRequest
                {
                    changed.forget_starts();
                }
            }
        }
        for held in &mut self.held {
            // The server has forgotten that it has settled these reservations.
            if let Some(End::Settled(_)) = held.end {
                held.end = Some(End::Lost);
            }
        }
        for held in made_later {
            self.held.push(Held {
                end: Some(End::Lost),
                ..held
            });
        }
    }

    /// The servers write their reservations to the expiry queue, one after the other.
    pub(crate) fn write(&mut self) {
        for held in &mut self.held {
            for view in held.views.iter_mut().filter(|view| view.is_unwritten) {
                view.is_unwritten = false;
                held.queued = Some(Queued {
                    expires: view.expires,
                });
            }
        }
    }

    /// The servers end their own expired reservations and those of killed servers. The preceding
    /// call was `elapsed` earlier.
    pub(crate) fn expire(&mut self, elapsed: u64) {
        for which in 0..self.held.len() {
            self.expire_on_servers(which);
        }
        if elapsed >= WRITE_INTERVAL {
            self.write();
        }
        for which in 0..self.held.len() {
            self.expire_in_queue(which);
        }
    }

    fn expire_on_servers(&mut self, which: usize) {
        let held = &mut self.held[which];
        if held.end.is_some() {
            return;
        }
        for view in held.views.iter_mut().filter(|view| view.due_at <= self.now) {
            if held.expires <= self.now {
                return self.end_expired(which);
            }
            view.expires = held.expires;
            view.due_at = held.expires + BACKUP_DELAY;
        }
    }

    fn expire_in_queue(&mut self, which: usize) {
        let held = &mut self.held[which];
        let Some(queued) = &mut held.queued else {
            return;
        };
        if held.end.is_some() || queued.expires + GRACE > self.now {
            return;
        }
        if held.expires <= self.now {
            self.end_expired(which);
        } else {
            queued.expires = held.expires;
        }
    }

    /// Panics if a reservation is outstanding for longer after its expiry than documented.
    /// `lateness` is the time since the servers last ended reservations.
    pub(crate) fn assert_expired(&self, lateness: u64) {
        for held in self.held.iter().filter(|held| held.end.is_none()) {
            let is_due = |view: &View| view.due_at == held.expires;
            let latest = if held.views.iter().any(is_due) {
                held.expires
            } else if held
                .queued
                .is_some_and(|queued| queued.expires == held.expires)
            {
                held.expires + GRACE
            } else if !held.views.is_empty() || held.queued.is_some() {
                held.latest_expiry + BACKUP_DELAY
            } else {
                // The server was killed before it has written the reservation.
                continue;
            };
            let latest = latest + TICK + lateness;
            assert!(self.now <= latest, "{held:?} at {}", self.now);
        }
    }
}
