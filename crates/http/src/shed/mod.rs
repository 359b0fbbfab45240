//! A tower layer that sheds what a service cannot bear: as many requests at once as it serves without slowing down, and no more.
//!
//! ```text
//! request ─▶ a place for its class? ─┬─▶ yes ─▶ inner service ─▶ its answer; how long it took ─▶ the next limit
//!                                    └─▶ no ──────────────────▶ 503, or gRPC's UNAVAILABLE
//! ```
//!
//! Nobody writes the limit down: an [`Adaptive`] one learns it from how long requests take until their answers begin. Where there are
//! not places enough for all, those of lower classes go first. It belongs outside of whatever costs time, and outside of a
//! [`LimiterLayer`](crate::LimiterLayer), whose rules can then see whether there is [room](ShedLayer::tell_room).

mod gauge;
mod service;

use std::{fmt, sync::Arc};

use http::request::Parts;
use tidegate_core::{LimitError, adaptive::AdaptiveSettings};
use tower_layer::Layer;

pub use self::{
    gauge::{Gauge, Held, Load, Share},
    service::{ShedFuture, Shedding},
};
use crate::Clock;

/// A tower layer that lets a service have as many requests at once as it can bear.
///
/// Clones, and all services that they wrap, share their places. A request has its place from when it comes until its answer
/// begins; what a slow client makes of the body is not the service's fault.
///
/// An error, an answer with status 503 or 504, and gRPC's `UNAVAILABLE` and `DEADLINE_EXCEEDED` where they come without a message
/// count as failures. 429 and `RESOURCE_EXHAUSTED` count as nothing. Whoever goes away sooner has waited at least so long.
///
/// # Examples
///
/// ```
/// use tidegate_core::adaptive::AdaptiveSettings;
/// use tidegate_http::{Clock, ShedLayer};
///
/// // Health checks may take the last place, batches no more than half of them.
/// let layer = ShedLayer::new(AdaptiveSettings::default(), Clock::real())
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
pub struct ShedLayer {
    gauge: Arc<Gauge>,
    shares: Arc<[Share]>,
    class: Arc<ClassOf>,
    room: Option<(Arc<str>, Room)>,
}

/// The class of a request.
type ClassOf = dyn Fn(&Parts) -> usize + Send + Sync;

/// What there is room by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Less than so many percent of the places are taken.
    InFlight(u32),
    /// Requests took less than so many percent of how long they take when they do not wait for each other, such as 120. Not so
    /// before that is known, and with [`Method::Aimd`](tidegate_core::adaptive::Method::Aimd) never.
    Latency(u32),
}

impl ShedLayer {
    /// The most classes.
    pub const MAX_CLASSES: usize = 16;

    /// A layer that adapts as `settings` say, and treats all requests alike.
    ///
    /// # Errors
    ///
    /// What [`Adaptive::new`](tidegate_core::adaptive::Adaptive::new) refuses.
    pub fn new(settings: AdaptiveSettings, clock: Clock) -> Result<Self, LimitError> {
        Ok(Self {
            gauge: Arc::new(Gauge::new(settings, clock)?),
            shares: Arc::new([Share::ALL]),
            class: Arc::new(|_| 0),
            room: None,
        })
    }

    /// Tells requests apart: those of class `n` may use `shares[n]` percent of the places, rounded down, and one always. `class`
    /// finds a request's class by what is known of it before its body; one beyond the last counts as the last.
    ///
    /// # Errors
    ///
    /// Names `shares` if there are none, more than [`Self::MAX_CLASSES`], or one is not from 1 to 100.
    pub fn classes(
        mut self,
        shares: &[u32],
        class: impl Fn(&Parts) -> usize + Send + Sync + 'static,
    ) -> Result<Self, LimitError> {
        let problem = match shares.len() {
            0 => "must name the share of at least one class".to_owned(),
            count if count > Self::MAX_CLASSES => {
                format!(
                    "{count} classes are over the maximum of {}",
                    Self::MAX_CLASSES
                )
            }
            _ => {
                let shares = shares.iter().map(|share| Share::new(*share));
                self.shares = shares.collect::<Result<_, _>>()?;
                self.class = Arc::new(class);
                return Ok(self);
            }
        };
        Err(LimitError::new("shares", problem))
    }

    /// The share of the class `n`.
    fn share(&self, class: usize) -> Share {
        let last = self.shares.len() - 1;
        self.shares[class.min(last)]
    }

    /// Tells those behind this layer whether there is `room`, in the entry of that name in the request's
    /// [`Entries`](crate::Entries): `yes`, else `no`. A rule's `elastic` goes by it.
    #[must_use]
    pub fn tell_room(mut self, entry: &str, room: Room) -> Self {
        self.room = Some((entry.into(), room));
        self
    }

    /// How busy the service is, for metrics.
    #[must_use]
    pub fn load(&self) -> Load {
        self.gauge.load()
    }
}

impl fmt::Debug for ShedLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShedLayer")
            .field("load", &self.load())
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = Shedding<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Shedding::new(inner, self.clone())
    }
}
