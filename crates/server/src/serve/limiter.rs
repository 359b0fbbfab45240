//! Builds the limiter: store, rules, candidate, events, reservations, and the restored state.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use tidegate::Clock;
use tidegate_config::{Config, EventsConfig, RecordConfig, Snapshot, check_secrets};
use tidegate_core::MemoryStore;
use tidegate_limiter::{
    Backend, KeyMask, RequestRecorder, ServerLimiter,
    events::{Events, WebhookSecret, WebhookSettings},
    reservations::Reservations,
    snapshot::{self, RestoreOutcome},
};

use super::{error::ServeError, preflight, secrets::Secrets};
use crate::{redis_runtime::RedisRuntime, reload::read_candidate};

/// The maximum time that the server waits for Redis at startup in order to read the overrides.
const OVERRIDES_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the counters of a memory store come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CounterSource {
    /// The snapshot, if one is configured.
    Snapshot,
    /// The old process of an upgrade, which sends the counters later.
    OldProcess,
}

/// Creates the limiter, moves the rules from `config` into it, and restores the counters from the
/// snapshot and the overrides from Redis.
pub(super) fn build(
    config: &mut Config,
    secrets: &Secrets,
    redis: Option<&RedisRuntime>,
    clock: &Clock,
    counters: CounterSource,
) -> Result<Arc<ServerLimiter>, ServeError> {
    let key_mask = config.key_privacy.mask(secrets.key_secret.as_deref())?;
    let events = config.events.0.as_ref();
    let events = events
        .map(|events| open_events(events, &secrets.webhook_secrets, &key_mask, clock))
        .transpose()?;
    let reservations = open_reservations(config, secrets.reservation_secrets.as_deref())?;
    let snapshot = config.snapshot.as_ref();
    let snapshot = snapshot.filter(|_| counters == CounterSource::Snapshot);
    let store = MemoryStore::new(config.memory);
    let outstanding = match snapshot {
        Some(snapshot) => restore(&store, snapshot, clock)?,
        None => Vec::new(),
    };
    let backend = match redis {
        None => Backend::Memory(store),
        Some(redis) => Backend::Redis(redis.fallback_store(store)),
    };
    let candidate = config
        .candidate
        .as_ref()
        .map(|candidate| read_candidate(candidate, &config.identity))
        .transpose()?;
    let rules = std::mem::take(&mut config.rules);
    let rules = match &candidate {
        Some(candidate) => rules.with_extra_entries_of(&candidate.rules),
        None => rules,
    };
    let record = config.record.take();
    let recorder = record.map(|record| open_recorder(record, &key_mask));
    let mut limiter = ServerLimiter::new(rules, backend, clock.clone())
        .with_trust(config.identity.trust.clone())
        .with_key_mask(key_mask)
        .with_recorder(recorder.transpose()?)
        .with_top(config.top.0)
        .with_denials(&config.denials)
        .with_reservations(reservations)
        .with_events(events.map(Arc::new));
    if let Some(snapshot) = &config.snapshot {
        restore_overrides(&mut limiter, snapshot, counters)?;
    }
    restore_reservations(&limiter, &outstanding);
    let limiter = Arc::new(limiter);
    limiter.set_candidate(candidate, config.memory);
    if let Some(snapshot) = &config.snapshot {
        limiter.snapshots().mark_configured();
        try_snapshot(snapshot, &limiter);
    }
    if let Some(redis) = redis {
        let limiter = Arc::clone(&limiter);
        redis.run(async move { limiter.read_overrides_at_start(OVERRIDES_TIMEOUT).await });
    }
    Ok(limiter)
}

/// Creates the reservations that `config` configures.
fn open_reservations(config: &Config, secrets: Option<&str>) -> Result<Reservations, ServeError> {
    if let Some(secrets) = secrets {
        check_secrets(secrets).map_err(ServeError::ReservationSecret)?;
    }
    Ok(Reservations::new(config.reservations.clone(), secrets)?)
}

