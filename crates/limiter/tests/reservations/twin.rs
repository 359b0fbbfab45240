//! The twin: a reference model of the reservations of a fleet that knows only integers. It shares
//! no code with the stores, and keeps the units of each key as a list of positions and units.
//!
//! The twin is exact, except for buckets. A refund to a bucket depends on how much of the charge
//! has drained, so the twin computes an upper and a lower bound for the level of a bucket:
//!
//! - At least the level of a bucket that was never charged the unused units.
//! - At most the level of a bucket whose charges drain as soon as possible: a refund returns at
//!   least `cost - (time since the charge)`, in units of the leak.

use std::{collections::BTreeMap, ops::Range};

/// The limit of every kind, in units, except for slots.
pub(crate) const LIMIT: u64 = 20;
/// The window of every kind, and the time in which a full bucket drains, in microseconds.
pub(crate) const WINDOW: u64 = 60_000_000;
/// The number of concurrency slots.
const SLOTS: u64 = 3;
/// The lease of a concurrency slot, in microseconds.
pub(crate) const LEASE: u64 = 30_000_000;
/// The time in which a bucket drains by one unit, in microseconds.
const UNIT: u64 = WINDOW / LIMIT;
const DAY: u64 = 86_400_000_000;

/// How long after its expiry a reservation of a stopped server is left to that server.
const GRACE: u64 = 5_000_000;

/// How long after its expiry a reservation that another server has renewed is left to that server
/// and to the expiry queue.
const BACKUP_DELAY: u64 = 10_000_000;

/// The interval in which the servers end reservations, in microseconds.
pub(crate) const TICK: u64 = 1_000_000;
/// The interval in which the servers write the expiry queue, in microseconds.
pub(crate) const WRITE_INTERVAL: u64 = 100_000;

/// A kind of limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    FixedWindow,
    FirstRequest,
    Budget,
    Log,
    Buckets,
    Weighted,
    TokenBucket,
    Gcra,
    Meter,
    Slots,
}

impl Kind {
    pub(crate) const ALL: [Self; 10] = [
        Self::FixedWindow,
        Self::FirstRequest,
        Self::Budget,
        Self::Log,
        Self::Buckets,
        Self::Weighted,
        Self::TokenBucket,
        Self::Gcra,
        Self::Meter,
        Self::Slots,
    ];

    /// Returns the limit in the notation of the rules file.
    pub(crate) fn limit(self) -> &'static str {
        match self {
            Self::FixedWindow => "{algorithm: fixed_window, limit: 20, window: 1min}",
            Self::FirstRequest => {
                "{algorithm: fixed_window, limit: 20, window: 1min, anchor: first_request}"
            }
            Self::Budget => {
                "{algorithm: fixed_window, limit: 20, anchor: {calendar: day, zone: UTC}}"
            }
            Self::Log => "{algorithm: sliding_window_log, limit: 20, window: 1min}",
            Self::Buckets => {
                "{algorithm: sliding_window_counter, limit: 20, window: 1min, buckets: 6}"
            }
            Self::Weighted => "{algorithm: sliding_window_counter, limit: 20, window: 1min}",
            Self::TokenBucket => "{algorithm: token_bucket, capacity: 20, refill: 20/min}",
            Self::Gcra => "{algorithm: gcra, rate: 20/min, burst: 19}",
            Self::Meter => "{algorithm: leaky_bucket, capacity: 20, leak: 20/min}",
            Self::Slots => "{algorithm: concurrency, limit: 3, lease: 30s}",
        }
    }

    /// Returns twice the limit, with the same window or lease. The limit is not a bucket.
    pub(crate) fn doubled_limit(self) -> String {
        let limit = self.limit();
        let doubled = limit.replace("limit: 20", "limit: 40");
        let doubled = doubled.replace("limit: 3,", "limit: 6,");
        assert_ne!(doubled, limit, "the rate of a bucket would change");
        doubled
    }

    fn most(self) -> u64 {
        if self == Self::Slots { SLOTS } else { LIMIT }
    }

    pub(crate) fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket | Self::Gcra | Self::Meter)
    }
}

