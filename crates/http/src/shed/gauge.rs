//! How many are in flight, and who may join them.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use http::{HeaderValue, Response, StatusCode};
use tidegate_core::{
    LimitError, Span, Timestamp,
    adaptive::{Adaptive, AdaptiveSettings, Ended},
};

use super::Room;
use crate::Clock;

// Codes of gRPC, as they stand in a header.
const DEADLINE_EXCEEDED: &[u8] = b"4";
const RESOURCE_EXHAUSTED: &[u8] = b"8";
const UNAVAILABLE: &[u8] = b"14";

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

/// The share of the places that requests of a class may use, in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// All of them.
    pub const ALL: Self = Self(100);

    /// So many percent of them, 1 to 100, rounded down, and one always.
    ///
    /// # Errors
    ///
    /// Names `shares`.
    pub fn new(percent: u32) -> Result<Self, LimitError> {
        if !(1..=100).contains(&percent) {
            let problem = format!("must be 1 to 100 percent each, got {percent}");
            return Err(LimitError::new("shares", problem));
        }
        Ok(Self(percent))
    }
}

/// How many requests a service has at once, and whether it bears another: what a [`ShedLayer`](super::ShedLayer) goes by, for who
/// knows more of the service than a layer does.
#[derive(Debug)]
pub struct Gauge {
    adaptive: Mutex<Adaptive>,
    /// What the limit came to last, for those who only read it.
    limit: AtomicU32,
    /// How slow requests were lately, in percent of the usual; the most as long as that is not known.
    slowness: AtomicU64,
    in_flight: AtomicU32,
    shed: AtomicU64,
    clock: Clock,
}

impl Gauge {
    /// A service of which nothing is known yet.
    ///
    /// # Errors
    ///
    /// What [`Adaptive::new`] refuses.
    pub fn new(settings: AdaptiveSettings, clock: Clock) -> Result<Self, LimitError> {
        let adaptive = Adaptive::new(settings)?;
        Ok(Self {
            limit: AtomicU32::new(adaptive.limit()),
            adaptive: Mutex::new(adaptive),
            slowness: AtomicU64::new(u64::MAX),
            in_flight: AtomicU32::new(0),
            shed: AtomicU64::new(0),
            clock,
        })
    }

    /// Goes on under other `settings`, with what it has learnt and with whoever is in flight.
    ///
    /// # Errors
    ///
    /// What [`Adaptive::change`] refuses.
    pub fn change(&self, settings: AdaptiveSettings) -> Result<(), LimitError> {
        let mut adaptive = self.adaptive();
        adaptive.change(settings)?;
        self.publish(&adaptive);
        Ok(())
    }

    /// Whether one of those who may use this share would get a place now. Nobody is counted as shed.
    #[must_use]
    pub fn has_place(&self, share: Share) -> bool {
        self.in_flight.load(Ordering::Acquire) < self.most(share)
    }

    /// A place for one of those who may use this share, if there is one; else it counts as shed.
    #[must_use]
    pub fn enter(self: &Arc<Self>, share: Share) -> Option<Held> {
        let most = self.most(share);
        let entered =
            self.in_flight
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |in_flight| {
                    (in_flight < most).then_some(in_flight + 1)
                });
        if entered.is_err() {
            self.shed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Held {
            gauge: Arc::clone(self),
            since: self.clock.now(),
            paused: None,
            ended: None,
        })
    }

    /// Whether there is room for more than the usual.
    #[must_use]
    pub fn has(&self, room: Room) -> bool {
        let load = self.load();
        match room {
            Room::InFlight(percent) => {
                u64::from(load.in_flight) * 100 < u64::from(load.limit) * u64::from(percent)
            }
            Room::Latency(percent) => self.slowness.load(Ordering::Relaxed) < u64::from(percent),
        }
    }

    /// How busy the service is.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            limit: self.limit.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            shed: self.shed.load(Ordering::Relaxed),
        }
    }

    /// The most that may be in flight for one of those to join them.
    fn most(&self, Share(percent): Share) -> u32 {
        let limit = u64::from(self.limit.load(Ordering::Relaxed));
        // Rounded down: the last place is kept for those who may have all. Where it is the only one it is anybody's.
        let most = (limit * u64::from(percent) / 100).max(1);
        // No more than the limit, or one.
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// One has ended who was one of `in_flight`, himself included.
    fn learn(&self, in_flight: u32, ended: Ended) {
        if ended != Ended::Ignored {
            let mut adaptive = self.adaptive();
            adaptive.learn(self.clock.now(), in_flight, ended);
            self.publish(&adaptive);
        }
    }

    fn publish(&self, adaptive: &Adaptive) {
        self.limit.store(adaptive.limit(), Ordering::Relaxed);
        let slowness = adaptive.slowness().unwrap_or(u64::MAX);
        self.slowness.store(slowness, Ordering::Relaxed);
    }

    /// What it has learnt is sound at any moment, a panic in between or not.
    fn adaptive(&self) -> MutexGuard<'_, Adaptive> {
        self.adaptive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those in flight, until it is dropped. Who drops it without a word has given up.
#[derive(Debug)]
pub struct Held {
    gauge: Arc<Gauge>,
    since: Timestamp,
    /// Since when the service has had nothing to do for it.
    paused: Option<Timestamp>,
    ended: Option<Ended>,
}

impl Held {
    /// The service can do nothing for the request until its client sends more. Until then others may have its place, and the time does not
    /// count. Does nothing to one that is paused.
    pub fn pause(&mut self) {
        if self.paused.is_none() {
            self.paused = Some(self.gauge.clock.now());
            self.gauge.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The service has the request before it again: it has a place, and be it one too many. Does nothing to one that is not paused.
    pub fn resume(&mut self) {
        if let Some(paused) = self.paused.take() {
            self.since = self.since.after(self.gauge.clock.now().since(paused));
            self.gauge.in_flight.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The service has begun to answer. An answer with status 503 or 504, and gRPC's `UNAVAILABLE` and `DEADLINE_EXCEEDED` where they
    /// stand in its head, count as failures, 429 and `RESOURCE_EXHAUSTED` as nothing.
    pub fn answered<R>(self, answer: &Response<R>) {
        let grpc = answer.headers().get("grpc-status");
        match (answer.status(), grpc.map(HeaderValue::as_bytes)) {
            (StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT, _)
            | (_, Some(DEADLINE_EXCEEDED | UNAVAILABLE)) => self.failed(),
            // Refused for its own sake, and often sooner than any other is served.
            (StatusCode::TOO_MANY_REQUESTS, _) | (_, Some(RESOURCE_EXHAUSTED)) => self.refused(),
            _ => self.served(),
        }
    }

    /// The service failed in a way that says that it was asked too much.
    pub fn failed(mut self) {
        self.ended = Some(Ended::Dropped);
    }

    /// The request was refused for its own sake.
    pub fn refused(mut self) {
        self.ended = Some(Ended::Ignored);
    }

    fn served(mut self) {
        self.ended = Some(Ended::Served(self.age()));
    }

    fn age(&self) -> Span {
        let until = self.paused.unwrap_or_else(|| self.gauge.clock.now());
        until.since(self.since)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let ended = self.ended.unwrap_or_else(|| Ended::GivenUp(self.age()));
        let in_flight = &self.gauge.in_flight;
        let in_flight = match self.paused {
            None => in_flight.fetch_sub(1, Ordering::AcqRel),
            // It is one of them no more.
            Some(_) => in_flight.load(Ordering::Acquire).saturating_add(1),
        };
        self.gauge.learn(in_flight, ended);
    }
}
