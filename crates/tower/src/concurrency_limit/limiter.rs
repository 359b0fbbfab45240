//! The concurrency limiter, which counts the requests in flight and decides whether to admit a
//! request.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use http::{HeaderValue, Response, StatusCode};
use tidegate_core::{
    LimitError, Reason, Span, Timestamp,
    concurrency::{AdaptiveLimit, AdaptiveSettings, Completion},
};

use super::HeadroomCondition;
use crate::DenialInfo;
use tidegate::Clock;

// gRPC status codes, as header values.
const DEADLINE_EXCEEDED: &[u8] = b"4";
const RESOURCE_EXHAUSTED: &[u8] = b"8";
const UNAVAILABLE: &[u8] = b"14";

/// The current load of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Load {
    /// The current concurrency limit.
    pub limit: u32,
    /// The number of requests in flight.
    pub in_flight: u32,
    /// The number of requests shed (rejected because of overload) so far.
    pub shed: u64,
}

/// The percentage of the concurrency limit that requests of a class may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShare(u32);

impl SlotShare {
    /// All slots of the limit.
    pub const ALL: Self = Self(100);

    /// Creates a share of `percent` percent of the slots. The number of slots is rounded down, but
    /// is at least one.
    ///
    /// # Errors
    ///
    /// Returns an error for `shares` if `percent` is not between 1 and 100.
    pub fn new(percent: u32) -> Result<Self, LimitError> {
        if !(1..=100).contains(&percent) {
            let problem = format!("each share must be from 1 to 100 percent, got {percent}");
            return Err(LimitError::new("shares", problem));
        }
        Ok(Self(percent))
    }
}

/// The concurrency limiter of a service. A [`ConcurrencyLimitLayer`](super::ConcurrencyLimitLayer)
/// contains a limiter of this type. Use the limiter directly if your code knows more about the
/// service than the layer does.
#[derive(Debug)]
pub struct ConcurrencyLimiter {
    adaptive: Mutex<AdaptiveLimit>,
    /// A copy of the current limit, which can be read without the lock.
    limit: AtomicU32,
    /// The recent latency in percent of the baseline, which is the latency without queueing. The
    /// value is `u64::MAX` while the latency is unknown.
    latency_percent: AtomicU64,
    in_flight: AtomicU32,
    shed: AtomicU64,
    clock: Clock,
}

impl ConcurrencyLimiter {
    /// Creates a limiter without any measurements.
    ///
    /// # Errors
    ///
    /// Returns an error if [`AdaptiveLimit::new`] rejects the settings.
    pub fn new(settings: AdaptiveSettings, clock: Clock) -> Result<Self, LimitError> {
        let adaptive = AdaptiveLimit::new(settings)?;
        Ok(Self {
            limit: AtomicU32::new(adaptive.limit()),
            adaptive: Mutex::new(adaptive),
            latency_percent: AtomicU64::new(u64::MAX),
            in_flight: AtomicU32::new(0),
            shed: AtomicU64::new(0),
            clock,
        })
    }

    /// Replaces the settings. The measurements and the count of requests in flight do not change.
    ///
    /// # Errors
    ///
    /// Returns an error if [`AdaptiveLimit::change`] rejects the settings.
    pub fn change(&self, settings: AdaptiveSettings) -> Result<(), LimitError> {
        let mut adaptive = self.adaptive();
        adaptive.change(settings)?;
        self.publish(&adaptive);
        Ok(())
    }

    /// Returns true if fewer requests are in flight than `share` of the limit allows, so that a
    /// request would be admitted now. Unlike [`Self::try_acquire`], this method never counts a
    /// request as shed.
    #[must_use]
    pub fn has_free_slot(&self, share: SlotShare) -> bool {
        self.in_flight.load(Ordering::Acquire) < self.most(share)
    }

    /// Admits a request if fewer requests are in flight than `share` of the limit allows.
    /// Otherwise, counts the request as shed and returns `None`.
    #[must_use]
    pub fn try_acquire(self: &Arc<Self>, share: SlotShare) -> Option<ConcurrencyPermit> {
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
        Some(ConcurrencyPermit {
            limiter: Arc::clone(self),
            since: self.clock.now(),
            paused: None,
            completion: None,
        })
    }

    /// Returns true if the service has headroom (spare capacity) according to `condition`.
    #[must_use]
    pub fn has_headroom(&self, condition: HeadroomCondition) -> bool {
        let load = self.load();
        match condition {
            HeadroomCondition::InFlight(percent) => {
                u64::from(load.in_flight) * 100 < u64::from(load.limit) * u64::from(percent)
            }
            HeadroomCondition::Latency(percent) => {
                self.latency_percent.load(Ordering::Relaxed) < u64::from(percent)
            }
        }
    }