/// The state of a key.
#[derive(Clone, Debug)]
struct Key {
    kind: Kind,
    /// The limit.
    most: u64,
    /// The highest limit until now. Lowering a limit refunds nothing.
    highest_most: u64,
    /// The units at each position: an instant, a window, or a part of a window. Empty for a bucket.
    units: BTreeMap<u64, u64>,
    /// All charges and refunds of a bucket that could have had an effect, as if the unused units
    /// had never been charged.
    events: Vec<(u64, i64)>,
    /// The highest possible level of a bucket, in microseconds, and the instant of this level.
    highest: (u64, u64),
    /// The number of resets.
    resets: u64,
    /// The number of events of a bucket before the latest refund of a charge from before a reset.
    /// Such a refund may remove units of these events.
    blurred: usize,
}

/// A charge of a reservation.
#[derive(Clone, Copy, Debug)]
struct Charge {
    key: usize,
    /// The position of the units; for a bucket, the index of the event.
    position: u64,
    units: u64,
    /// The number of resets of the key before the charge.
    resets: u64,
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
    Settled(Remaining),
    /// The reservation was already settled at the same cost.
    Repeated,
    /// The reservation was already settled at another cost.
    SettledBefore,
    /// The reservation was already settled and would have expired, so the server may have forgotten
    /// the settlement.
    Forgotten,
    NotOutstanding,
}

