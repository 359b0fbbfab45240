//! How many are in flight, and who may join them.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use tidegate_core::{
    LimitError, Span, Timestamp,
    adaptive::{Adaptive, Ended},
};

use super::Room;
use crate::Clock;

/// How busy a service is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Load {
    /// The most at once now.
    pub limit: u32,
    /// How many there are.
    pub in_flight: u32,
    /// How many were shed so far.
    pub shed: u64,
}

#[derive(Debug)]
pub(super) struct Gauge {
    adaptive: Mutex<Adaptive>,
    /// What the limit came to last, for those who only read it.
    limit: AtomicU32,
    /// How slow requests were lately, in percent of the usual; the most as long as that is not known.
    slowness: AtomicU64,
    in_flight: AtomicU32,
    shed: AtomicU64,
    shares: Box<[u32]>,
    clock: Clock,
}

/// The most classes.
const MAX_CLASSES: usize = 16;

impl Gauge {
    pub(super) fn new(adaptive: Adaptive, clock: Clock) -> Self {
        Self {
            limit: AtomicU32::new(adaptive.limit()),
            adaptive: Mutex::new(adaptive),
            slowness: AtomicU64::new(u64::MAX),
            in_flight: AtomicU32::new(0),
            shed: AtomicU64::new(0),
            shares: Box::new([100]),
            clock,
        }
    }

    /// The same, with nobody in flight, for classes that have so many percent of the places.
    pub(super) fn with_shares(&self, shares: &[u32]) -> Result<Self, LimitError> {
        let problem = match shares {
            [] => Some("must name the share of at least one class".to_owned()),
            _ if shares.len() > MAX_CLASSES => Some(format!(
                "{} classes are over the maximum of {MAX_CLASSES}",
                shares.len()
            )),
            _ => shares
                .iter()
                .find(|share| !(1..=100).contains(*share))
                .map(|share| format!("must be 1 to 100 percent each, got {share}")),
        };
        if let Some(problem) = problem {
            return Err(LimitError::new("shares", problem));
        }
        let adaptive = self.adaptive().clone();
        Ok(Self {
            shares: shares.into(),
            ..Self::new(adaptive, self.clock.clone())
        })
    }

    /// A place for a request of that class, if there is one.
    pub(super) fn enter(self: &Arc<Self>, class: usize) -> Option<Place> {
        let most = self.most(class);
        let entered =
            self.in_flight
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |in_flight| {
                    (in_flight < most).then_some(in_flight + 1)
                });
        if entered.is_err() {
            self.shed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Place {
            gauge: Arc::clone(self),
            since: self.clock.now(),
            ended: None,
        })
    }

    /// Whether there is room for more than the usual.
    pub(super) fn has(&self, room: Room) -> bool {
        let load = self.load();
        match room {
            Room::InFlight(percent) => {
                u64::from(load.in_flight) * 100 < u64::from(load.limit) * u64::from(percent)
            }
            Room::Latency(percent) => self.slowness.load(Ordering::Relaxed) < u64::from(percent),
        }
    }

    pub(super) fn load(&self) -> Load {
        Load {
            limit: self.limit.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            shed: self.shed.load(Ordering::Relaxed),
        }
    }

    /// The most that may be in flight for one of that class to join them.
    fn most(&self, class: usize) -> u32 {
        let last = self.shares.len() - 1;
        let share = u64::from(self.shares[class.min(last)]);
        let limit = u64::from(self.limit.load(Ordering::Relaxed));
        // Rounded down: the last place is kept for those who may have all. Where it is the only one it is anybody's.
        let most = (limit * share / 100).max(1);
        // No more than the limit, or one.
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    fn leave(&self, ended: Ended) {
        let in_flight = self.in_flight.fetch_sub(1, Ordering::AcqRel);
        if ended != Ended::Ignored {
            let mut adaptive = self.adaptive();
            adaptive.learn(self.clock.now(), in_flight, ended);
            self.limit.store(adaptive.limit(), Ordering::Relaxed);
            let slowness = adaptive.slowness().unwrap_or(u64::MAX);
            self.slowness.store(slowness, Ordering::Relaxed);
        }
    }

    /// What it has learnt is sound at any moment, a panic in between or not.
    fn adaptive(&self) -> std::sync::MutexGuard<'_, Adaptive> {
        self.adaptive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those in flight, until it is dropped. Who drops it without a word has given up.
#[derive(Debug)]
pub(super) struct Place {
    gauge: Arc<Gauge>,
    since: Timestamp,
    ended: Option<Ended>,
}

impl Place {
    /// The request was served.
    pub(super) fn served(mut self) {
        self.ended = Some(Ended::Served(self.age()));
    }

    /// The service failed in a way that says that it was asked too much.
    pub(super) fn failed(mut self) {
        self.ended = Some(Ended::Dropped);
    }

    /// The request was refused for its own sake.
    pub(super) fn refused(mut self) {
        self.ended = Some(Ended::Ignored);
    }

    fn age(&self) -> Span {
        self.gauge.clock.now().since(self.since)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let ended = self.ended.unwrap_or_else(|| Ended::GivenUp(self.age()));
        self.gauge.leave(ended);
    }
}