    /// Returns the current load.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            limit: self.limit.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            shed: self.shed.load(Ordering::Relaxed),
        }
    }

    /// Returns the number of slots available to requests with this share. A request is admitted if
    /// the number of slots in use is below the returned number.
    fn most(&self, SlotShare(percent): SlotShare) -> u32 {
        let limit = u64::from(self.limit.load(Ordering::Relaxed));
        // Round the number down, so that the last slot is reserved for requests with a share of 100
        // %. If there is only one slot, requests with any share may use this slot.
        let most = (limit * u64::from(percent) / 100).max(1);
        // The result is at most the limit, or 1, so it fits in a `u32`.
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Records the end of a request. `in_flight` is the number of requests in flight, including the
    /// request that ends.
    fn learn(&self, in_flight: u32, completion: Completion) {
        if completion != Completion::Ignored {
            let mut adaptive = self.adaptive();
            adaptive.learn(self.clock.now(), in_flight, completion);
            self.publish(&adaptive);
        }
    }

    fn publish(&self, adaptive: &AdaptiveLimit) {
        self.limit.store(adaptive.limit(), Ordering::Relaxed);
        let latency_percent = adaptive.latency_percent().unwrap_or(u64::MAX);
        self.latency_percent
            .store(latency_percent, Ordering::Relaxed);
    }

    /// Locks the measurements. A poisoned lock is safe to use, because the measurements are always
    /// consistent.
    fn adaptive(&self) -> MutexGuard<'_, AdaptiveLimit> {
        self.adaptive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit that holds a concurrency slot until it is dropped. If no result was reported before the
/// drop, the request is treated as cancelled.
#[derive(Debug)]
pub struct ConcurrencyPermit {
    limiter: Arc<ConcurrencyLimiter>,
    since: Timestamp,
    /// The time at which the slot was paused; `None` if the slot is in use.
    paused: Option<Timestamp>,
    completion: Option<Completion>,
}

impl ConcurrencyPermit {
    /// Frees the slot for other requests while the service waits for more data from the client. The
    /// paused time is not part of the measured latency. Does nothing if the slot is already paused.
    pub fn pause(&mut self) {
        if self.paused.is_none() {
            self.paused = Some(self.limiter.clock.now());
            self.limiter.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Takes the slot back when data resumes, even if the requests in flight then briefly exceed
    /// the limit. Does nothing if the slot is not paused.
    pub fn resume(&mut self) {
        if let Some(paused) = self.paused.take() {
            self.since = self.since.after(self.limiter.clock.now().since(paused));
            self.limiter.in_flight.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Releases the slot when the service has started to respond. A response counts as a failure if
    /// its status is 503 or 504, or if its head has the gRPC status `UNAVAILABLE` or
    /// `DEADLINE_EXCEEDED`. Responses with status 429 or `RESOURCE_EXHAUSTED` are not measured, and
    /// neither are denials by a `RateLimitLayer`.
    pub fn finish<R>(self, answer: &Response<R>) {
        let denial: Option<&DenialInfo> = answer.extensions().get();
        if denial.is_some_and(|denial| denial.reason == Reason::Limit) {
            return self.ignore();
        }
        let grpc = answer.headers().get("grpc-status");
        match (answer.status(), grpc.map(HeaderValue::as_bytes)) {
            (StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT, _)
            | (_, Some(DEADLINE_EXCEEDED | UNAVAILABLE)) => self.fail(),
            // Do not measure this response: the request itself caused the rejection, and a
            // rejection often takes less time than a normal response.
            (StatusCode::TOO_MANY_REQUESTS, _) | (_, Some(RESOURCE_EXHAUSTED)) => self.ignore(),
            _ => self.served(),
        }
    }

    /// Releases the slot after a failure that indicates overload.
    pub fn fail(mut self) {
        self.completion = Some(Completion::Dropped);
    }

    /// Releases the slot without a measurement. Use this method for a request that was rejected for
    /// a reason in the request itself.
    pub fn ignore(mut self) {
        self.completion = Some(Completion::Ignored);
    }

    fn served(mut self) {
        self.completion = Some(Completion::Served(self.age()));
    }

    fn age(&self) -> Span {
        let until = self.paused.unwrap_or_else(|| self.limiter.clock.now());
        until.since(self.since)
    }
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let completion = self
            .completion
            .unwrap_or_else(|| Completion::Abandoned(self.age()));
        let in_flight = &self.limiter.in_flight;
        let in_flight = match self.paused {
            None => in_flight.fetch_sub(1, Ordering::AcqRel),
            // Add the paused request, because `in_flight` does not include it.
            Some(_) => in_flight.load(Ordering::Acquire).saturating_add(1),
        };
        self.limiter.learn(in_flight, completion);
    }
}