/// Restores the overrides from the file next to the snapshot, or later from the old process of an
/// upgrade. Changes of overrides are saved to the same file.
fn restore_overrides(
    limiter: &mut ServerLimiter,
    snapshot: &Snapshot,
    counters: CounterSource,
) -> Result<(), ServeError> {
    let mut path = snapshot.path.clone().into_os_string();
    path.push(".overrides");
    let path = PathBuf::from(path);
    if counters == CounterSource::OldProcess {
        limiter.persist_overrides_later_in(path);
        return Ok(());
    }
    match limiter.persist_overrides_in(&path) {
        Ok(0) => Ok(()),
        Ok(count) => {
            tracing::info!(file = %path.display(), count, "overrides restored");
            Ok(())
        }
        // The folder does not exist. Writing snapshots to the missing folder fails too, but the
        // server starts anyway.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::warn!(
                file = %path.display(),
                "overrides are not kept across a restart, because their file cannot be written: {error}"
            );
            Ok(())
        }
        Err(source) => Err(ServeError::Overrides { path, source }),
    }
}

/// Opens the event destinations. `secrets` are the webhook secrets, in the order of the rules file.
fn open_events(
    settings: &EventsConfig,
    secrets: &[String],
    key_mask: &KeyMask,
    clock: &Clock,
) -> Result<Events, ServeError> {
    let webhooks = settings.webhooks.iter().zip(secrets).enumerate();
    let webhooks = webhooks.map(|(index, (webhook, secret))| {
        let secret = WebhookSecret::parse(secret)
            .map_err(|problem| ServeError::WebhookSecret { index, problem })?;
        Ok(WebhookSettings {
            url: webhook.url.clone(),
            secret,
            types: webhook.types.clone(),
        })
    });
    let webhooks = webhooks.collect::<Result<_, ServeError>>()?;
    Ok(Events::open(settings, webhooks, key_mask.clone(), clock)?)
}

/// Opens the file for recorded requests. Entry values are hashed with `key_mask`, or with a random
/// secret if `key_mask` leaves keys unchanged.
fn open_recorder(record: RecordConfig, key_mask: &KeyMask) -> Result<RequestRecorder, ServeError> {
    let mask = if key_mask.is_hashed() {
        key_mask.clone()
    } else {
        KeyMask::random()?
    };
    let path = record.to.clone();
    RequestRecorder::open(record, mask).map_err(|source| ServeError::Record { path, source })
}

/// Restores the snapshot into `store`. Returns the outstanding reservations in the snapshot.
fn restore(
    store: &MemoryStore,
    snapshot: &Snapshot,
    clock: &Clock,
) -> Result<Vec<Vec<u8>>, ServeError> {
    let path = &snapshot.path;
    let restored = snapshot::restore(store, path, clock.now());
    match restored.map_err(|source| ServeError::Snapshot {
        path: path.clone(),
        source,
    })? {
        RestoreOutcome::Nothing => tracing::info!(file = %path.display(), "no snapshot yet"),
        RestoreOutcome::Restored { keys, reservations } => {
            tracing::info!(file = %path.display(), keys, "restored the counters");
            return Ok(reservations);
        }
        RestoreOutcome::SetAside(aside) => tracing::error!(
            file = %path.display(), kept_as = %aside.display(),
            "snapshot is damaged and was renamed to `kept_as`; starting with empty counters"
        ),
    }
    Ok(Vec::new())
}

/// Restores the outstanding reservations of a snapshot.
fn restore_reservations(limiter: &ServerLimiter, outstanding: &[Vec<u8>]) {
    if outstanding.is_empty() || limiter.reservations().are_off() {
        return;
    }
    let restored = limiter.restore_reservations(outstanding);
    tracing::info!(
        restored,
        not_restored = outstanding.len() - restored,
        "restored the outstanding reservations"
    );
}

/// Checks at startup whether the snapshot can be written. An error is logged and recorded, so that
/// the status page is correct even before the first snapshot is written.
fn try_snapshot(snapshot: &Snapshot, limiter: &ServerLimiter) {
    let path = &snapshot.path;
    if let Some(error) =
        preflight::folder_error(path).or_else(|| snapshot::check_writable(path).err())
    {
        tracing::error!(
            file = %path.display(), "a restart will lose the counters: {error}; make the path writable, or fix `store.memory.snapshot`"
        );
        let problem = format!("cannot write the snapshot {}: {error}", path.display());
        limiter
            .snapshots()
            .fail_startup_check(problem, limiter.now());
        limiter.metrics().note_snapshot_failure();
    }
}