/// The expected result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    Renewed,
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
        Self {
            kind,
            most: kind.most(),
            highest_most: kind.most(),
            units: BTreeMap::new(),
            events: Vec::new(),
            highest: (0, 0),
            resets: 0,
            blurred: 0,
        }
    }

    /// Returns the position of units that are charged at `now`.
    fn position(&self, now: u64) -> u64 {
        match self.kind {
            Kind::FixedWindow | Kind::Weighted => now / WINDOW,
            Kind::Budget => now / DAY,
            Kind::Buckets => now / (WINDOW / 6),
            Kind::Log | Kind::Slots => now,
            Kind::FirstRequest => {
                let current = self.units.keys().find(|end| **end > now);
                current.copied().unwrap_or(now + WINDOW)
            }
            Kind::TokenBucket | Kind::Gcra | Kind::Meter => self.events.len() as u64,
        }
    }

    /// Returns the units that count at `now`, as a numerator and a denominator.
    fn counted(&self, now: u64) -> (u64, u64) {
        let sum = |counts: &dyn Fn(u64) -> bool| {
            let counted = self.units.iter().filter(|(position, _)| counts(**position));
            counted.map(|(_, units)| *units).sum::<u64>()
        };
        match self.kind {
            Kind::FixedWindow => (sum(&|at| at == now / WINDOW), 1),
            Kind::Budget => (sum(&|at| at == now / DAY), 1),
            Kind::FirstRequest => (sum(&|end| end > now), 1),
            Kind::Log => (sum(&|at| at + WINDOW > now), 1),
            Kind::Slots => (sum(&|at| at + LEASE > now), 1),
            // A strict counter also sums the sub-window in which the window begins.
            Kind::Buckets => (sum(&|at| at + 7 > now / (WINDOW / 6)), 1),
            Kind::Weighted => {
                let previous = sum(&|at| at + 1 == now / WINDOW) * (WINDOW - now % WINDOW);
                (previous + sum(&|at| at == now / WINDOW) * WINDOW, WINDOW)
            }
            Kind::TokenBucket | Kind::Gcra | Kind::Meter => unreachable!("a bucket has a level"),
        }
    }

    fn lowest_level(&self, now: u64) -> u64 {
        let (mut level, mut last) = (0_u64, 0);
        for (at, units) in &self.events {
            level = level.saturating_sub(at - last);
            let size = units.unsigned_abs() * UNIT;
            level = if *units < 0 {
                level.saturating_sub(size)
            } else {
                level + size
            };
            last = *at;
        }
        level.saturating_sub(now - last)
    }

    fn highest_level(&self, now: u64) -> u64 {
        let (level, at) = self.highest;
        level.saturating_sub(now - at)
    }

    fn remaining(&self, now: u64) -> Remaining {
        let most = self.most;
        if self.kind.is_bucket() {
            let left = |level: u64| (most * UNIT).saturating_sub(level) / UNIT;
            return Remaining {
                least: left(self.highest_level(now)),
                most: left(self.lowest_level(now)),
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
        let position = self.position(now);
        if self.kind.is_bucket() {
            self.events.push((now, least.cast_signed()));
            self.highest = (self.highest_level(now) + most * UNIT, now);
        } else {
            assert_eq!(least, most, "only the level of a bucket is not exact");
            if most > 0 {
                *self.units.entry(position).or_default() += most;
            }
        }
        position
    }

    /// Refunds `unused` units of a charge that was made at `since`.
    fn refund(&mut self, charge: Charge, unused: u64, since: u64, now: u64) {
        if !self.kind.is_bucket() {
            if let Some(units) = self.units.get_mut(&charge.position) {
                *units = units.saturating_sub(unused);
            }
            self.units.retain(|_, units| *units > 0);
            return;
        }
        if charge.resets < self.resets {
            // The charge is gone. The refund may remove units of other charges.
            self.events.push((now, -unused.cast_signed()));
            self.blurred = self.events.len();
            return;
        }
        let event = usize::try_from(charge.position).unwrap();
        if event < self.blurred {
            // Another refund may have removed the units, so this refund may remove further units.
            self.events.push((now, -unused.cast_signed()));
        } else {
            self.events[event].1 -= unused.cast_signed();
        }
        let undrained = (charge.units * UNIT).saturating_sub(now - since);
        let refunded = undrained.min(unused * UNIT);
        self.highest = (self.highest_level(now).saturating_sub(refunded), now);
    }

    fn reset(&mut self) {
        let resets = self.resets + 1;
        *self = Self {
            resets,
            most: self.most,
            highest_most: self.most,
            ..Self::new(self.kind)
        };
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
            if !key.kind.is_bucket() {
                let (counted, one) = key.counted(self.now);
                assert!(counted <= key.highest_most * one, "{key:?} at {}", self.now);
            } else if key.resets == 0 {
                assert!(key.lowest_level(self.now) <= LIMIT * UNIT, "{key:?}");
            }
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

    fn charge_each(&mut self, keys: &[usize], cost: u64) -> Vec<Charge> {
        let mut charges = Vec::new();
        for key in keys {
            let units = self.units(*key, cost);
            let state = &mut self.keys[*key];
            charges.push(Charge {
                key: *key,
                position: state.charge(units, units, self.now),
                units,
                resets: state.resets,
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
        let has_slots = keys.iter().any(|key| self.keys[*key].kind == Kind::Slots);
        let mut ttl = if has_slots { ttl.min(LEASE) } else { ttl };
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

    fn end(&mut self, which: usize, end: End, final_cost: u64) {
        let held = &mut self.held[which];
        held.end = Some(end);
        let (at, charges) = (held.at, held.charges.clone());
        for charge in charges {
            let key = &mut self.keys[charge.key];
            let unused = match key.kind {
                Kind::Slots => charge.units,
                _ => charge.units.saturating_sub(final_cost),
            };
            key.refund(charge, unused, at, self.now);
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
        self.end(which, End::Settled(cost), cost);
        let excess = cost.saturating_sub(reserved);
        let mut charged = Remaining {
            least: cost,
            most: cost,
        };
        for charge in charges {
            if self.keys[charge.key].kind == Kind::Slots || is_of_counters {
                continue;
            }
            let left = self.remaining(charge.key);
            let (least, most) = (excess.min(left.least), excess.min(left.most));
            self.keys[charge.key].charge(least, most, self.now);
            charged.least = charged.least.min(cost - (excess - least));
            charged.most = charged.most.min(cost - (excess - most));
        }
        Settlement::Settled(charged)
    }

    /// Renews a reservation for `ttl`.
    pub(crate) fn renew(&mut self, server: usize, which: usize, ttl: u64) -> Renewal {
        let held = &mut self.held[which];
        if held.end.is_some() {
            return Renewal::NotOutstanding;
        }
        if held.expires <= self.now {
            self.end_if_local(which);
            return Renewal::NotOutstanding;
        }
        let mut renewal = Renewal::Renewed;
        let mut ttl = ttl;
        for charge in &mut held.charges {
            let key = &mut self.keys[charge.key];
            if key.kind != Kind::Slots {
                continue;
            }
            ttl = ttl.min(LEASE);
            let has_slot = key.units.remove(&charge.position).is_some();
            if has_slot || key.remaining(self.now).least > 0 {
                charge.position = key.charge(1, 1, self.now);
            } else {
                renewal = Renewal::SlotLost;
            }
        }
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

    /// Doubles the limit of some keys, or restores it. The units that are counted stay counted, and
    /// are refunded as before.
    pub(crate) fn set_doubled(&mut self, keys: Range<usize>, is_doubled: bool) {
        for key in &mut self.keys[keys] {
            key.most = key.kind.most() * if is_doubled { 2 } else { 1 };
            key.highest_most = key.highest_most.max(key.most);
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
            (key.most, key.highest_most) = (before.most, before.highest_most);
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
