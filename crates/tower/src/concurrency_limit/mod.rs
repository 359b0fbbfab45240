//! A tower layer that sheds load. The layer admits only as many concurrent requests as the service
//! can handle without slowing down.
//!
//! ```text
//! request ─▶ free slot for its class? ─┬─▶ yes ─▶ inner service ─▶ response; latency ─▶ new limit
//!                                      └─▶ no ───────────────────▶ 503, or gRPC's UNAVAILABLE
//! ```
//!
//! The limit is not configured: [`AdaptiveLimit`](tidegate_core::concurrency::AdaptiveLimit)
//! computes it from the latency, which is the time until responses begin. Under overload, requests
//! of lower classes are shed first.
//!
//! Place the layer outside all layers that add latency. Also place the layer outside any
//! [`RateLimitLayer`](crate::RateLimitLayer), so that the rules of the `RateLimitLayer` can use the
//! [headroom](ConcurrencyLimitLayer::export_headroom).

mod limiter;
mod service;

use std::{fmt, sync::Arc};

use http::request::Parts;
use tidegate_core::{LimitError, concurrency::AdaptiveSettings};
use tower_layer::Layer;

pub use self::{
    limiter::{ConcurrencyLimiter, ConcurrencyPermit, Load, SlotShare},
    service::{ConcurrencyLimit, ConcurrencyLimitFuture},
};
use tidegate::Clock;

/// A tower layer that limits the number of concurrent requests to what a service can handle.
///
/// Clones of the layer, and all services that they wrap, share the same slots. A request holds its
/// slot from its arrival until its response begins. The layer does not measure the time to send the
/// body, which depends on the client.
///
/// An error counts as a failure. A response with status 503 or 504 also counts as a failure, and so
/// does a gRPC response without a message whose status is `UNAVAILABLE` or `DEADLINE_EXCEEDED`.
/// Responses with status 429 or `RESOURCE_EXHAUSTED` are not measured. If a request is cancelled
/// before its response begins, the time until the cancellation is used as a lower bound for the
/// latency.
///
/// # Examples
///
/// ```
/// use tidegate_core::concurrency::AdaptiveSettings;
/// use tidegate::Clock;
/// use tidegate_tower::ConcurrencyLimitLayer;
///
/// // Health checks may use all slots, batch requests at most half of them.
/// let layer = ConcurrencyLimitLayer::new(AdaptiveSettings::default(), Clock::real())
///     .unwrap()
///     .classes(&[100, 90, 50], |request| match request.uri.path() {
///         "/healthz" => 0,
///         path if path.starts_with("/batch/") => 2,
///         _ => 1,
///     })
///     .unwrap();
/// assert_eq!(layer.load().limit, 20);
/// ```
#[derive(Clone)]
pub struct ConcurrencyLimitLayer {
    limiter: Arc<ConcurrencyLimiter>,
    shares: Arc<[SlotShare]>,
    class: Arc<ClassOf>,
    headroom: Option<(Arc<str>, HeadroomCondition)>,
}

/// A function that returns the class number of a request.
type ClassOf = dyn Fn(&Parts) -> usize + Send + Sync;

/// The condition for headroom. Headroom is spare capacity, which elastic rules may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadroomCondition {
    /// The service has headroom if less than this percentage of the slots is in use.
    InFlight(u32),
    /// The service has headroom if the latency is below this percentage (such as 120) of the
    /// baseline, which is the latency without queueing. The condition is false while the baseline
    /// is unknown. With [`Method::Aimd`](tidegate_core::concurrency::Method::Aimd), the condition
    /// is always false.
    Latency(u32),
}

impl ConcurrencyLimitLayer {
    /// The maximum number of classes.
    pub const MAX_CLASSES: usize = 16;

    /// Creates a layer with these `settings`. All requests have the same class.
    ///
    /// # Errors
    ///
    /// Returns an error if [`AdaptiveLimit::new`](tidegate_core::concurrency::AdaptiveLimit::new)
    /// rejects the settings.
    pub fn new(settings: AdaptiveSettings, clock: Clock) -> Result<Self, LimitError> {
        Ok(Self {
            limiter: Arc::new(ConcurrencyLimiter::new(settings, clock)?),
            shares: Arc::new([SlotShare::ALL]),
            class: Arc::new(|_| 0),
            headroom: None,
        })
    }

    /// Assigns requests to classes. The function `class` returns the class number for a request
    /// head. If the number is too large, the request belongs to the last class. Requests of class
    /// `n` may use `shares[n]` percent of the slots, rounded down but at least one.
    ///
    /// # Errors
    ///
    /// Returns an error if `shares` is empty or has more than [`Self::MAX_CLASSES`] elements, or if
    /// a share is not between 1 and 100.
    pub fn classes(
        mut self,
        shares: &[u32],
        class: impl Fn(&Parts) -> usize + Send + Sync + 'static,
    ) -> Result<Self, LimitError> {
        let problem = match shares.len() {
            0 => "must have the share of at least one class".to_owned(),
            count if count > Self::MAX_CLASSES => {
                format!(
                    "{count} classes exceed the maximum of {}",
                    Self::MAX_CLASSES
                )
            }
            _ => {
                let shares = shares.iter().map(|share| SlotShare::new(*share));
                self.shares = shares.collect::<Result<_, _>>()?;
                self.class = Arc::new(class);
                return Ok(self);
            }
        };
        Err(LimitError::new("shares", problem))
    }

    /// Returns the share of slots that the class with this number may use.
    fn share(&self, class: usize) -> SlotShare {
        let last = self.shares.len() - 1;
        self.shares[class.min(last)]
    }

    /// Adds an entry to the [`Entries`](tidegate_identity::Entries) of each request. The value of
    /// the entry is `yes` if the service has headroom, and `no` otherwise. Rules of inner layers
    /// can use the entry in their `elastic` condition.
    #[must_use]
    pub fn export_headroom(mut self, entry: &str, condition: HeadroomCondition) -> Self {
        self.headroom = Some((entry.into(), condition));
        self
    }

    /// Returns the current load of the service, for metrics.
    #[must_use]
    pub fn load(&self) -> Load {
        self.limiter.load()
    }
}

impl fmt::Debug for ConcurrencyLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimitLayer")
            .field("load", &self.load())
            .field("headroom", &self.headroom)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for ConcurrencyLimitLayer {
    type Service = ConcurrencyLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ConcurrencyLimit::new(inner, self.clone())
    }
}
