//! The state of the reservations that this server has made: the keys that seal tokens, the table of
//! outstanding reservations, and the counters.

mod error;
mod expiry_queue_changes;
mod expiry_queue_writer;
mod random_id;
mod rejections;
mod reservation_reader;
mod settled;
pub(crate) mod stored_limits;
mod table;
mod token;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use tidegate_config::ReservationsConfig;
use tidegate_core::{Span, Timestamp};
use tidegate_net::prometheus::{self, Metric, Page};
use tokio::sync::Notify;

pub use self::{
    error::{NotOutstanding, ReservationError, ReserveError},
    token::NoTokenKey,
};
use self::{expiry_queue_writer::ExpiryQueueWriter, rejections::Rejections};
pub(crate) use self::{
    random_id::random_id,
    table::{OutstandingReservation, OutstandingTable, ReservationPermit, redis_receipt},
    token::{
        ChargesHolder, ReservationId, ReservationKind, SharedCharge, TokenCharges, TokenContents,
        TokenHead, TokenKeys,
    },
};

/// The maximum sleep time of the task that ends expired reservations.
pub(crate) const MAX_SLEEP: Span = Span::from_secs(1);

const OUTSTANDING: Metric = Metric::gauge(
    "tidegate_reservations_outstanding",
    [],
    "Reservations that this server has made or renewed, and that have neither expired nor been settled by a call to this server.",
);

const ENDED: Metric<1> = Metric::counter(
    "tidegate_reservations_ended_total",
    ["by"],
    "Reservations ended by this server: settled by their holder (`settle`), expired (`expiry`), or not refunded because Redis was unreachable, or no server was running, for too long after they expired (`lost`).",
);

/// The reservations of a server.
#[derive(Debug)]
pub struct Reservations {
    pub(crate) settings: ReservationsConfig,
    pub(crate) keys: TokenKeys,
    pub(crate) table: Mutex<OutstandingTable>,
    pub(crate) permits: Arc<AtomicUsize>,
    /// Writes the outstanding reservations to Redis.
    pub(crate) expiry_queue: ExpiryQueueWriter,
    /// Wakes the task that ends expired reservations.
    pub(crate) added: Notify,
    pub(crate) settled: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) rejections: Rejections,
}

impl Reservations {
    /// Creates the state of a server on which reservations are off.
    pub(crate) fn off() -> Self {
        let settings = ReservationsConfig {
            max: 0,
            ..ReservationsConfig::default()
        };
        Self::with_keys(settings, TokenKeys::default())
    }

    /// Creates the reservations of a server. `secrets` contains the secrets that seal tokens,
    /// separated by spaces. The first secret seals new tokens. A token sealed with any of the
    /// secrets is accepted. Without secrets, a random key is used, so only this server accepts its
    /// tokens, and only until it restarts.
    ///
    /// # Errors
    ///
    /// Fails without `secrets` if the operating system provides no random bytes.
    pub fn new(settings: ReservationsConfig, secrets: Option<&str>) -> Result<Self, NoTokenKey> {
        let keys = match secrets {
            Some(secrets) => TokenKeys::new(secrets),
            None => TokenKeys::random()?,
        };
        Ok(Self::with_keys(settings, keys))
    }

    fn with_keys(settings: ReservationsConfig, keys: TokenKeys) -> Self {
        Self {
            table: Mutex::new(OutstandingTable::new(settings.max)),
            settings,
            keys,
            permits: Arc::default(),
            expiry_queue: ExpiryQueueWriter::default(),
            added: Notify::new(),
            settled: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            rejections: Rejections::default(),
        }
    }

    /// Returns the random key that seals tokens, for another process; `None` if the configuration
    /// contains the secrets.
    pub(crate) fn own_key(&self) -> Option<&[u8]> {
        self.keys.own()
    }

    /// Uses the random key of another process instead of this process's own key, unless the
    /// configuration contains the secrets. Returns false if `key` is not valid.
    pub(crate) fn take_key(&self, key: &[u8]) -> bool {
        self.keys.take(key)
    }

    /// Returns whether reservations are off.
    #[must_use]
    pub fn are_off(&self) -> bool {
        self.settings.max == 0
    }

    /// Opens the token of a reservation of a request.
    pub(crate) fn open(&self, token: &str) -> Result<TokenContents, ReservationError> {
        if self.are_off() {
            return Err(ReservationError::Off);
        }
        let contents = self.keys.open(token, ReservationKind::Request);
        contents.ok_or(ReservationError::Invalid)
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, OutstandingTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a permit for a reservation, unless there are too many.
    pub(crate) fn permit(&self) -> Option<ReservationPermit> {
        ReservationPermit::take(&self.permits, self.settings.max)
    }

    /// Adds a reservation at `now`.
    pub(crate) fn insert(
        &self,
        id: ReservationId,
        outstanding: OutstandingReservation,
        now: Timestamp,
    ) {
        let due_at = outstanding.due_at;
        self.table().insert(id, outstanding);
        self.wake_expiry(due_at, now);
    }

    /// Removes and returns an outstanding reservation.
    pub(crate) fn take(
        &self,
        id: &ReservationId,
    ) -> Result<OutstandingReservation, ReservationError> {
        let mut table = self.table();
        if table.is_moved {
            return Err(ReservationError::Moved);
        }
        let taken = table.remove(id);
        Ok(taken.ok_or(NotOutstanding::Unknown)?)
    }

    /// Wakes the task that ends expired reservations if it could otherwise sleep beyond `due_at`.
    /// The task sleeps at most [`MAX_SLEEP`], so a later reservation needs no wake-up.
    /// Waking the task takes longer than making a reservation.
    pub(crate) fn wake_expiry(&self, due_at: Timestamp, now: Timestamp) {
        if due_at.since(now) < MAX_SLEEP {
            self.added.notify_one();
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let outstanding = self.permits.load(Ordering::Relaxed);
        page.single(&OUTSTANDING, prometheus::count(outstanding));
        let ended = [
            ("settle", &self.settled),
            ("expiry", &self.expired),
            ("lost", &self.lost),
        ];
        page.family(
            &ENDED,
            ended
                .into_iter()
                .map(|(by, count)| ([by], count.load(Ordering::Relaxed))),
        );
        self.rejections.collect(page);
        self.expiry_queue.collect(page);
    }
}
